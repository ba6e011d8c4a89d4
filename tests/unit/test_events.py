"""Events as lines of text, and their handlers."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.size_limits import MAX_EVENT_BYTES

BASE = {"sequence": 7, "at": 1234.5, "attempt": 3, "step": 11}

#: One event of each kind, every field of it other than by default.
EVENTS: list[ev.Event] = [
    ev.ClusterWanted(**BASE),
    ev.ClusterConnected(address="10.0.0.1:6379", dashboard_url="10.0.0.1:8265", resources={"CPU": 4.0}, **BASE),
    ev.AttemptStarted(
        run_name="mnist",
        run_uri="/runs/mnist",
        checkpoint="a",
        notes=["repaired\nthis"],
        checkpoint_at=1100.5,
        driver_started_at=1230.5,
        counted=2,
        left={"worker failure": 3},
        previous_end="driver_lost: killed",
        started_from="/runs/cifar/b",
        inherited={"loss": 0.5},
        **BASE,
    ),
    ev.StateChanged(state="RUNNING", **BASE),
    ev.WaitingForCapacity(
        possible_workers=1, min_workers=2, resources_per_worker={"GPU": 1.0}, missing="1 GPU", since=1200.5, **BASE
    ),
    ev.WorkerGroupStarted(world_size=4, checkpoint="a", ranks={"10.0.0.1:77": 0}, **BASE),
    ev.FirstStep(world_size=4, **BASE),
    ev.WorkerGroupResized(old_size=2, new_size=4, reason="patience", waited_seconds=12.5, reports_lost=3, **BASE),
    *(
        kind(errors={"0": "T\n…\n: ü"}, also={"0": [1]}, retried=False, gives_up="no", reports_lost=3, left=1, **BASE)
        for kind in (ev.WorkerFailed, ev.WorkersPreempted)
    ),
    ev.Reported(index=9, metrics={"loss": 0.5, "text": "x", "none": None}, world_size=4, **BASE),
    ev.CheckpointCommitted(index=9, checkpoint="a", size_bytes=10, metrics={"loss": 0.5}, world_size=4, **BASE),
    ev.CheckpointStalled(seconds=2.5, **BASE),
    ev.LoopWarned(problem="checkpoint-ignored", message="a", checkpoint="b", **BASE),
    ev.SavesPlanned(plan="each 60 s", **BASE),
    ev.StandbysParked(parked=1, wanted=2, size_bytes=2**28, **BASE),
    ev.StorageWaited(who="ranks", seconds=12.5, tries=7, last="SlowDown", **BASE),
    ev.RunRecalled(report={"run_name": "mnist", "curves": {}}, **BASE),
    ev.ControllerAlive(doing="RUNNING", seconds=1.5, **BASE),
    ev.AttemptEnded(
        outcome=Outcome.USER_ERROR,
        message="why",
        already_finished=True,
        warning="w",
        final=True,
        result={"a": 1},
        **BASE,
    ),
]


def test_the_events_in_the_tests_are_all_there_are() -> None:
    assert {event.kind: type(event) for event in EVENTS} == ev.KINDS


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_comes_back_as_it_was_without_what_a_newer_version_adds(event: ev.Event) -> None:
    text = ev.encode_event(event)
    assert "\n" not in text
    assert ev.decode_event(text.encode() + b"\n") == event
    assert ev.decode_event(json.dumps({**json.loads(text), "colour": "green"})) == event
    assert ev.decode_event(text[: len(text) // 2]) is None
    for name, field in type(event).model_fields.items():
        assert getattr(event, name) != field.get_default(), f"{name} of {event.kind} is not told from its default"


@pytest.mark.parametrize(
    "line",
    ["", "[]", "epoch 3", '{"kind": "danced"}', '{"kind": ["reported"]}', '{"kind": "reported"}', b"\xff"],
)
def test_a_line_that_is_no_event_of_this_version_is_none(line: str | bytes) -> None:
    assert ev.decode_event(line) is None


_texts = st.text(st.characters(exclude_categories=["Cs"]))
_values: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | _texts


@given(st.dictionaries(_texts, _values))
def test_metrics_come_back_whatever_they_are(metrics: dict[str, Any]) -> None:
    event = ev.Reported(metrics=metrics, world_size=1)
    decoded = ev.decode_event(ev.encode_event(event))
    assert isinstance(decoded, ev.Reported)
    assert repr(decoded.metrics) == repr(metrics), "also a diverged loss"


@pytest.mark.parametrize(
    "event",
    [
        ev.AttemptStarted(run_name="mnist", run_uri="/runs/mnist", notes=["a checkpoint is damaged"] * 50_000),
        ev.WorkerGroupStarted(world_size=50_000, ranks={f"10.0.0.1:{rank}": rank for rank in range(50_000)}),
        ev.AttemptEnded(outcome=Outcome.USER_ERROR, message="\0" * 5_000_000),
    ],
    ids=lambda event: event.kind,
)
def test_no_event_is_larger_than_its_bound_and_none_is_cut_silently(
    event: ev.Event, caplog: pytest.LogCaptureFixture
) -> None:
    text = ev.encode_event(event)
    assert len(text.encode()) <= MAX_EVENT_BYTES
    decoded = ev.decode_event(text)
    assert decoded is not None
    assert decoded.kind == event.kind
    assert "are left empty" in caplog.text or "bytes left out" in text


class _Counter(ev.EventHandler):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_report(self, event: ev.Report) -> None:
        self.calls.append(f"report: {event.kind}")

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.calls.append("commit")


def test_an_event_is_handled_by_the_method_of_its_kind_or_of_its_base_class() -> None:
    counter = _Counter()
    for event in EVENTS:
        counter.handle(event)
    assert counter.calls == ["report: reported", "commit"]


@pytest.mark.parametrize("bases", [(ev.EventHandler,), (BaseModel, ev.EventHandler)])
def test_a_handler_of_a_kind_that_does_not_exist_is_refused_when_its_class_is_defined(bases: tuple[type, ...]) -> None:
    with pytest.raises(TypeError, match="Mistyped handles kinds of events that do not exist: on_checkpoint_comitted"):
        types.new_class("Mistyped", bases, exec_body=lambda body: body.update(on_checkpoint_comitted=print))
