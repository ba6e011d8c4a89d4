"""For which flow run the trainings of subflows are, and what they are called, over a retry of the calling flow run."""

import asyncio
from datetime import datetime, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, tags, task
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_elastic_train.orchestration import position
from prefect_elastic_train.orchestration.task import make_training

#: Where it was asked, the run's name and whose it is; and what its events relate to.
asked: list[tuple[str, str, str]] = []
related: dict[str, tuple[dict[str, str], ...]] = {}


@pytest.fixture(autouse=True)
def _nothing_asked(api: str) -> None:
    asked.clear()


def _loop() -> None:
    """A train loop."""


def _ask(where: str) -> None:
    """Do what elastic_train does first."""
    training = make_training(_loop)
    asked.append((where, training.request.run_name, training.request.owner.describe()))
    related[where] = training.position.related


@flow(name="child")
def _child(where: str) -> None:
    _ask(where)
    _ask(f"{where}, again")


@flow(name="middle")
def _middle(where: str) -> None:
    _child(where)


@task
def _in_task(where: str) -> None:
    _child(where)


@flow(name="parent", retries=1)
def _parent(tries: list[int]) -> str:
    tries.append(1)
    _ask("parent")
    _child("first")
    _child("second")
    _middle("deep")
    _in_task("first in a task")
    _in_task("second in a task")
    if len(tries) == 1:
        raise ValueError("once more")
    return str(FlowRunContext.get().flow_run.id)


def test_trainings_of_subflows_keep_owner_and_name_over_a_retry_and_differ_from_each_other() -> None:
    with tags("nightly"):
        flow_run_id = _parent.with_options(validate_parameters=False)([])
    half = len(asked) // 2
    assert asked[:half] == asked[half:], "the retry asks for the same runs"
    names = {where: name for where, name, _ in asked}
    assert len(set(names.values())) == half, "each has a run of its own"
    assert all(f"of flow 'parent' (id {flow_run_id})" in owner for _, _, owner in asked)
    short = flow_run_id[-8:] if UUID(flow_run_id).version == 7 else flow_run_id[:8]
    assert names["parent"] == f"parent-{short}"
    assert names["first"] == f"child-{short}.1"
    assert names["second, again"] == f"child-{short}.2-2"
    assert names["second in a task"] == f"child-{short}.t2"
    for where in ("parent", "first", "deep", "first in a task"):
        told = {one["prefect.resource.id"] for one in related[where]}
        assert told == {f"prefect.flow-run.{flow_run_id}", "prefect.tag.nightly"}


@flow(name="child")
async def _achild(number: int) -> None:
    await asyncio.sleep(0.1 * (3 - number))
    _ask(str(number))


@flow(name="parent")
async def _aparent() -> None:
    await asyncio.gather(*(_achild(number) for number in range(3)))


def test_subflows_at_the_same_time_are_called_by_the_order_of_their_calls() -> None:
    asyncio.run(_aparent())
    assert {where: name.rpartition(".")[2] for where, name, _ in asked} == {"0": "1", "1": "2", "2": "3"}


def test_without_an_answer_a_subflow_stands_for_itself_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(position, "_QUERY_SECONDS", 1.0)
    at = datetime.now(timezone.utc)
    flow_run = FlowRun(id=uuid4(), flow_id=uuid4(), name="lonely", parent_task_run_id=uuid4(), created=at)
    context: Any = FlowRunContext.model_construct(flow_run=flow_run, flow=_child)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        found = position.current_position(context)
    assert (found.owner.flow_run_id, found.calls) == (str(flow_run.id), ())
    assert "cannot read the parent" in caplog.text
    assert position.current_position(context) is found, "once decided, it stays"
