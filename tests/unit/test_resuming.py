"""Whose a run is: how `elastic-train resume` finds the flow run by the name of a run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Running

from prefect_elastic_train.core.outcomes import ConfigurationError, Outcome
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.orchestration.resuming import flow_run_of, resume
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import end_attempt
from prefect_elastic_train.runs.model import PRUNER
from prefect_elastic_train.storage.opening import Storage, open_storage
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN, begin, claim, private_folder, tear


class _Api:
    """What Prefect knows: two flow runs of one name, and one of another."""

    def read_flow_runs(self, flow_run_filter: FlowRunFilter, limit: int) -> list[SimpleNamespace]:
        assert flow_run_filter.name is not None
        [name] = flow_run_filter.name.any_ or []
        found = {"nightly": [FLOW_RUN, OTHER_FLOW_RUN], "eager-otter": [OTHER_FLOW_RUN]}.get(name, [])
        return [SimpleNamespace(id=UUID(one)) for one in found][:limit]


_API: Any = _Api()


@pytest.fixture
def storages() -> Iterator[list[Storage]]:
    """Two directories, the first with a run."""
    with private_folder() as first, private_folder() as second:
        found = [open_storage(LocalStorageSettings(path=folder)) for folder in (first, second)]
        begin(found[0].run("mnist"))
        yield found


def test_a_flow_run_that_no_runner_takes_is_refused_with_what_to_do_after_it_is_lost() -> None:
    said: list[str] = []
    states: list[str | None] = []
    flow_run = FlowRun(id=UUID(FLOW_RUN), flow_id=UUID(OTHER_FLOW_RUN), name="eager-otter", state=Running())
    api: Any = SimpleNamespace(
        read_flow_run=lambda _: flow_run,
        set_flow_run_state=lambda _, state: states.append(state.name) or SimpleNamespace(state=state),
    )
    with pytest.raises(ConfigurationError, match=f"no deployment.* flow-run retry {UUID(FLOW_RUN)}"):
        said.extend(resume(api, flow_run.id, force=True))
    assert (states, said) == (["Lost"], ["eager-otter was Running and is Lost (Crashed) now"])
    flow_run.state = Crashed()
    with pytest.raises(ConfigurationError, match="no deployment"):
        said.extend(resume(api, flow_run.id))
    assert states == ["Lost"]


def test_a_run_belongs_to_the_flow_run_of_its_newest_attempt_or_that_which_claimed_it(storages: list[Storage]) -> None:
    assert flow_run_of(_API, "mnist", storages) == UUID(FLOW_RUN)
    store = storages[0].run("mnist")
    end_attempt(store, 1, Outcome.CANCELLED.value, "")
    begin(store, claim(OTHER_FLOW_RUN, resume=True))
    assert flow_run_of(_API, "mnist", storages) == UUID(OTHER_FLOW_RUN)
    tear(store, layout.attempt_name(2))
    assert flow_run_of(_API, "mnist", storages) == UUID(FLOW_RUN)


def test_a_run_that_no_storage_or_more_than_one_has_is_refused_with_where_was_looked(storages: list[Storage]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        flow_run_of(_API, "cifar", storages)
    for part in ("'cifar'", *(storage.uri for storage in storages)):
        assert part in str(refused.value)
    with pytest.raises(ConfigurationError, match="--storage"):
        flow_run_of(_API, "cifar", [])
    begin(storages[1].run("mnist"), claim(OTHER_FLOW_RUN))
    with pytest.raises(ConfigurationError, match="in several of"):
        flow_run_of(_API, "mnist", storages)


def test_a_name_that_no_run_has_may_be_that_of_one_flow_run(storages: list[Storage]) -> None:
    assert flow_run_of(_API, "eager-otter", storages) == UUID(OTHER_FLOW_RUN)
    with pytest.raises(ConfigurationError, match="several flow runs are called 'nightly'"):
        flow_run_of(_API, "nightly", storages)


@pytest.mark.parametrize("owner", [{"flow_run": "3" * 32, "flow_run_name": ""}, {"flow_run": PRUNER}])
def test_a_run_of_no_flow_run_is_refused_with_the_way_to_go_on(storages: list[Storage], owner: dict[str, str]) -> None:
    begin(storages[1].run("cifar"), claim(**owner))
    with pytest.raises(ConfigurationError, match="run_name='cifar' and resume=True"):
        flow_run_of(_API, "cifar", storages)
