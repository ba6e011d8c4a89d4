"""Rehearsals: schedules, what a training's events come to, what is wrong with a loop by two of them, certificates."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from prefect_elastic_train import ElasticScaling
from prefect_elastic_train.cli import app
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.request import Payload
from prefect_elastic_train.driver.interruptions import notice_interruptions
from prefect_elastic_train.rehearsal import judging, players, rehearsing
from prefect_elastic_train.rehearsal.certificate import Certificate, Finding, Played
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.players import Disturber
from prefect_elastic_train.rehearsal.rehearsing import rehearse
from prefect_elastic_train.rehearsal.schedule import KINDS, Fault, every_kind
from prefect_elastic_train.rehearsal.stage import Enough, Stage
from tests.support.schedules import poisson

# ------------------------------------------------------------------------------------------ schedules


def test_a_seed_gives_the_same_schedule_and_another_one_another() -> None:
    for plan in (lambda seed: every_kind(KINDS, seed, 5.0), lambda seed: [*islice(poisson(KINDS, seed, 5.0), 20)]):
        assert plan(3) == plan(3) != plan(4)
    waits = [fault.wait for fault in islice(poisson(KINDS, 1, 60.0), 1000)]
    assert 50 < sum(waits) / len(waits) < 70


@pytest.mark.parametrize("seed", range(20))
def test_faults_that_change_the_number_of_workers_come_last_and_each_lost_node_is_replaced(seed: int) -> None:
    kinds = [fault.kind for fault in every_kind(KINDS, seed, 5.0)]
    assert sorted(kinds[:4]) == ["driver", "freeze", "storage", "worker"]
    assert [kinds[5], kinds[7]] == ["growth", "growth"]
    assert {kinds[4], kinds[6]} == {"node", "drain"}
    assert [fault.kind for fault in every_kind(["growth"], seed, 5.0)] == ["node", "growth"]
    fixed = [fault.kind for fault in every_kind(["node", "growth"], seed, 5.0, can_shrink=False)]
    assert fixed == ["node"], "where the training waits for a node there is nothing to grow"
    assert all(0 <= fault.of("abc") < 3 for fault in islice(poisson(KINDS, seed, 5.0), 50))


# ------------------------------------------------------------------------------------------ courses


def _begin(course: Course, checkpoint: str = "", world: int = 2, at: float = 0.0) -> None:
    ranks = {f"10.0.0.{rank}:{100 + rank}": rank for rank in range(world)}
    course.handle(ev.WorkerGroupStarted(world_size=world, checkpoint=checkpoint, ranks=ranks, at=at))


def _report(course: Course, at: float, checkpoint: str = "", **metrics: Any) -> None:
    how = {"metrics": metrics, "world_size": len(course.ranks), "at": at}
    course.handle(
        ev.CheckpointCommitted(checkpoint=checkpoint, size_bytes=1, **how) if checkpoint else ev.Reported(**how)
    )


def _course(
    losses: Sequence[float],
    resumes: dict[int, tuple[int, int]] | None = None,
    folder: Path | None = None,
    every: int = 5,
    states: Sequence[float] | None = None,
) -> Course:
    """A training with a report a second and a checkpoint every five; ``resumes``: from which step, with how many."""
    course, world = Course(), 2
    _begin(course)
    for step, loss in enumerate(losses, 1):
        if resumes and step in resumes:
            back, world = resumes[step]
            for again in range(step, step + 2):  # which does not count
                _report(course, float(again), step=again, loss=99.0)
            _begin(course, f"step-{back}", world, float(step))
        checkpoint = f"step-{step}" if step % every == 0 else ""
        _report(course, float(step), checkpoint, step=step, loss=loss, seconds=random.random())
        if checkpoint and folder is not None:
            (folder / checkpoint).mkdir(parents=True)
            state = loss if states is None else states[step - 1]
            np.savez(folder / checkpoint / "weights.npz", inner=np.array([1.0, state]), seconds=random.random())
    return course


def test_reports_after_a_checkpoint_that_was_gone_back_to_do_not_count() -> None:
    course = _course([1.0] * 12, {11: (10, 1)})
    assert [one.metrics["step"] for one in course.reports] == list(range(1, 13))
    assert (course.redone, course.resumes, course.commits) == (2, [(10, 1)], [4, 9])
    assert len(course.news) == 12, "what is done again is nothing new"
    _begin(course, "", at=13.0)
    assert (course.reports, course.redone) == ([], 14), "from the beginning"
    _report(course, 14.0, step=1)
    _begin(course, "told to nobody", at=15.0)
    assert len(course.reports) == 1, "what was committed as its driver died goes on from what is known"


def test_a_certificate_is_not_passed_where_nothing_after_a_fault_can_be_compared(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    one, other = _course(LOSSES[:10], {}, folders[0]), _course(LOSSES, {11: (10, 2)}, folders[1])
    [found] = judging.compare(one, other, *folders).findings
    assert (found.level, found.about) == ("fail", "not comparable")
    assert "save_every=<steps>" in found.remedy


@pytest.mark.parametrize(
    ("metrics", "counter"),
    [
        ([{"epoch": 1, "step": 5}, {"epoch": 1, "step": 6}], "step"),
        ([{"epoch": 1}, {"epoch": 2}], "epoch"),
        ([{"epoch": 1}, {"epoch": 1}], ""),
        ([{"loss": 1}, {"loss": 2}], ""),
        ([{"step": 1}, {"loss": 2}], ""),
    ],
)
def test_how_far_a_loop_is_its_finest_counter_tells_or_the_number_of_reports(
    metrics: list[dict[str, Any]], counter: str
) -> None:
    course = Course()
    _begin(course)
    for number, one in enumerate(metrics):
        _report(course, float(number), **one)
    assert course.counter() == counter
    assert course.progress(1, counter) == (metrics[1][counter] if counter else 2)


# ------------------------------------------------------------------------------------------ judging

LOSSES = [1 / step for step in range(1, 31)]
SAME: list[float] = []


def _changed(since: int, by: float) -> list[float]:
    return [loss if step < since else loss * (1 + by) for step, loss in enumerate(LOSSES, 1)]


@pytest.mark.parametrize(
    ("losses", "states", "resumes", "about", "part"),
    [
        (LOSSES, None, {11: (10, 2)}, "", "bit for bit the same"),
        (LOSSES, _changed(11, 1e-5), {11: (10, 1), 16: (15, 2)}, "", "the same within 7e-07"),
        (_changed(11, 0.5), None, {11: (10, 2)}, "forgets a part of its state", "random state"),
        (_changed(12, 0.5), None, {11: (10, 2)}, "forgets a part of its state", "optimizer's state"),
        (LOSSES, _changed(16, 0.5), {11: (10, 2), 16: (15, 2)}, "forgets a part of its state", "after 20 reports"),
        (_changed(12, 0.5), None, {11: (10, 1), 16: (15, 2)}, "depends on the world size", "with 2, then 1 workers"),
        (_changed(2, 0.01), None, {11: (10, 2)}, "not deterministic", "after 5 reports"),
        # Where the number of workers has changed, noise may grow; what comes at once is none.
        (LOSSES, _changed(16, 0.5), {11: (10, 1)}, "", "bit for bit the same"),
        (LOSSES, _changed(16, 0.5), {11: (10, 1), 21: (20, 2)}, "", "noise of floats"),
        (
            LOSSES,
            _changed(21, 0.5),
            {11: (10, 1), 21: (20, 2)},
            "depends on the world size",
            "with 2, then 1, then 2 workers",
        ),
        (_changed(18, 0.5), None, {11: (10, 1), 16: (15, 1)}, "forgets a part of its state", "optimizer's state"),
        (LOSSES, _changed(11, float("nan")), {11: (10, 2)}, "forgets a part of its state", "is inf"),
    ],
)
@pytest.mark.parametrize("has_state", [True, False])
def test_what_is_wrong_is_told_by_where_the_two_first_differ(
    tmp_path: Path,
    losses: list[float],
    states: list[float] | None,
    resumes: dict[int, tuple[int, int]],
    about: str,
    part: str,
    has_state: bool,
) -> None:
    if not has_state and states is not None:
        pytest.skip("only the checkpoints differ")
    folders = (tmp_path / "one", tmp_path / "other") if has_state else (None, None)
    one, other = _course(LOSSES, {}, folders[0]), _course(losses, resumes, folders[1], states=states)
    found = judging.compare(one, other, tmp_path / "one", tmp_path / "other")
    assert [finding.about for finding in found.findings] == ([about] if about else [])
    told = " ".join([found.compared, *(finding.message for finding in found.findings)])
    if has_state or "reports" not in part:
        assert part in told
    assert (found.difference is None) == (not has_state)
    assert found.metrics["step"] == found.undisturbed_metrics["step"] == 30


@pytest.mark.parametrize(
    ("file", "losses", "about"),
    [
        ("meta.json", _changed(11, 0.5), "forgets a part of its state"),
        ("meta.json", SAME, "not comparable"),
        ("model.msgpack", _changed(11, 0.5), "forgets a part of its state"),
    ],
)
def test_a_checkpoint_of_which_only_counts_are_read_is_no_state(
    tmp_path: Path, file: str, losses: list[float], about: str
) -> None:
    courses = []
    for name, resumes in (("one", {}), ("other", {11: (10, 2)})):
        course = _course(losses if resumes and losses else LOSSES, resumes)
        if not losses:
            course.reports = [one._replace(metrics={"step": one.metrics["step"]}) for one in course.reports]
        for one in course.reports:
            if one.checkpoint:
                (tmp_path / name / one.checkpoint).mkdir(parents=True)
                (tmp_path / name / one.checkpoint / file).write_text(json.dumps(one.metrics))
        courses.append(course)
    found = judging.compare(*courses, tmp_path / "one", tmp_path / "other")
    assert [one.about for one in found.findings] == [about]
    assert found.difference is None


def test_what_no_report_shows_is_told_as_such(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    one, other = _course(LOSSES, {}, folders[0]), _course(LOSSES, {11: (10, 2)}, folders[1], states=_changed(11, 0.5))
    [found] = judging.compare(one, other, *folders).findings
    assert "averaged weights" in found.message


def test_a_wrong_state_right_after_a_resume_is_not_taken_for_what_no_report_shows(tmp_path: Path) -> None:
    folders, losses = (tmp_path / "one", tmp_path / "other"), _changed(12, 0.5)
    one = _course(LOSSES, {}, folders[0], every=1)
    other = _course(losses, {11: (10, 2)}, folders[1], every=1, states=_changed(11, 0.5))
    [found] = judging.compare(one, other, *folders).findings
    assert "optimizer's state" in found.message


def test_resumes_beyond_what_the_undisturbed_training_has_done_are_told(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    one = _course(LOSSES[:20], {}, folders[0])
    other = _course(LOSSES, {11: (10, 2), 26: (25, 2)}, folders[1], states=_changed(26, 0.5))
    assert "not compared: what the last 1 of 2 resumes" in judging.compare(one, other, *folders).compared


def test_a_tolerance_is_for_what_is_reported_too(tmp_path: Path) -> None:
    one, other = _course(LOSSES), _course(_changed(11, 0.05), {11: (10, 1)})
    assert judging.compare(one, other, tmp_path, tmp_path).findings
    assert not judging.compare(one, other, tmp_path, tmp_path, tolerance=0.1).findings


def test_a_loop_that_ignores_its_checkpoint_is_told_so_and_nothing_that_follows_from_it(tmp_path: Path) -> None:
    other = _course(_changed(11, 0.5), {11: (10, 2)})
    other.handle(ev.LoopWarned(problem="no-checkpoint", message="never saved"))
    other.handle(ev.LoopWarned(problem="checkpoint-ignored", message="began again"))
    found = judging.compare(_course(LOSSES), other, tmp_path, tmp_path)
    assert [(one.about, one.message) for one in found.findings] == [("ignores its checkpoint", "began again")]


def test_an_undisturbed_training_shows_when_a_loop_saves_too_rarely_never_or_reports_unequally() -> None:
    assert judging.of_undisturbed(_course(LOSSES)) == []
    [never] = judging.of_undisturbed(_course(LOSSES, every=100))
    assert (never.level, never.about) == ("fail", "never saves")
    rare = Course()
    _begin(rare)
    _report(rare, 600.0, "step-1", step=1)
    rare.handle(ev.CheckpointStalled(seconds=0.5))
    [rarely] = judging.of_undisturbed(rare)
    assert (rarely.level, rarely.about) == ("warn", "saves rarely")
    assert "each 600 s" in rarely.message
    assert "each 60 s" in rarely.remedy, "Young and Daly's interval for half a second and one failure an hour"
    stuck = _course(LOSSES)
    error = 'HungLoopError: no report for 60 s; the rank was here:\n  File "x.py", line 1, in {}\n    self.wait()'
    errors = {"0": error.format("report"), "1": error.format("train")}
    stuck.handle(ev.WorkerFailed(errors=errors, retried=True))
    [unequal] = judging.of_undisturbed(stuck)
    assert unequal.about == "reports unequally"
    assert unequal.message.startswith("rank 0 waited")
    broken = _course(LOSSES)
    broken.handle(ev.WorkerFailed(errors={"0": "ValueError: nan"}, retried=True))
    assert [(one.about, one.message) for one in judging.of_undisturbed(broken)] == [
        ("fails undisturbed", "ValueError: nan")
    ]


# ------------------------------------------------------------------------------------------ playing


class _Played:
    """A course that a disturber plays on, by hand; what it has killed and told."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *faults: Fault, **more: Any) -> None:
        self.killed: list[int] = []
        self.told: list[str] = []
        self.course, self.outage = Course(), folder / "outage"
        patch.setattr(psutil, "Process", lambda pid: SimpleNamespace(kill=lambda: self.killed.append(pid)))
        stage: Any = SimpleNamespace(nodes=SimpleNamespace(ids=[]), outage=self.outage)
        enough = more.get("enough", lambda course: False)
        self.player = Disturber(stage, [*faults], enough, more.get("patience", 60.0), self.told.append)
        self.looks = self.player.play(self.course)
        self.steps = 0

    def begin(self, checkpoint: str = "") -> None:
        """A worker group begins, after a checkpoint."""
        _begin(self.course, checkpoint, at=time.time())
        self.steps = int(checkpoint.rpartition("-")[2] or 0)
        next(self.looks)

    def report(self, commits: bool = False) -> None:
        """The next step is reported, perhaps with a checkpoint, and the player looks."""
        self.steps += 1
        _report(self.course, time.time(), f"step-{self.steps}" if commits else "", step=self.steps)
        next(self.looks)


def test_a_fault_comes_after_a_checkpoint_and_is_over_when_something_new_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(players, "_OUTAGE_SECONDS", 0.0)
    faults = [Fault("worker", 0.0, 0.9), Fault("storage", 0.0, 0.0)]
    on = _Played(tmp_path, monkeypatch, *faults, enough=lambda course: len(course.reports) > 8)
    on.begin()
    on.report()
    assert not on.killed, "there is nothing to resume from"
    on.report(commits=True)
    assert on.killed == [101], "rank 1"
    on.report()
    assert not on.player.played, "that was the old group"
    on.begin("step-2")
    on.report()
    assert not on.player.played, "that was done before"
    on.report()
    [played] = on.player.played
    assert (played.kind, played.recovered, played.redone, played.workers) == ("worker", True, 1, 2)
    assert not on.outage.exists(), "the next one comes after the next checkpoint"
    on.report()
    on.report(commits=True)
    assert on.outage.exists()
    next(on.looks)
    assert not on.outage.exists()
    assert len(on.player.played) == 1, "nothing was committed since"
    on.report(commits=True)
    assert [one.kind for one in on.player.played] == ["worker", "storage"]
    on.report()
    with pytest.raises(StopIteration):
        on.report()
    assert on.told[0] == "worker: rank 1 is killed"


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_fault_that_is_not_recovered_from_is_told_unless_the_end_of_the_loop_has_cut_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    on = _Played(tmp_path, monkeypatch, Fault("worker", 0.0, 0.0), patience=0.05)
    on.begin()
    on.report(commits=True)
    assert on.killed == [100]
    on.course.is_complete = is_complete
    if is_complete:
        on.looks.close()
        assert (on.player.played, len(on.player.faults)) == ([], 1), "the next training has it"
        return
    time.sleep(0.1)
    assert len([*on.looks]) < 3
    [played] = on.player.played
    assert not played.recovered
    assert "NOT recovered" in played.words


def test_an_undisturbed_training_ends_so_long_after_its_first_report() -> None:
    course = Course()
    looks = players.undisturbed(course, 10.0)
    _begin(course, at=100.0)
    _report(course, 111.0, step=1)
    next(looks)
    time.sleep(0.01)
    next(looks)
    _report(course, 121.5, "step-2", step=2)
    with pytest.raises(StopIteration):
        next(looks)


# ------------------------------------------------------------------------------------------ certificates


def _certificate(**more: Any) -> Certificate:
    given: dict[str, Any] = {
        "loop": "loops:train",
        "framework": "torch",
        "workers": "1 to 2",
        "seed": 7,
        "seconds": 61.0,
        "at": 0.0,
        "versions": {"ray": "2.60.0"},
        "faults": [],
        "findings": [],
        "compared": "the same",
        **more,
    }
    return Certificate(**given)


PLAYED = Played(kind="worker", what="rank 1 is killed", recovered=True, seconds=1.5, redone=1, workers=1)


def test_a_certificate_is_passed_only_if_every_fault_was_recovered_from_and_nothing_is_wrong(tmp_path: Path) -> None:
    warned = Finding(level="warn", about="saves rarely", message="it saves each 600 s", remedy="more often")
    good = _certificate(faults=[PLAYED], findings=[warned], metrics={"loss": 0.5}, undisturbed_metrics={"loss": 0.5})
    assert good.passed
    lost = PLAYED.model_copy(update={"recovered": False})
    wrong = Finding(level="fail", about="<script>", message="x")
    bad = _certificate(faults=[lost]), _certificate(findings=[wrong])
    assert not any(one.passed for one in bad)
    assert "# loops:train recovers" in good.markdown()
    assert "| worker | rank 1 is killed | 1 worker went on after 1.5 s, 1 report done again |" in good.markdown()
    assert "*To do:* more often" in good.markdown()
    good.save(tmp_path)
    assert json.loads((tmp_path / "rehearsal-loops-train-7.json").read_text())["passed"] is True
    assert Certificate.model_validate_json((tmp_path / "rehearsal-loops-train-7.json").read_text()) == good
    assert "<td>rank 1 is killed</td>" in (tmp_path / "rehearsal-loops-train-7.html").read_text()
    bad[1].save(tmp_path)
    assert "<script>" not in (tmp_path / "rehearsal-loops-train-7.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"faults": ["worker", "fire"]}, "fire"),
        ({"faults": []}, "worker, driver, freeze"),
        ({"workers": 0}, "workers=0"),
        ({"minutes": 0}, "above 0"),
        ({"framework": "tf"}, "'tf' is unknown"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        rehearse("json:loads", **arguments)


def test_more_gpus_than_there_are_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsing, "_gpus_here", lambda: 1)
    with pytest.raises(ConfigurationError, match="2 workers need 2 GPUs, and this machine has 1"):
        rehearse("json:loads", scaling=ElasticScaling(accelerator="gpu", resources_per_worker={"GPU": 0.5}))


@pytest.mark.parametrize(("visible", "count"), [("2,3", 2), ("0,1,2,3,4", 4), ("", 0), ("-1", 0)])
def test_gpus_that_this_process_may_not_see_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, count: int
) -> None:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(rehearsing, "_GPUS", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.setattr(rehearsing, "_UNCOUNTED", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rehearsing._gpus_here() == count


def test_a_rehearsal_that_is_interrupted_leaves_a_certificate_that_is_not_passed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = list[Path]()

    def interrupt(stage: Stage) -> None:
        folders.append(stage.folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rehearse("json:loads", save_to=tmp_path)
    saved = json.loads((tmp_path / "rehearsal-loads-0.json").read_text())
    assert (saved["passed"], [one["about"] for one in saved["findings"]]) == (False, ["not all rehearsed"])
    assert not folders[0].exists()


def test_a_training_is_cut_off_when_the_time_of_the_rehearsal_is_over(tmp_path: Path) -> None:
    with closing(Stage(Payload("json:loads"), "none", ElasticScaling(), tmp_path, lambda *_: None)) as stage:
        stage._looks = (None for _ in iter(int, 1))  # without an end
        stage._look()
        stage.ends_at = time.time()
        with pytest.raises(Enough):
            stage._look()


def test_a_training_ends_by_a_signal_whose_exception_an_import_has_dropped(tmp_path: Path) -> None:
    notice_interruptions()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with closing(Stage(Payload("json:loads"), "none", ElasticScaling(), tmp_path, lambda *_: None)) as stage:
            stage._looks = (None for _ in iter(int, 1))  # without an end
            stage._look()
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                stage._look()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_refuses_what_the_function_does_and_knows_the_loop() -> None:
    for arguments, part in ((["json:loads", "--faults", "fire"], "fire"), (["no loop"], "'no loop'")):
        result = CliRunner().invoke(app, ["rehearse", *arguments])
        assert result.exit_code == 2
        assert part in result.stderr
