"""Events as lines of text, and their handlers."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.size_limits import MAX_EVENT_BYTES
from prefect_elastic_train.trackers.tracked_run import TrackedRun

#: A value of each type that an event's fields have, none of them a default.
VALUES = {
    str: "T\n…\n: ü",
    int: 7,
    int | None: 7,
    float: 1234.5,
    bool: True,
    Outcome: Outcome.USER_ERROR,
    list[str]: ["repaired\nthis"],
    list[TrackedRun]: [TrackedRun("mlflow", {"run_id": "a"}, {"tracking_uri": "/runs"}, "https://tracker")],
    list[Cause]: [Cause([0, 1], "x")],
    dict[str, int]: {"10.0.0.1:77": 1},
    dict[str, float]: {"GPU": 0.5},
    dict[str, Any]: {"loss": 0.5, "text": "x", "none": None},
    dict[str, Any] | None: {"curves": {}},
    dict[str, str]: {"node": "crashed"},
    dict[int, ev.RankUsage]: {0: ev.RankUsage(90.0, 2**30, 1)},
    Literal["checkpoint-ignored", "no-checkpoint", "ranks-wait", "no-report"]: "ranks-wait",
}
EVENTS = [
    kind(**{name: VALUES[field.annotation] for name, field in kind.model_fields.items()}) for kind in ev.KINDS.values()
]


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
    assert decoded.kind == event.kind
    assert "are left empty" in caplog.text or "bytes left out" in text
