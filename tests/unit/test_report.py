"""The report of a run: its content, its bounded size, and that no text of a run breaks it."""

from __future__ import annotations

import base64
import itertools
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.report.descriptions import describe
from prefect_elastic_train.report.formats import duration, size
from prefect_elastic_train.report.markdown import headline, render, summary_line
from prefect_elastic_train.report.markdown import number as in_words
from prefect_elastic_train.report.pictures import draw
from prefect_elastic_train.report.run_report import MAX_POINTS, Curve, RunReport
from tests.unit.support import examples
from tests.unit.test_events import EVENTS

T = 1_763_770_000.0


def started(attempt: int = 1, at: float = 10, **more: Any) -> ev.AttemptStarted:
    return ev.AttemptStarted(
        at=T + at, attempt=attempt, run_name="llama", run_uri="/runs/llama", driver_started_at=T + at - 10, **more
    )


def group(at: float = 20, size: int = 4) -> ev.WorkerGroupStarted:
    return ev.WorkerGroupStarted(at=T + at, attempt=1, world_size=size)


def reported(at: float, **metrics: Any) -> ev.Reported:
    return ev.Reported(at=T + at, attempt=1, metrics=metrics, world_size=4)


def committed(at: float, name: str = "a", **metrics: Any) -> ev.CheckpointCommitted:
    return ev.CheckpointCommitted(at=T + at, attempt=1, checkpoint=name, size_bytes=3 * 2**20, metrics=metrics)


def failed(at: float = 60, **more: Any) -> ev.WorkerFailed:
    return ev.WorkerFailed(**{"at": T + at, "attempt": 1, "errors": {"1": "ValueError: nan"}, "retried": True, **more})


def ended(outcome: Outcome, at: float = 100, **more: Any) -> ev.AttemptEnded:
    return ev.AttemptEnded(at=T + at, attempt=1, outcome=outcome, **more)


def capacity(at: float, missing: str = "1 GPU", **more: Any) -> ev.WaitingForCapacity:
    needs = {"possible_workers": 1, "min_workers": 2, "resources_per_worker": {"GPU": 1.0}}
    return ev.WaitingForCapacity(at=T + at, attempt=1, missing=missing, **needs, **more)


def report_of(*events: ev.Event, **policy: Any) -> RunReport:
    report, reports = RunReport(run_name="llama", **policy), 0
    for event in events:
        if isinstance(event, ev.Report):  # as the driver numbers them
            reports += 1
            event = event.model_copy(update={"index": reports})
        report.add(event)
    return report


RESIZED = ev.WorkerGroupResized(at=T + 60, attempt=1, old_size=4, new_size=6, reason="commit", waited_seconds=12)
PREEMPTED = ev.WorkersPreempted(at=T + 60, attempt=1, errors={}, retried=True, reports_lost=2)


@pytest.mark.parametrize(
    ("events", "state", "live"),
    [
        ([], "starting", True),
        ([started(), ev.StateChanged(state="SCHEDULING")], "starting workers", True),
        ([started(), capacity(12)], "waiting for capacity", True),
        ([started(), group()], "training", True),
        ([started(), group(), ev.StateChanged(state="PREEMPTING")], "draining", True),
        ([started(), group(), PREEMPTED], "restarting workers", True),
        ([started(), group(), RESIZED], "resizing", True),
        ([started(), group(), ev.StateChanged(state="SHUTTING_DOWN")], "winding up", True),
        ([started(), group(), ended(Outcome.DRIVER_LOST)], "restarting the driver", True),
        ([started(), group(), ended(Outcome.CLUSTER_LOST, final=True)], "failed", False),
        ([started(), group(), ended(Outcome.CANCELLED)], "cancelled", False),
        ([started(), group(), ended(Outcome.TIMED_OUT)], "timed out", False),
        ([started(), group(), ended(Outcome.COMPLETED)], "completed", False),
        ([started(), group(), ended(Outcome.SUPERSEDED)], "training", True),
        ([started(), group(), ended(Outcome.DRIVER_LOST), started(2, 110)], "starting", True),
    ],
)
def test_a_report_has_the_state_of_the_run(events: list[ev.Event], state: str, live: bool) -> None:
    report = report_of(*events)
    assert (report.state, report.is_live) == (state, live)
    assert headline(report) == state.capitalize()


WAITED = ev.StorageWaited(at=T + 60, who="ranks", seconds=4.5, tries=7, last="SlowDown")
IGNORED = ev.LoopWarned(at=T + 60, problem="checkpoint-ignored", message="it never asked", checkpoint="a")


@pytest.mark.parametrize(
    ("event", "kind", "what", "why"),
    [
        (started(), "begin", "attempt 1 starts from the beginning", ""),
        (
            failed(reports_lost=3),
            "failure",
            "the beginning; reports since then, which are done again: 3",
            "rank 1: ValueError: nan",
        ),
        (failed(retried=False, gives_up="no"), "failure", "worker failure; no", "rank 1: ValueError: nan"),
        (PREEMPTED, "preemption", "preemption; the worker group is restarted from the beginning", "a node was drained"),
        (RESIZED, "resize", "from 4 to 6 workers", "waited 12 s"),
        (
            capacity(60),
            "capacity",
            "waiting for capacity",
            "workers fit, with {'GPU': 1.0} each; lacking: 1 GPU",
        ),
        (
            WAITED,
            "storage",
            "the ranks waited 4.5 s for the storage",
            "7 requests failed and were retried; last: Slow",
        ),
        (IGNORED, "loop", "it never asked", ""),
    ],
)
def test_an_event_for_users_is_an_incident(event: ev.Event, kind: str, what: str, why: str) -> None:
    incident = report_of(event).incidents[-1]
    assert (incident.kind, incident.at) == (kind, event.at)
    assert (what in incident.message, why in incident.reason) == (True, True)
    assert ("done again" in incident.message) == (getattr(event, "reports_lost", 0) > 0)


def test_the_incident_of_a_new_driver_has_its_reason_and_repairs_follow() -> None:
    lost = ended(Outcome.DRIVER_LOST, message="killed by SIGKILL\nmore")
    assert report_of(started(), lost, started(2)).incidents[-1].reason == "driver_lost: killed by SIGKILL"
    told = report_of(started(), lost, started(2, previous_end="cluster_lost: the head node is gone"))
    assert told.incidents[-1].reason == "cluster_lost: the head node is gone"
    silent = report_of(started(), started(2, checkpoint="a", notes=["a was dropped", "b too"]))
    whats = ["attempt 2: a new driver resumes from checkpoint a", "a was dropped", "b too"]
    assert [incident.message for incident in silent.incidents[1:]] == whats
    assert silent.incidents[1].reason == "the previous driver exited without a final event"
    assert silent.driver_restarts == 1


def test_consecutive_waits_for_capacity_or_the_storage_are_one_incident() -> None:
    report = report_of(started(), capacity(20, since=T + 15), capacity(40), capacity(60), group(70), capacity(80))
    assert [incident.at - T for incident in report.incidents if incident.kind == "capacity"] == [15, 80]
    for _ in range(3):
        report.add(WAITED)
    (waited,) = [incident for incident in report.incidents if incident.kind == "storage"]
    assert waited.message == "the ranks waited 4.5 s for the storage, 14 s in all so far"


def test_a_wait_for_the_storage_is_shown_while_it_lasts() -> None:
    report = report_of(started(), group(), ev.ControllerAlive(doing="waiting for the storage", seconds=42))
    assert (report.state, report.detail) == ("training", "waiting for the storage for 42 s")
    report.add(ev.ControllerAlive(doing="RUNNING", seconds=1))
    assert report.detail == ""


def _steps(first: int, last: int, total: int, begin: float = 30, seconds: float = 1) -> list[ev.Event]:
    return [reported(begin + (step - first) * seconds, step=step, total_steps=total) for step in range(first, last + 1)]


@pytest.mark.parametrize(
    ("metrics", "fraction", "words"),
    [
        ({"progress": 0.5, "step": 1, "total_steps": 10}, 0.5, "50.0%"),
        ({"epoch": 3, "num_epochs": 10, "step": 12345}, 0.3, "epoch 3 of 10"),
        ({"global_step": 1500, "max_steps": 3000}, 0.5, "global step 1,500 of 3,000"),
        ({"step": 1200, "total_steps": 1000}, 1.0, "step 1,200 of 1,000"),
        ({"step": math.nan, "total_steps": 10}, None, ""),
        ({"step": 5, "total_steps": math.inf, "progress": 50}, None, ""),
    ],
)
def test_progress_follows_from_metrics(metrics: dict[str, Any], fraction: float | None, words: str) -> None:
    report = report_of(started(), group(), reported(30, **metrics))
    assert (report.progress and pytest.approx(report.progress.fraction)) == fraction
    assert headline(report).startswith(f"Training: {words}" if words else "Training")
    assert "left" not in summary_line(report, T + 40), "of one report nobody knows the pace"


def test_how_much_there_is_to_do_may_stand_in_the_loops_configuration() -> None:
    report = RunReport(run_name="lightning", totals={"max_epochs": 20, "max_steps": 8})
    for event in (started(), group(), reported(30, epoch=5, step=2, max_steps=4)):
        report.add(event)
    assert headline(report) == "Training: step 2 of 4 (50.0%)", "what the loop says counts"
    report.add(reported(31, epoch=5))
    assert headline(report) == "Training: epoch 5 of 20 (25.0%)"


def test_a_report_that_does_not_say_how_far_it_is_leaves_the_progress_as_it_was() -> None:
    report = report_of(started(), group(), reported(30, step=99, total_steps=100), reported(31, val_accuracy=0.9))
    assert headline(report) == "Training: step 99 of 100 (99.0%)"
    report.add(ended(Outcome.COMPLETED))
    assert report.progress is not None
    assert report.progress.fraction == 1.0


def test_the_time_that_is_left_follows_from_the_pace_since_the_last_restart() -> None:
    report = report_of(started(), group(), *_steps(1, 101, 201, seconds=2))
    assert report.progress is not None
    assert report.progress.remaining_seconds == pytest.approx(200, rel=0.05)
    assert "about 3.3 min" in summary_line(report, T + 240)
    for event in (failed(1000), group(5000), *_steps(51, 101, 201, begin=5010, seconds=4)):
        report.add(event)
    assert report.progress.remaining_seconds == pytest.approx(400, rel=0.05)


def test_steps_and_samples_a_second_are_those_since_the_last_restart_and_the_end_is_told_by_the_clock() -> None:
    of_session = [{"samples": 640 * step} for step in (0, 50, 100)]
    events = [reported(30 + 5 * n, step=50 * n, total_steps=1000, **more) for n, more in enumerate(of_session)]
    report = report_of(started(), group(), *events, ev.SavesPlanned(at=T + 40, plan="each 90 s: a save blocks 2 s"))
    text = render(report, T + 45)
    for words in ("about 1.5 min left, until 00:08:50 UTC", "6,400 samples a second · 10 steps a second"):
        assert words in text, text
    assert "samples 64" not in text
    assert "### Checkpoints\n\nThe loop saves each 90 s: a save blocks 2 s." in text
    report.add(failed(50))
    assert "a second" not in summary_line(report, T + 60)
    for event in (group(100), reported(110, iteration=4), reported(120, iteration=9)):
        report.add(event)
    assert "0.5 iterations a second" in summary_line(report, T + 130), "a loop without a session, too"


def test_a_supervisor_that_comes_later_takes_what_was_and_keeps_its_own_name() -> None:
    before = report_of(started(), group(), reported(30, loss=1), committed(30, loss=1), failed(40), score_attribute="x")
    before.run_name = "other"
    recalled = RunReport(run_name="llama", score_attribute="loss", score_order="min", dashboard_url="http://ray")
    for strange in ({}, {"run_name": "x", "attempt": "many"}, {"run_name": "x", "curves": [1]}):
        recalled.add(ev.RunRecalled(report=strange))  # of another version
    recalled.add(ev.RunRecalled(report=before.model_dump(mode="json")))
    own = {"run_name", "score_attribute", "score_order", "dashboard_url", "state", "detail"}
    assert recalled.model_dump(exclude=own) == before.model_dump(exclude=own)
    assert (recalled.run_name, recalled.score_attribute, recalled.dashboard_url) == ("llama", "loss", "http://ray")
    recalled.add(started(2, 50))
    assert [incident.kind for incident in recalled.incidents] == ["begin", "failure", "driver"]


def test_curves_are_over_the_reports_without_what_was_done_again() -> None:
    losses = [reported(30 + n, loss=n) for n in range(1, 6)]
    report = report_of(started(), group(), *losses[:2], committed(33, "kept", loss=3), *losses[3:], failed(), group(70))
    assert report.curves["loss"].points == [(n, n) for n in range(1, 6)]
    for index, loss in enumerate((7, 8, 9), start=6):
        report.add(reported(70, loss=loss).model_copy(update={"index": index}))
    assert report.curves["loss"].points == [(1, 1), (2, 2), (3, 3), (4, 7), (5, 8), (6, 9)]


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1, 1000, 10_000])
def test_a_long_curve_keeps_its_peaks_and_little_else(count: int) -> None:
    values = {float(x): math.exp(-x / 3_000) for x in range(count)} | {17.0: 9.0, 300.0: -50.0, count - 2.0: 8.0}
    curve = Curve()
    for place, (x, y) in enumerate(values.items()):
        if place == count // 2:
            curve = Curve.model_validate_json(curve.model_dump_json())
        curve.add(x, y)
    points = curve.points
    assert min(count, MAX_POINTS / 4) <= len(points) <= MAX_POINTS
    assert {(x, values[x]) for x in (17.0, 300.0, count - 2.0, count - 1.0)} <= set(points)
    assert points == sorted(points)
    assert all(values[x] == y for x, y in points)
    assert max(later[0] - earlier[0] for earlier, later in itertools.pairwise(points)) <= 20 * count / MAX_POINTS


@pytest.mark.parametrize(("order", "best"), [("max", "c"), ("min", "e")])
def test_the_best_checkpoint_is_the_best_by_the_score_and_of_two_equals_the_later(order: str, best: str) -> None:
    scores = {"a": math.nan, "b": 0.9, "c": 0.9, "d": 0.1, "e": 0.1, "f": math.nan, "g": "high", "h": 0.5}
    made = [committed(30, name, acc=score) for name, score in scores.items()]
    report = report_of(started(), group(), *made, committed(60, "i"), score_attribute="acc", score_order=order)
    assert report.best is not None
    assert report.best.name == best
    (row,) = [line for line in render(report, T + 100).splitlines() if "**best**" in line]
    assert f"`{best}`" in row


@pytest.mark.parametrize(("checkpoint", "best"), [("c", "c"), ("b", "b"), ("a", "a"), ("", None)])
def test_what_an_attempt_does_not_go_on_from_is_not_the_best(checkpoint: str, best: str | None) -> None:
    made = [committed(30 + n, name, acc=n) for n, name in enumerate("abc")]
    report = report_of(started(), group(), *made, started(2, 50, checkpoint=checkpoint), score_attribute="acc")
    assert (report.best.name if report.best else None) == best
    assert [made.name for made in report.checkpoints] == ["a", "b", "c"][: "abc".find(checkpoint) + bool(checkpoint)]
    report.add(started(3, 60, checkpoint="another run's", inherited={"acc": -1}))
    assert ([made.name for made in report.checkpoints], report.best and report.best.name) == ([], "another run's")
    report.add(committed(70, "d", acc=1))
    report.add(started(4, 80, checkpoint=physical_name("copy", 0)))  # which was reported without metrics
    assert (report.checkpoints, report.best) == ([], None)


@pytest.mark.parametrize(
    ("kept", "best"), [([("b", {"acc": 0.9})], "b"), ([("b", {"acc": 0.3})], "b"), ([("b", {})], "a"), ([], "a")]
)
def test_the_result_says_which_checkpoint_is_the_best_in_the_end(kept: list[Any], best: str) -> None:
    made = [committed(30, "a", acc=0.5), committed(40, "b", loss=2), committed(50, "c", loss=1)]
    result = {"best_checkpoints": [{"uri": f"/runs/llama/{name}", "metrics": metrics} for name, metrics in kept]}
    report = report_of(started(), *made, ended(Outcome.COMPLETED, result=result), score_attribute="acc")
    assert report.best is not None
    assert report.best.name == best


def test_an_old_best_checkpoint_is_still_shown() -> None:
    made = [committed(30 + number, f"c{number}", acc=-number) for number in range(50)]
    text = render(report_of(started(), *made, score_attribute="acc"), T + 100)
    assert "`c0`" in text


def test_a_report_of_thousands_of_reports_with_faults_is_small() -> None:
    report, text, at = RunReport(run_name="llama", score_attribute="loss", score_order="min"), "a text " * 1000, 0.0
    for number in range(3000):
        at, metrics = 30.0 + number, {"step": number, "total_steps": 3000, "loss": math.sin(number), "norm": number}
        made = committed(at, f"c{number}", **metrics) if number % 10 == 0 else reported(at, **metrics)
        report.add(made.model_copy(update={"index": number + 1}))
        if number % 30 == 29:
            report.add(failed(at, errors={"0": f"RuntimeError: {text}", "1": "The actor died"}))
        if number % 500 == 499:
            report.add(ended(Outcome.DRIVER_LOST, at, message=text))
            report.add(started(2 + number // 500, at, notes=[text] * 3))
            assert len(report.model_dump_json()) < 60_000
            report.add(capacity(at))
        if number % 30 == 29:
            report.add(group(at))
    assert (len(report.incidents), report.incidents[-1].at) == (60, T + at)
    assert len(render(report, T + at).encode()) < 60_000
    assert len(render(report, T + at, draw(report, T + at)).encode()) < 290_000


def test_the_text_is_complete_without_pictures() -> None:
    report = report_of(
        ev.ClusterConnected(address="10.0.0.1:6379", dashboard_url="http://10.0.0.1:8265"),
        started(),
        group(20),
        *_steps(1, 50, 100),
        committed(81, "ckpt-51", step=51, total_steps=100, loss=0.125),
        failed(85, reports_lost=3),
        group(90),
        reported(100, step=52, total_steps=100, loss=0.0625, tracker="https://track.er/run/7?tab=1", odd="http://a b"),
    )
    report.flow_run_url = "http://prefect/runs/flow-run/1"
    text = render(report, T + 110)
    for words in (
        "## Training: step 52 of 100 (52.0%)",
        "**4 workers** · attempt 1",
        "loss 0.0625",
        "last checkpoint 29.0 s ago",
        "1 worker failure · goodput",
        "worker failure; the worker group is restarted from checkpoint ckpt-51; reports since then, which are done "
        "again: 3; training again after 15.0 s**"
        "  \n  "
        "rank 1: ValueError: nan\n",
        "restarts after failures",
        "`ckpt-51`",
        "`/runs/llama`",
        "- Ray dashboard <http://10.0.0.1:8265>",
        "- flow run <http://prefect/runs/flow-run/1>",
        "- tracker <https://track.er/run/7?tab=1>",
        "odd http://a b",
    ):
        assert words in text, words
    assert text.count("track.er") == 1, "it is no metric"
    assert "![" not in text


def test_a_recovery_ends_with_the_first_step_or_report_of_a_group() -> None:
    unfinished = report_of(started(), group(20), failed(85), reported(86), group(90))
    assert "train after" not in unfinished.incidents[-1].message, "its loop has not begun a step"
    first = ev.FirstStep(at=T + 97, world_size=4)
    events = [started(), group(20), failed(85), group(90), first, reported(98), started(2, 120), group(130)]
    report = report_of(*events, reported(137, world_size=4))
    assert "training again after 12.0 s" in report.incidents[-2].message
    assert "training again after 27.0 s" in report.incidents[-1].message


def test_values_are_formatted_briefly() -> None:
    times = {-1: "0.0 s", 42: "42.0 s", 60: "1.0 min", 3600: "1.0 h", 5400: "1.5 h", 36 * 3600: "1.5 d"}
    assert {seconds: duration(seconds) for seconds in times} == times
    sizes = {0: "0 Bytes", 1023: "1023 Bytes", 3 * 2**20: "3.0 MiB", 3 * 2**40: "3.0 TiB"}
    assert {number: size(number) for number in sizes} == sizes
    assert [in_words(value) for value in (12345, 0.123456, math.nan, "a|b")] == ["12,345", "0.1235", "nan", "a\\|b"]


def test_pictures_are_svg_without_a_ground_of_their_own_whatever_metrics_are_called() -> None:
    assert draw(RunReport(run_name="llama"), T) == {}, "nothing yet"
    names = ("loss", "a|b", "$x^2$", "<&>\"'", "a--b-->", "\\frac{$", "a\x1b[31mb\x00\uffff\n", "\ud800")
    values = ([0.5], [0.0, 0.0], [1e300, -1e300, 5e-324], [math.inf, 1.0], [2**70], [1, 2], [3, 2, 1], [-1, 0])
    said = [reported(30, **{name: value}) for name, found in zip(names, values, strict=True) for value in found]
    report = report_of(started(), group(20), *said, failed(85), group(90), reported(91))
    assert len(report.curves) == len(names)
    pictures = draw(report, T + 200)
    assert set(pictures) == {"metrics", "workers"}
    for uri in pictures.values():
        svg = ElementTree.fromstring(base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        _, _, width, height = map(float, svg.get("viewBox", "").split())
        ground = f"L {width:g} {height:g} "
        shapes = [part for part in svg.iter() if ground in part.get("d", "").replace("\n", "")]
        assert all("fill: none" in shape.get("style", "") for shape in shapes)
        assert not [part for part in svg.iter() if part.tag.endswith(("script", "image", "foreignObject"))]


HOSTILE = [
    "a\\|b",
    "a``|``b",
    "a\nb\r\nc\x0bd\u2028e",
    "| --- |\n| x |",
    "<script>alert(1)</script>",
    "# heading",
    "\x1b[31mred\x1b[0m\x00",
    "\\" * 299 + "|",
    "x" * 1_000_000,
    " ",
]


def _is_whole(text: str) -> None:
    tables = [block.strip("\n").split("\n") for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)]
    assert tables
    for table in tables:
        # As Prefect's UI counts a row's pipes: one behind an odd number of backslashes is escaped.
        cells = {sum(len(match[1]) % 2 == 0 for match in re.finditer(r"(\\*)\|", row)) for row in table}
        assert len(cells) == 1, table
    assert len(text.encode(errors="replace")) < 300_000
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[1:] == ["### What happened", "### Where the time went", "### Checkpoints", "### Where"]
    assert "<script" not in re.sub(r"`[^`\n]*`", "", text).replace("\\<", "")
    assert "\x1b" not in text


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:30])
def test_no_text_breaks_the_report(text: str) -> None:
    report = report_of(
        started(notes=[text], previous_end=text, checkpoint=text[:2000]),
        group(),
        reported(30, **{f"{text}{number}": 0.5 for number in range(3)}, text=text, number=math.nan),
        committed(31, text, **{f"{text}{number}": text for number in range(3)}),
        failed(40, errors={"0": text, "1": f"ValueError: {text}"}),
        capacity(45, missing=text),
        ev.StorageWaited(at=T + 46, who="ranks", seconds=9, last=text),
        ended(Outcome.DRIVER_LOST, message=text),
        started(2, 120, previous_end=text),
    )
    report.run_name = report.run_uri = text
    report.dashboard_url = f"http://{text}"
    _is_whole(render(report, T + 200))
    assert len(report.model_dump_json(exclude={"run_name", "run_uri", "dashboard_url"})) < 200_000
    report.end(T + 200, "failed", text)
    _is_whole(render(report, T + 200))
    summary_line(report, T + 200)


_MORE = [
    *(started(attempt, notes=["a"], checkpoint=name, inherited={"loss": 1}) for attempt, name in ((1, ""), (2, "a"))),
    *(ev.StateChanged(state=state) for state in ("SCHEDULING", "PREEMPTING", "SHUTTING_DOWN")),
    *(reported(0, loss=loss, step=3, total_steps=9) for loss in (1, math.nan, "high")),
    *(committed(0, name, loss=loss) for name, loss in (("a", 1), ("b", -1e300))),
    *(ended(outcome, already_finished=False) for outcome in Outcome),
    *(group(), failed(), RESIZED, PREEMPTED, IGNORED, capacity(0), capacity(0, since=T)),
]
_EVENTS = st.builds(
    lambda event, at, attempt, index: event.model_copy(update={"at": at, "attempt": attempt, "index": index}),
    st.sampled_from([*EVENTS, *_MORE]),
    st.floats(T - 1e6, T + 1e6),
    st.integers(0, 4),
    st.integers(0, 1000),
)


@settings(examples(100), phases=[Phase.generate])
@given(events=st.lists(_EVENTS, max_size=25), order=st.sampled_from(["min", "max"]), recalls=st.integers(0, 30))
def test_a_report_never_fails_whatever_happens(events: list[ev.Event], order: str, recalls: int) -> None:
    report = RunReport(run_name="llama", score_attribute="loss", score_order=order)
    for place, event in enumerate(events):
        report.add(event)
        if place == recalls:
            report.add(ev.RunRecalled(report=report.model_dump(mode="json")))
    _is_whole(render(report, T))
    text = report.model_dump_json()
    assert len(text) < 200_000
    assert RunReport.model_validate_json(text).model_dump_json() == text


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (started(), "Attempt 1 starts from the beginning"),
        (started(2, checkpoint="a", previous_end="lost"), "Attempt 2: a new driver resumes from checkpoint a: lost"),
        (
            failed(reports_lost=3),
            "Worker failure: rank 1 (pid 77): ValueError: nan; the worker group is restarted from checkpoint b; "
            "reports since then, which are done again: 3",
        ),
        (failed(retried=False, gives_up="no"), "Worker failure: rank 1 (pid 77): ValueError: nan; no"),
        (RESIZED, "The worker group is resized from 4 to 6 workers: waited 12 s for a checkpoint"),
        (
            ev.StandbysParked(parked=1, wanted=2, size_bytes=2**28),
            "1 of 2 standby workers are ready, 256 MiB each; there is no memory for more",
        ),
        (ev.StorageWaited(who="ranks", seconds=1), None),
        (reported(1, loss=1), None),
    ],
)
def test_an_event_is_described_in_a_line_for_the_log(event: ev.Event, line: str | None) -> None:
    description = describe(event, checkpoint="b", locations={1: "pid 77"})
    assert (description and description.line) == line


def test_each_kind_of_event_is_described_or_is_not_for_users() -> None:
    described = {event.kind for event in EVENTS if describe(event)}
    silent = {"controller_alive", "checkpoint_stalled", "first_step", "reported", "run_recalled", "state_changed"}
    assert described == {event.kind for event in EVENTS} - silent
