"""Events on their way through a line of text."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from prefect_elastic_train.core import events
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import MAX_EVENT_BYTES
from prefect_elastic_train.core.outcomes import Outcome

BASE = {"sequence": 7, "at": 1234.5, "attempt": 3}

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
        previous_end="driver_lost: killed",
        started_from="/runs/cifar/b",
        **BASE,
    ),
    ev.StateChanged(state="RUNNING", **BASE),
    ev.WaitingForCapacity(
        possible_workers=1,
        min_workers=2,
        resources_per_worker={"GPU": 1.0},
        missing="1 more worker",
        since=1200.5,
        **BASE,
    ),
    ev.WorkerGroupStarted(world_size=4, checkpoint="a", ranks={"10.0.0.1:77": 0}, **BASE),
    ev.WorkerGroupResized(
        old_size=2,
        new_size=4,
        reason="patience",
        waited_seconds=12.5,
        reports_lost=3,
        seconds_lost=7.5,
        **BASE,
    ),
    ev.WorkerFailed(
        errors={"0": "Traceback\n  …\nValueError: ümlaut"},
        also={"0": [1, 2]},
        retried=True,
        gives_up="no",
        reports_lost=3,
        **BASE,
    ),
    ev.WorkersPreempted(
        errors={"1": "node drained"}, also={"1": [7]}, retried=False, gives_up="no", reports_lost=1, **BASE
    ),
    ev.Reported(index=9, metrics={"loss": 0.5, "text": "x", "none": None}, world_size=4, **BASE),
    ev.CheckpointCommitted(index=9, checkpoint="a", size_bytes=10, metrics={"loss": 0.5}, world_size=4, **BASE),
    ev.CheckpointStalled(seconds=2.5, **BASE),
    ev.CheckpointTaken(checkpoint="checkpoint_a", where="step 9", **BASE),
    ev.LoopWarned(
        problem="checkpoint-ignored", message="a", checkpoint="b", ranks=[1], again=0.5, is_redone=True, **BASE
    ),
    ev.StorageWaited(who="ranks", seconds=12.5, tries=7, last="SlowDown", **BASE),
    ev.RunRecalled(report={"run_name": "mnist", "curves": {}}, **BASE),
    ev.ControllerAlive(doing="RUNNING", seconds=1.5, callback_errors=2, **BASE),
    ev.AttemptEnded(
        outcome=Outcome.USER_ERROR, message="why", already_finished=True, final=True, result={"a": 1}, **BASE
    ),
]

_by_kind = pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)


def test_the_events_in_the_tests_are_all_there_are() -> None:
    kinds = set(get_args(get_args(ev.Event)[0]))
    defined = {
        found
        for _, found in inspect.getmembers(events, inspect.isclass)
        if issubclass(found, BaseModel) and "kind" in found.model_fields
    }
    assert {type(event) for event in EVENTS} == kinds == defined
    assert len({event.kind for event in EVENTS}) == len(EVENTS)


@_by_kind
def test_an_event_comes_back_as_it_was(event: ev.Event) -> None:
    text = ev.encode_event(event)
    assert "\n" not in text
    assert ev.decode_event(text) == event
    assert ev.decode_event(text.encode() + b"\n") == event
    for name, field in type(event).model_fields.items():
        if name != "kind":
            assert getattr(event, name) != field.get_default(), f"{name} of {event.kind} is not told from its default"


@_by_kind
def test_a_field_of_a_newer_version_is_passed_over(event: ev.Event) -> None:
    text = json.dumps({**json.loads(ev.encode_event(event)), "colour": "green"})
    assert ev.decode_event(text) == event


@_by_kind
def test_a_torn_event_is_none(event: ev.Event) -> None:
    text = ev.encode_event(event)
    assert ev.decode_event(text[: len(text) // 2]) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[]",
        "null",
        "epoch 3: loss 0.5",
        '{"kind": "danced"}',
        '{"kind": "reported"}',
        '{"kind": "attempt_ended", "outcome": "evaporated"}',
        '{"kind": "state_changed", "state": 7}',
        b"\xff\xfe",
        b"\x00",
    ],
)
def test_a_line_that_is_no_event_of_this_version_is_none(line: str | bytes) -> None:
    assert ev.decode_event(line) is None


_values: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), _values))
def test_metrics_come_back_whatever_they_are(metrics: dict[str, Any]) -> None:
    try:
        json.dumps(metrics).encode() and str(metrics).encode()
    except UnicodeEncodeError:  # text that UTF-8 has no form for: its own test
        return
    event = ev.Reported(metrics=metrics, world_size=1)
    assert ev.decode_event(ev.encode_event(event)) == event


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_told_as_it_is(loss: float) -> None:
    event = ev.decode_event(ev.encode_event(ev.Reported(metrics={"loss": loss}, world_size=1)))
    assert isinstance(event, ev.Reported)
    assert repr(event.metrics["loss"]) == repr(loss)


@pytest.mark.parametrize(
    "event",
    [
        ev.WorkerFailed(errors={"0": "no such file: 'caf\udce9.txt'"}, retried=True),
        ev.Reported(metrics={"name": "caf\udce9"}, world_size=1),
        ev.AttemptEnded(outcome=Outcome.USER_ERROR, message="no such file: 'caf\udce9.txt'"),
    ],
)
def test_text_that_utf8_has_no_form_for_does_not_stop_an_event(event: ev.Event) -> None:
    # A file name in another encoding, as Python reads it from a directory, ends up in an error message.
    decoded = ev.decode_event(ev.encode_event(event))
    assert decoded is not None
    assert decoded.kind == event.kind
    assert "caf" in str(decoded)


@pytest.mark.parametrize(
    "event",
    [
        ev.AttemptStarted(run_name="mnist", run_uri="/runs/mnist", notes=["a checkpoint is damaged"] * 100_000),
        ev.ClusterConnected(address="auto", resources={f"node:10.{n >> 8}.{n & 255}.1": 1.0 for n in range(50_000)}),
        ev.WorkerGroupStarted(world_size=50_000, ranks={f"10.0.0.1:{rank}": rank for rank in range(50_000)}),
        ev.WorkerFailed(errors={str(rank): "\x1b[31mcaf\udce9 " * 30_000 for rank in range(10)}, retried=True),
        ev.Reported(metrics={"a" * 1_000_000: ["🙂" * 1_000_000] * 2}, world_size=1),
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
    assert "is cut from" in caplog.text or "bytes left out" in text
