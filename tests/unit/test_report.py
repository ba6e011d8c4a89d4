"""The report of a run: its content, its bounded size, and that no text of a run breaks it."""

import base64
import itertools
import math
import re
from typing import Any
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.report.descriptions import describe
from prefect_elastic_train.report.formats import duration, format_metrics
from prefect_elastic_train.report.markdown import headline, render, summary_line
from prefect_elastic_train.report.measurements import measure
from prefect_elastic_train.report.overview import TrainingRow, make_row, render_page, sort_rows
from prefect_elastic_train.report.pictures import draw
from prefect_elastic_train.report.run_report import MAX_POINTS, Curve, RunReport
from prefect_elastic_train.trackers.tracked_run import TrackedRun
from tests.unit.support import examples
from tests.unit.test_events import EVENTS


def started(attempt=1, at=10, **more):
    return ev.AttemptStarted(
        at=at, attempt=attempt, run_name="llama", run_uri="/runs/llama", driver_started_at=at - 10, **more
    )


def group(at=20, size=4):
    return ev.WorkerGroupStarted(at=at, attempt=1, world_size=size)


def reported(at, **metrics):
    return ev.Reported(at=at, attempt=1, metrics=metrics, world_size=4)


def committed(at, name="a", **metrics):
    return ev.CheckpointCommitted(at=at, attempt=1, checkpoint=name, size_bytes=3 * 2**20, metrics=metrics)


def failed(at=60, **more):
    causes = [Cause([1], "ValueError: nan")]
    return ev.WorkerFailed(**{"at": at, "attempt": 1, "causes": causes, "retried": True, **more})


def ended(outcome, at=100, **more):
    return ev.AttemptEnded(at=at, attempt=1, outcome=outcome, **more)


def capacity(at, missing="1 GPU", **more):
    needs = {"possible_workers": 1, "min_workers": 2, "resources_per_worker": {"GPU": 1.0}}
    return ev.WaitingForCapacity(at=at, attempt=1, missing=missing, **needs, **more)


def report_of(*events: ev.Event, **policy: Any) -> RunReport:
    report, reports = RunReport(run_name="llama", **policy), 0
    for event in events:
        if isinstance(event, ev.Report):  # as the driver numbers them
            reports += 1
            event = event.model_copy(update={"index": reports})
        report.add(event)
    return report


RESIZED = ev.WorkerGroupResized(at=60, attempt=1, old_size=4, new_size=6, reason="commit", waited_seconds=12)
PREEMPTED = ev.WorkersPreempted(at=60, attempt=1, retried=True, reports_lost=2)


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (ev.StateChanged(state="SCHEDULING"), "starting workers"),
        (capacity(12), "waiting for capacity"),
        (group(), "training"),
        (ev.StateChanged(state="PREEMPTING"), "draining"),
        (ev.StateChanged(state="SHUTTING_DOWN"), "winding up"),
        (PREEMPTED, "restarting workers"),
        (RESIZED, "resizing"),
        (ended(Outcome.DRIVER_LOST), "restarting the driver"),
        (ended(Outcome.CLUSTER_LOST, final=True), "failed"),
        (ended(Outcome.CANCELLED), "cancelled"),
        (ended(Outcome.TIMED_OUT), "timed out"),
        (ended(Outcome.COMPLETED), "completed"),
        (ended(Outcome.SUPERSEDED), "training"),
        (started(2, 110), "starting"),
    ],
)
def test_a_report_has_the_state_of_the_run(event: ev.Event, state: str) -> None:
    report = report_of(started(), group(), event)
    assert (report.state, headline(report)) == (state, state.capitalize())
    assert report.is_live == (state not in ("failed", "cancelled", "timed out", "completed"))
    assert report_of(started(), ev.StateChanged(state="SHUTTING_DOWN")).state == "starting", "nothing winds up yet"


WAITED = ev.StorageWaited(at=60, who="ranks", seconds=4.5, tries=7, last="SlowDown")
IGNORED = ev.LoopWarned(at=60, problem="checkpoint-ignored", message="it never asked", checkpoint="a")


@pytest.mark.parametrize(
    ("event", "kind", "line"),
    [
        (started(), "begin", "Attempt 1 starts from the beginning"),
        (
            started(2, checkpoint="a", previous_end="lost"),
            "driver",
            "Attempt 2 starts from checkpoint a: lost",
        ),
        (
            failed(reports_lost=3),
            "failure",
            "Worker failure: rank 1 (pid 77): ValueError: nan; the worker group is restarted from checkpoint b; "
            "reports since then, which are done again: 3",
        ),
        (
            failed(retried=False, gives_up="no"),
            "failure",
            "Worker failure: rank 1 (pid 77): ValueError: nan; no",
        ),
        (
            PREEMPTED,
            "preemption",
            "Preemption: a node was drained or reclaimed; the worker group is restarted from checkpoint b; "
            "reports since then, which are done again: 2",
        ),
        (RESIZED, "resize", "The worker group is resized from 4 to 6 workers: waited 12 s for a checkpoint"),
        (
            capacity(60, since=50),
            "capacity",
            "Waiting for capacity for 10 s: 1 of at least 2 workers fit, with {'GPU': 1.0} each; lacking: 1 GPU",
        ),
        (
            WAITED,
            "storage",
            "The ranks waited 4.5 s for the storage: 7 requests failed and were retried; last: SlowDown",
        ),
        (IGNORED, "loop", "It never asked"),
        (
            ev.StandbysParked(parked=1, wanted=2, size_bytes=2**28),
            "",
            "1 of 2 standby workers are ready, 256 MiB each; there is no memory for more",
        ),
        (ev.StorageWaited(who="ranks", seconds=1), "", None),
        (reported(1, loss=1), "", None),
    ],
)
def test_an_event_for_users_is_a_line_of_the_log_and_an_incident(event: ev.Event, kind: str, line: str | None) -> None:
    description = describe(event, checkpoint="b", locations={1: "pid 77"})
    assert (description and description.line) == line
    incidents = report_of(event).incidents
    assert [incident.kind for incident in incidents] == [kind] * bool(kind)
    for incident in incidents:
        assert description is not None
        assert incident.at == event.at
        assert incident.message.startswith(description.message)
        assert incident.reason[:6] == description.reason[:6]
        assert ("done again" in incident.message) == (getattr(event, "reports_lost", 0) > 0)


def test_the_incident_of_a_new_driver_has_its_reason_and_repairs_follow() -> None:
    lost = ended(Outcome.DRIVER_LOST, message="killed by SIGKILL\nmore")
    assert report_of(started(), lost, started(2)).incidents[-1].reason == "driver_lost: killed by SIGKILL"
    silent = report_of(started(), started(2, notes=["a was dropped"]))
    assert [incident.message for incident in silent.incidents[2:]] == ["a was dropped"]
    assert silent.incidents[1].reason == "the previous driver exited without a final event"
    assert silent.driver_restarts == 1


def test_consecutive_waits_for_capacity_or_the_storage_are_one_incident() -> None:
    report = report_of(started(), capacity(20, since=15), capacity(40), capacity(60), group(70), capacity(80))
    assert [incident.at for incident in report.incidents if incident.kind == "capacity"] == [20, 80]
    for _ in range(3):
        report.add(WAITED)
    (waited,) = [incident for incident in report.incidents if incident.kind == "storage"]
    assert waited.message == "the ranks waited 4.5 s for the storage, 14 s in all so far"


def test_a_wait_for_the_storage_is_shown_while_it_lasts() -> None:
    report = report_of(started(), group())
    for activity, detail in {"waiting for the storage": "waiting for the storage for 42 s", "RUNNING": ""}.items():
        report.add(ev.ControllerAlive(doing=activity, seconds=42))
        assert (report.state, report.detail) == ("training", detail)


@pytest.mark.parametrize(
    ("metrics", "progress"),
    [
        ({"progress": 0.5, "step": 1, "total_steps": 10}, "50.0%"),
        ({"epoch": 3, "num_epochs": 10, "step": 12345}, "epoch 3 of 10 (30.0%)"),
        ({"global_step": 1500, "max_steps": 3000}, "global step 1,500 of 3,000 (50.0%)"),
        ({"step": 1200, "total_steps": 1000}, "step 1,200 of 1,000 (100.0%)"),
        ({"step": 2, "epoch": 5}, "epoch 5 of 20 (25.0%)"),  # the total is in the loop's configuration
        ({"step": math.nan, "total_steps": 10}, ""),
        ({"step": 5, "total_steps": math.inf, "progress": 50}, ""),
    ],
)
def test_progress_follows_from_metrics(metrics: dict[str, Any], progress: str) -> None:
    report = report_of(started(), group(), reported(30, **metrics), reported(30, accuracy=1), totals={"max_epochs": 20})
    assert headline(report) == ": ".join(filter(None, ["Training", progress]))
    assert "left" not in summary_line(report, 40), "of one report nobody knows the pace"
    report.add(ended(Outcome.COMPLETED))
    assert (report.progress and report.progress.fraction) == (1.0 if progress else None)


def test_pace_and_remaining_time_are_those_since_the_last_restart() -> None:
    events = [reported(30 + 5 * n, step=50 * n, total_steps=1000, samples=32_000 * n) for n in range(3)]
    report = report_of(started(), group(), *events, ev.SavesPlanned(at=40, plan="each 90 s: a save blocks 2 s"))
    text = render(report, 45)
    for part in ("about 1.5 min left, until 1970-01-01 00:02:10 UTC", "6,400 samples a second · 10 steps a second"):
        assert part in text
    assert "samples=" not in text
    assert "### Checkpoints\n\nThe loop saves each 90 s: a save blocks 2 s." in text
    report.add(failed(50))
    assert "a second" not in summary_line(report, 60)
    for event in (group(100), reported(110, iteration=4, progress=0.2), reported(120, iteration=9, progress=0.3)):
        report.add(event)
    assert "about 1.2 min left, until 1970-01-01 00:03:10 UTC · 0.5 iterations a second" in summary_line(report, 130)


def test_the_pace_is_compared_with_that_of_another_number_of_workers() -> None:
    def paced(at: int, per_second: int) -> list[ev.Event]:
        return [reported(at + 10 * n, step=1000 * at + 10 * per_second * n) for n in range(2)]

    events = [started(), group(20, 4), *paced(30, 8), failed(50), group(60, 2), *paced(70, 5)]
    assert "5 steps a second (8 with 4 workers before)" in summary_line(report_of(*events), 80)
    again = [*events, failed(90), group(95, 2), *paced(100, 6)]
    assert "6 steps a second (8 with 4 workers before)" in summary_line(report_of(*again), 120)


def test_the_use_of_the_hardware_is_shown_by_rank() -> None:
    usage = {10: ev.RankUsage(203.4, 3 * 2**30, 0), 2: ev.RankUsage(90.0, 2**30, 2**31)}
    text = render(report_of(started(), group(), ev.RanksMeasured(at=30, usage=usage)), 40)
    assert "| 2 | 90 % | 1.0 GiB | 2.0 GiB |\n| 10 | 203 % | 3.0 GiB | 0 Bytes |" in text


def test_the_metrics_for_prometheus_are_those_of_the_report() -> None:
    report = report_of(
        started(),
        group(),
        reported(30, step=5, total_steps=40),
        committed(40, step=15, total_steps=40),
        WAITED,
        failed(70),
    )
    samples = {
        (sample.name.removeprefix("elastic_train_"), *list(sample.labels.values())[1:]): sample.value
        for sample in measure(report, 80)
    }
    assert samples["restarts", "worker_failure"] == 1
    assert samples["wall_time_seconds", "restart"] == 10
    assert (samples["checkpoint_timestamp_seconds",], samples["checkpoint_written_bytes",]) == (40, 3 * 2**20)
    assert (samples["progress_ratio",], samples["storage_retries",]) == (15 / 40, 7)
    assert samples["workers",] == samples["steps_per_second",] == 0, "no worker group runs"


def test_a_later_supervisor_takes_over_the_report_and_keeps_its_own_settings() -> None:
    before = report_of(started(), group(), committed(30, loss=1), failed(40), score_attribute="x")
    before.run_name = "other"
    own = {"run_name": "llama", "score_attribute": "loss", "score_order": "min", "dashboard_url": "http://ray"}
    own["run_uri"] = "/moved/llama"
    recalled = RunReport(**own)
    recalled.add(ev.RunRecalled(report={"attempt": "many"}))  # of another version
    recalled.add(ev.RunRecalled(report=before.model_dump(mode="json")))
    own |= {"state": "starting", "detail": ""}
    assert recalled.model_dump() == before.model_dump() | own


def test_curves_are_over_the_reports_without_what_was_done_again() -> None:
    before = [*(reported(30, loss=n) for n in (1, 2)), committed(33, "kept", loss=3), reported(34, loss=4)]
    report = report_of(started(), group(), *before, failed(), group(70))
    assert report.curves["loss"].points == [(n, n) for n in range(1, 5)]
    for index, loss in enumerate((7, 8), start=5):
        report.add(reported(70, loss=loss).model_copy(update={"index": index}))
    assert report.curves["loss"].points == [(1, 1), (2, 2), (3, 3), (4, 7), (5, 8)]


def test_curves_are_drawn_over_steps_where_steps_only_grow_and_over_reports_elsewhere() -> None:
    def axes(*steps: int) -> str:
        reports = [reported(30 + n, loss=1 / (n + 1), val_loss=1, step=step) for n, step in enumerate(steps)]
        report = report_of(started(), group(), *reports)
        picture = base64.b64decode(draw(report, 60).partition(",")[2]).decode()
        assert len(re.findall(r"<g id=\"axes_", picture)) == 2, "train and validation in one, and the workers"
        return "step" if "<!-- step" in picture else "report" if "<!-- report" in picture else ""

    assert axes(100, 200, 300) == "step"
    assert axes(1, 2, 1, 2) == "report", "steps of an epoch"


def test_a_restart_is_a_band_over_what_is_done_again_and_a_checkpoint_has_its_step() -> None:
    before = [reported(30, step=10), committed(31, "a", step=20), reported(32, step=30), reported(33, step=40)]
    report = report_of(started(), group(), *before, failed(40), group(70))
    report.add(reported(75, step=30).model_copy(update={"index": 5}))
    [failure] = [incident for incident in report.incidents if incident.kind == "failure"]
    assert (failure.at, failure.until, failure.redone) == (40, 75, (3, 4))
    assert report.steps.points == [(1, 10), (2, 20), (3, 30)]
    assert "**step 20** `a`" in render(report, 80)


def test_the_card_and_the_report_begin_with_the_failures_by_cause() -> None:
    causes = [[Cause([1], "ValueError: nan")], [Cause([0], "ValueError: nan")], [Cause([], "out of memory")]]
    lost = ended(Outcome.DRIVER_LOST, message="killed by SIGKILL")
    report = report_of(started(), group(), *(failed(60, causes=cause) for cause in causes), lost, started(2, 90))
    by_cause = "2 × ValueError: nan; 1 × out of memory; 1 × killed by SIGKILL"
    assert summary_line(report, 100).startswith(f"{by_cause} · Starting")
    assert f"**Failures:** {by_cause}\n" in render(report, 100)


def test_the_page_has_failed_and_silent_trainings_first_with_the_cost_and_the_time_left() -> None:
    def row(name: str, *events: ev.Event, now: float = 100) -> TrainingRow:
        report = report_of(started(), group(20), *events)
        report.run_name = name
        return make_row(report, now, "r")

    pace = [reported(30 + 10 * n, step=n, total_steps=10) for n in range(3)]
    rows = [
        row("completed", ended(Outcome.COMPLETED), now=1100),
        row("trains", *pace, now=1100),
        row("restarts", failed(60), now=1100),
        row("failed", ended(Outcome.USER_ERROR), now=1100),
        row("silent", *pace, now=200),
    ]
    ordered = sort_rows(rows, 1101)
    assert [row.rank for row in ordered] == [3, 3, 2, 1, 0]
    assert [row.cells["training"] for row in ordered] == ["failed", "silent", "restarts", "trains", "completed"]
    assert ordered[3].cells == {
        "training": "trains",
        "state": "Training: step 2 of 10 (20.0%); about 1.3 min left",
        "failures": "none",
        "size": "4",
        "goodput": ordered[3].cells["goodput"],
        "cost (h)": "1.20",
        "updated": "01-01 00:18",
    }
    page = render_page(ordered, 1101, "http://prefect/")
    assert "| [silent](http://prefect/r) | **Training" in page
    assert "| [trains](http://prefect/r) | Training" in page


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
    scores = {"a": math.nan, "b": 0.9, "c": 0.9, "d": 0.1, "e": 0.1, "f": math.nan, "g": "high"}
    scores |= dict.fromkeys(map(str, range(50)), 0.5)
    made = [committed(30, name, acc=score) for name, score in scores.items()]
    report = report_of(started(), group(), *made, committed(60, "i"), score_attribute="acc", score_order=order)
    (row,) = [line for line in render(report, 100).splitlines() if "**best**" in line]
    assert f"`{best}`" in row, "it is also shown if it is old"
    assert len(report.checkpoints) <= 12


A, B, C = (physical_name(name, attempt=1, report=number) for number, name in enumerate("abc"))
COPY = physical_name("copy", attempt=0)


@pytest.mark.parametrize(("resumed", "names"), [(C, [A, B, C]), (B, [A, B]), (COPY, [COPY]), ("", [])])
def test_an_attempt_keeps_the_checkpoints_up_to_that_from_which_it_resumes(resumed: str, names: list[str]) -> None:
    made = [committed(30 + n, name, acc=n) for n, name in enumerate([A, B, C])]
    start = started(2, 50, checkpoint=resumed, inherited={"acc": -1} if resumed == COPY else {})
    report = report_of(started(), group(), *made, start, score_attribute="acc")
    assert [made.name for made in report.checkpoints] == names
    assert (report.best.name if report.best else "") == resumed


@pytest.mark.parametrize(
    ("kept", "best"),
    [([(B, {"acc": 0.3})], B), ([("old", {"acc": 0.3})], "old"), ([(B, {})], None), ([], A)],
)
def test_the_result_says_which_checkpoint_is_the_best_in_the_end(kept: list[Any], best: str | None) -> None:
    made = [committed(30, A, acc=0.5), committed(40, B, loss=2), committed(50, C, loss=1)]
    result = {"best_checkpoints": [{"uri": f"/runs/llama/{name}", "metrics": metrics} for name, metrics in kept]}
    report = report_of(started(), *made, ended(Outcome.COMPLETED, result=result), score_attribute="acc")
    assert (report.best and report.best.name, report.checkpoints[-1].name) == (best, C)


def test_a_report_of_thousands_of_reports_with_faults_is_small() -> None:
    report = RunReport(run_name="llama", score_attribute="loss", score_order="min")
    text = "a text " * 1000
    causes = [Cause([0], f"RuntimeError: {text}"), Cause([1], "The actor died")]
    for number in range(3000):
        at = 30.0 + number
        metrics = {"step": number, "total_steps": 3000, "loss": math.sin(number), "norm": number}
        report.add(committed(at, f"c{number}", **metrics).model_copy(update={"index": number + 1}))
        if number % 30 == 29:
            lost = [failed(at, causes=causes), ended(Outcome.DRIVER_LOST, at, message=text)]
            for event in (*lost, started(2 + number, at, notes=[text] * 3), capacity(at), group(at)):
                report.add(event)
    assert len(report.model_dump_json()) < 60_000
    assert (len(report.incidents), report.incidents[-1].at) == (60, at)
    assert len(render(report, at).encode()) < 60_000
    assert len(render(report, at, draw(report, at)).encode()) < 290_000


def test_the_text_is_complete_without_pictures() -> None:
    report = report_of(
        ev.ClusterConnected(address="10.0.0.1:6379", dashboard_url="10.0.0.1:8265"),
        started(),
        group(20),
        committed(81, "ckpt-51", step=51, total_steps=100, loss=0.125),
        failed(85, reports_lost=3),
        group(90),
        reported(100, step=52, total_steps=100, loss=0.0625, odd="http://a b"),
    )
    report.flow_run_url = "http://prefect/runs/flow-run/1"
    text = render(report, 110)
    for words in (
        "## Training: step 52 of 100 (52.0%)",
        "**4 workers** · attempt 1",
        "loss=0.0625",
        "last checkpoint 29.0 s ago",
        "**Failures:** 1 × ValueError: nan",
        "worker failure; the worker group is restarted from checkpoint ckpt-51; reports since then, which are done "
        "again: 3; training again after 15.0 s**"
        "  \n  "
        "rank 1: ValueError: nan\n",
        "| restart | ",
        "`ckpt-51`",
        "`/runs/llama`",
        "- Ray dashboard <http://10.0.0.1:8265>",
        "- flow run <http://prefect/runs/flow-run/1>",
        "odd=http://a b",
    ):
        assert words in text, words
    assert "![" not in text


def test_a_recovery_ends_with_the_first_step_or_report_of_a_group() -> None:
    events = [started(), group(20), failed(85), reported(86), group(90)]
    assert "again after" not in report_of(*events).incidents[-1].message, "its loop has not begun a step"
    events += [ev.FirstStep(at=97, world_size=4), reported(98), started(2, 120), group(130), reported(137)]
    messages = [incident.message for incident in report_of(*events).incidents[-2:]]
    for message, seconds in zip(messages, ("12.0", "27.0"), strict=True):
        assert f"training again after {seconds} s" in message


def test_values_are_formatted_briefly() -> None:
    times = {-1: "0.0 s", 42: "42.0 s", 60: "1.0 min", 3600: "1.0 h", 5400: "1.5 h", 36 * 3600: "1.5 d"}
    assert {seconds: duration(seconds) for seconds in times} == times
    metrics = {"a": 12345, "b": 0.123456, "c": math.nan, "d": "x" * 50, "e": 1}
    assert format_metrics(metrics, 4) == f"a=12345, b=0.1235, c=nan, d={'x' * 40} and 1 more"


def test_the_picture_is_an_svg_without_a_background_whatever_metrics_are_called() -> None:
    assert draw(RunReport(run_name="llama"), 0) == "", "nothing yet"
    curves = {
        "loss": [0.5],
        "a|b": [0.0, 0.0],
        "$x^2$": [1e300, -1e300, 5e-324],
        "<&>\"'": [math.inf, 1.0],
        "a--b-->": [2**70],
        "\\frac{$": [1, 2],
        "a\x1b[31mb\x00\uffff\n": [3, 2],
        "\ud800": [-1, 0],
    }
    said = [reported(30, **{name: value}) for name, values in curves.items() for value in values]
    report = report_of(started(), group(20), *said, failed(85), group(90), reported(91))
    assert len(report.curves) == len(curves)
    svg = base64.b64decode(draw(report, 200).removeprefix("data:image/svg+xml;base64,"))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert b"#ffffff" not in svg, "a background"
    assert not [part for part in root.iter() if part.tag.endswith(("script", "image", "foreignObject"))]


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
    headings = [heading for heading in headings if heading != "### Workers"]
    assert headings[1:] == ["### What happened", "### Where the time went", "### Checkpoints", "### Where"]
    assert "<script" not in re.sub(r"`[^`\n]*`", "", text).replace("\\<", "")
    assert "\x1b" not in text


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:30])
def test_no_text_breaks_the_report(text: str) -> None:
    report = report_of(
        started(notes=[text], previous_end=text, checkpoint=text[:2000]),
        group(),
        reported(30, **{f"{text}{number}": 0.5 for number in range(3)}, text=text, number=math.nan),
        committed(31, text[:2000], **{f"{text}{number}": text for number in range(3)}),
        failed(40, causes=[Cause([0], text), Cause([1], f"ValueError: {text}")]),
        capacity(45, missing=text),
        ev.StorageWaited(at=46, who="ranks", seconds=9, last=text),
        ended(Outcome.DRIVER_LOST, message=text),
        started(2, 120, previous_end=text),
    )
    report.run_name = report.run_uri = text
    report.dashboard_url = f"http://{text}"
    _is_whole(render(report, 200))
    assert len(report.model_dump_json(exclude={"run_name", "run_uri", "dashboard_url"})) < 200_000
    report.end(200, "failed", text)
    _is_whole(render(report, 200))
    summary_line(report, 200)


_MORE = [
    started(2, notes=["a"], checkpoint="a", inherited={"loss": 1}),
    *(ev.StateChanged(state=state) for state in ("SCHEDULING", "PREEMPTING", "SHUTTING_DOWN")),
    *(reported(0, loss=loss, step=3, total_steps=9) for loss in (1, math.nan, "high")),
    committed(0, "b", loss=-1e300),
    *(ended(outcome, already_finished=False) for outcome in Outcome),
]
_EVENTS = st.builds(
    lambda event, at, attempt, index: event.model_copy(update={"at": at, "attempt": attempt, "index": index}),
    st.sampled_from([*EVENTS, *_MORE]),
    st.floats(0, 2e6),
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
    _is_whole(render(report, 0))
    text = report.model_dump_json()
    assert len(text) < 200_000
    assert RunReport.model_validate_json(text).model_dump_json() == text


def test_each_kind_of_event_is_described_or_is_not_for_users() -> None:
    described = {event.kind for event in EVENTS if describe(event)}
    silent = {"controller_alive", "checkpoint_stalled", "first_step", "reported", "run_recalled", "state_changed"}
    assert described == {event.kind for event in EVENTS} - silent - {"ranks_measured", "trackers_opened"}


def test_the_report_links_to_the_runs_in_trackers() -> None:
    runs = [TrackedRun("mlflow", {}, {}, "https://mlflow/run"), TrackedRun("tensorboard", {}, {}, "/runs/tensorboard")]
    text = render(report_of(started(), ev.TrackersOpened(runs=runs)), 10)
    assert "- run in mlflow <https://mlflow/run>\n- run in tensorboard `/runs/tensorboard`" in text


def test_a_row_of_the_page_fits_into_what_prefect_keeps() -> None:
    now = 1_800_000_000.123456
    errors = [failed(now + at, causes=[Cause([1], f'{at} "KeyError"\0' + 200 * "x")]) for at in (10, 20, 30)]
    pace = [reported(now + at, global_step=at * 1e15, total_steps=1e60) for at in (40, 90)]
    report = report_of(started(at=now), *errors, group(now + 30, 100_000), *pace)
    report.run_name = 200 * "n"
    assert 400 < len(make_row(report, now + 100, str(uuid4())).model_dump_json()) <= 500


def test_failed_trainings_stay_on_the_page_beside_many_others() -> None:
    rows = [TrainingRow(key=str(number), cells={}, rank=1, updated=1000.0 + number) for number in range(150)]
    lost = TrainingRow(key="lost", cells={}, rank=3, updated=900.0)
    page = sort_rows([*rows, lost], 1150)
    assert (page[0].key, len(page)) == ("lost", 100)


def test_the_cost_on_the_page_has_the_time_of_all_workers_after_any_number_of_restarts() -> None:
    events: list[ev.Event] = [started(at=0)]
    for at in range(0, 10_000, 10):
        events += [group(at, 36), failed(at + 5)]
    assert make_row(report_of(*events), 10_000).cells["cost (h)"] == "50.00"
