"""`elastic-train resume`: which flow run is meant, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Running

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.flow_run_resume import find_flow_run, resume
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN


class _Api:
    """What Prefect knows: two flow runs of one name, and one of another."""

    def read_flow_runs(self, flow_run_filter: FlowRunFilter, limit: int) -> list[SimpleNamespace]:
        assert flow_run_filter.name is not None
        [name] = flow_run_filter.name.any_ or []
        found = {"nightly": [FLOW_RUN, OTHER_FLOW_RUN], "eager-otter": [OTHER_FLOW_RUN]}.get(name, [])
        return [SimpleNamespace(id=UUID(one)) for one in found][:limit]


_API: Any = _Api()


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


def test_the_name_of_a_flow_run_is_enough_if_it_has_only_one() -> None:
    assert find_flow_run(_API, "eager-otter") == UUID(OTHER_FLOW_RUN)
    for name, problem in {"nightly": "several flow runs are", "mnist": "no flow run is"}.items():
        with pytest.raises(ConfigurationError, match=f"{problem} called '{name}': use the id"):
            find_flow_run(_API, name)
