"""Rehearsals: schedules, what a training's events come to, what is wrong with a loop by two of them, certificates."""

import json
import math
import random
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count
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
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.payload import Payload
from prefect_elastic_train.driver.termination_signals import watch_signals
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.rehearsal import fault_injector
from prefect_elastic_train.rehearsal.certificate import Certificate, InjectedFault, Problem
from prefect_elastic_train.rehearsal.comparison import compare_trainings, diagnose_undisturbed
from prefect_elastic_train.rehearsal.fault_injector import FaultInjector
from prefect_elastic_train.rehearsal.runner import rehearse
from prefect_elastic_train.rehearsal.sandbox import Sandbox, StopTraining
from prefect_elastic_train.rehearsal.schedule import KINDS, PlannedFault, schedule_faults
from prefect_elastic_train.rehearsal.trace import Trace

# ------------------------------------------------------------------------------------------ schedules


def test_a_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert schedule_faults(KINDS, 3) == schedule_faults(KINDS, 3) != schedule_faults(KINDS, 4)


@pytest.mark.parametrize("seed", range(20))
def test_faults_that_change_the_number_of_workers_come_last_and_each_lost_node_is_replaced(seed: int) -> None:
    kinds = [fault.kind for fault in schedule_faults(KINDS, seed)]
    assert sorted(kinds[:4]) == ["driver", "freeze", "storage", "worker"]
    assert [kinds[5], kinds[7]] == ["growth", "growth"]
    assert {kinds[4], kinds[6]} == {"node", "drain"}
    assert [fault.kind for fault in schedule_faults(["growth"], seed)] == ["node", "growth"]
    fixed = [fault.kind for fault in schedule_faults(["node", "growth"], seed, can_shrink=False)]
    assert fixed == ["node"], "where the training waits for a node there is nothing to grow"


# ------------------------------------------------------------------------------------------ traces


def _begin(trace: Trace, checkpoint: str = "", world: int = 2, at: float = 0.0) -> None:
    ranks = {f"10.0.0.{rank}:{100 + rank}": rank for rank in range(world)}
    trace.handle(ev.WorkerGroupStarted(world_size=world, checkpoint=checkpoint, ranks=ranks, at=at))


def _report(trace: Trace, at: float, checkpoint: str = "", **metrics: Any) -> None:
    how = {"metrics": metrics, "world_size": len(trace.ranks), "at": at}
    trace.handle(
        ev.CheckpointCommitted(checkpoint=checkpoint, size_bytes=1, **how) if checkpoint else ev.Reported(**how)
    )


LOSSES = [1 / step for step in range(1, 31)]


def _changed(since: int, by: float) -> list[float]:
    return [loss if step < since else loss * (1 + by) for step, loss in enumerate(LOSSES, 1)]


def _trace(
    losses: Sequence[float] = LOSSES,
    resumes: dict[int, tuple[int, int]] | None = None,
    folder: Path | None = None,
    every: int = 5,
    states: Sequence[float] | None = None,
) -> Trace:
    """A training with a report a second and a checkpoint every five; ``resumes``: from which step, with how many."""
    trace, world = Trace(folder=folder or Path("/none")), 2
    _begin(trace)
    for step, loss in enumerate(losses, 1):
        if resumes and step in resumes:
            back, world = resumes[step]
            for again in range(step, step + 2):  # which does not count
                _report(trace, float(again), step=again, loss=99.0)
            _begin(trace, f"step-{back}", world, float(step))
        checkpoint = f"step-{step}" if step % every == 0 else ""
        _report(trace, float(step), checkpoint, step=step, loss=loss, seconds=random.random())
        if checkpoint and folder is not None:
            (folder / checkpoint).mkdir(parents=True)
            state = (states or losses)[step - 1]
            np.savez(folder / checkpoint / "weights.npz", inner=np.array([1.0, state]), seconds=random.random())
    return trace


def _compare(folders: Path, undisturbed: Sequence[float] = LOSSES, **disturbed: Any) -> Any:
    """Compare two trainings whose states can be read."""
    return compare_trainings(
        _trace(undisturbed, folder=folders / "one"), _trace(**{"folder": folders / "other", **disturbed})
    )


def test_reports_after_a_checkpoint_that_was_gone_back_to_do_not_count() -> None:
    trace = _trace([1.0] * 12, {11: (10, 1)})
    assert [one.metrics["step"] for one in trace.reports] == list(range(1, 13))
    assert (trace.redone, trace.group_count, [save.number for save in trace.saves]) == (2, 2, [5, 10])
    assert [report.group for report in trace.reports] == [1] * 10 + [2] * 2
    assert len(trace.progress_times) == 12, "what is done again is nothing new"
    _begin(trace, "", at=13.0)
    assert (trace.reports, trace.redone) == ([], 14), "from the beginning"
    _report(trace, 14.0, step=1)
    _begin(trace, "without an event", at=15.0)
    assert len(trace.reports) == 1, "what was committed as its driver died goes on from what is known"


@pytest.mark.parametrize(
    ("first", "second", "counter"),
    [
        ({"epoch": 1, "step": 5}, {"epoch": 1, "step": 6}, "step"),
        ({"epoch": 1}, {"epoch": 2}, "epoch"),
        ({"epoch": 1}, {"epoch": 1}, ""),
        ({"step": 1}, {"loss": 2}, ""),
    ],
)
def test_how_far_a_loop_is_its_finest_counter_tells_or_the_number_of_reports(
    first: dict[str, Any], second: dict[str, Any], counter: str
) -> None:
    trace = Trace()
    _begin(trace)
    _report(trace, 0.0, **first)
    _report(trace, 1.0, **second)
    assert trace.counter() == counter
    assert trace.reports[1].progress(counter) == (second[counter] if counter else 2)


# ------------------------------------------------------------------------------------------ comparison


ONCE, SMALLER = {11: (10, 2)}, {11: (10, 1), 16: (15, 2)}


@pytest.mark.parametrize(
    ("what", "since", "by", "resumes", "about", "part"),
    [
        ("losses", 1, 0.0, ONCE, "", "bit for bit the same"),
        ("states", 11, 1e-5, SMALLER, "", "the same within 7e-07"),
        ("losses", 11, 0.5, ONCE, "does not restore all state", "random state"),
        ("losses", 12, 0.5, ONCE, "does not restore all state", "optimizer's state"),
        ("states", 16, 0.5, {**ONCE, 16: (15, 2)}, "does not restore all state", "after 20 reports"),
        ("states", 11, 0.5, ONCE, "does not restore all state", "averaged weights"),
        ("losses", 12, 0.5, SMALLER, "depends on the world size", "with 2, then 1 workers"),
        ("losses", 2, 0.01, ONCE, "not deterministic", "after 5 reports"),
        # Where the number of workers has changed, noise may grow; what comes at once is none.
        ("states", 16, 0.5, {11: (10, 1)}, "", "bit for bit the same"),
        ("states", 16, 0.5, {11: (10, 1), 21: (20, 2)}, "", "rounding differences"),
        ("states", 21, 0.5, {11: (10, 1), 21: (20, 2)}, "depends on the world size", "with 2, then 1, then 2 workers"),
        ("losses", 18, 0.5, {11: (10, 1), 16: (15, 1)}, "does not restore all state", "optimizer's state"),
        ("losses", 11, float("nan"), ONCE, "does not restore all state", "by inf"),
    ],
)
@pytest.mark.parametrize("has_state", [True, False])
def test_what_is_wrong_is_told_by_where_the_two_first_differ(
    tmp_path: Path,
    what: str,
    since: int,
    by: float,
    resumes: dict[int, tuple[int, int]],
    about: str,
    part: str,
    has_state: bool,
) -> None:
    if what == "states" and not has_state:
        pytest.skip("only the checkpoints differ")
    folder = tmp_path / "other" if has_state else None
    found, problem = _compare(tmp_path, resumes=resumes, folder=folder, **{what: _changed(since, by)})
    assert (problem.about if problem else "") == about
    if has_state or "reports" not in part:
        assert part in f"{found.compared} {problem}"
    assert (found.difference is None) == (not has_state)


def test_checkpoints_without_a_common_array_are_not_taken_for_the_same(tmp_path: Path) -> None:
    one, other = _trace(folder=tmp_path / "one"), _trace(folder=tmp_path / "other", resumes=ONCE)
    for step in (15, 20, 25, 30):
        np.savez(tmp_path / "other" / f"step-{step}" / "weights.npz", renamed=np.ones(2))
    assert compare_trainings(one, other)[1].about == "not comparable"
    np.savez(tmp_path / "other" / "step-25" / "weights.npz", inner=np.ones(2))
    assert compare_trainings(one, other)[1].about == "does not restore all state"


@pytest.mark.parametrize("has_shards", [True, False])
def test_with_shards_all_bits_must_be_the_same_also_after_a_resize(tmp_path: Path, has_shards: bool) -> None:
    states = [loss if step < 11 else np.nextafter(loss, 2) for step, loss in enumerate(LOSSES, 1)]
    one = _trace(folder=tmp_path / "one")
    for folder in (tmp_path / "one").iterdir():
        (folder / SESSION_FILE).write_text(json.dumps({"environment": {"shards": 4}} if has_shards else {}))
    resized = _trace(folder=tmp_path / "other", resumes={11: (10, 1)}, states=states)
    _, problem = compare_trainings(one, resized)
    assert (problem.about if problem else "") == ("not bitwise identical" if has_shards else "")
    _, problem = compare_trainings(one, _trace(folder=tmp_path / "same", resumes={11: (10, 1)}))
    assert problem is None


def test_a_state_that_is_wrong_after_a_resume_and_repaired_later_is_found(tmp_path: Path) -> None:
    states = [loss * (1.5 if 10 < step < 16 else 1 + 1e-7) for step, loss in enumerate(LOSSES, 1)]
    _, problem = _compare(tmp_path, resumes=ONCE, states=states)
    assert problem.about == "does not restore all state"
    assert problem.message.startswith("after 15 reports")


def test_trainings_of_which_only_counts_are_known_are_not_compared() -> None:
    traces = [_trace(), _trace(resumes=ONCE)]
    for trace in traces:
        trace.reports = [one._replace(metrics={"step": one.metrics["step"]}) for one in trace.reports]
    assert compare_trainings(*traces)[1].remedy == "report the loss, too"


def test_resumes_beyond_what_the_undisturbed_training_has_done_are_told(tmp_path: Path) -> None:
    found, problem = _compare(tmp_path, LOSSES[:20], resumes={11: (10, 2), 26: (25, 2)}, states=_changed(26, 0.5))
    assert (found.compared, problem) == ("bit for bit the same after 20 of 30 reports", None)
    _, problem = compare_trainings(_trace(LOSSES[:10]), _trace(resumes=ONCE))
    assert problem.about == "not comparable", "nothing after the fault"
    assert "save_every=<steps>" in problem.remedy


def test_a_tolerance_is_for_what_is_reported_too() -> None:
    one, other = _trace(), _trace(_changed(11, 0.05), {11: (10, 1)})
    assert compare_trainings(one, other)[1]
    assert not compare_trainings(one, other, tolerance=0.1)[1]


def test_a_loop_that_ignores_its_checkpoint_is_told_so_and_nothing_that_follows_from_it() -> None:
    other = _trace(_changed(11, 0.5), ONCE)
    other.handle(ev.LoopWarned(problem="no-checkpoint", message="never saved"))
    other.handle(ev.LoopWarned(problem="checkpoint-ignored", message="began again"))
    assert compare_trainings(_trace(), other)[1] == Problem("ignores its checkpoint", "began again")


HUNG = "HungLoopError: no report for 60 s"
STACK = 'the rank was here:\n  File "x.py", line 1, in {}\n    self.wait()'


@pytest.mark.parametrize(
    ("every", "causes", "about", "message"),
    [
        (100, [], "never saves", "30 reports in 30 s, none with a checkpoint"),
        (5, [Cause([0], HUNG, traceback=STACK.format("report"))], "reports unequally", "ranks wait for others"),
        (5, [Cause([0], HUNG, traceback=STACK.format("train"))], "fails undisturbed", HUNG),
        (5, [Cause([0], "ValueError: nan")], "fails undisturbed", "ValueError: nan"),
    ],
)
def test_a_loop_that_never_saves_reports_unequally_or_fails_is_found_undisturbed(
    every: int, causes: list[Cause], about: str, message: str
) -> None:
    trace = _trace(every=every)
    trace.handle(ev.LoopWarned(problem="ranks-wait", message="ranks wait for others"))
    assert (diagnose_undisturbed(trace) is None) == (every == 5)
    if causes:
        trace.handle(ev.WorkerFailed(causes=causes, retried=True))
    elif every > 5:
        assert diagnose_undisturbed(trace, is_time_up=True).about == "rehearsal incomplete"
    problem = diagnose_undisturbed(trace)
    assert (problem.about, problem.message[: len(message)]) == (about, message)


# ------------------------------------------------------------------------------------------ playing


class _InjectedTraining:
    """A trace with a fault injector, driven by hand; records the killed processes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *faults: PlannedFault, **more: Any) -> None:
        self.killed: list[int] = []
        self.trace, self.outage = Trace(), folder / "outage"
        patch.setattr(psutil, "Process", lambda pid: SimpleNamespace(kill=lambda: self.killed.append(pid)))
        sandbox = SimpleNamespace(nodes=SimpleNamespace(ids=[]), outage=self.outage)
        limits = {"counter": "step", "target": math.inf, "timeout_seconds": 60.0, **more}
        self.injector = FaultInjector(sandbox, [*faults], log=lambda line: None, **limits)
        self.scenario = self.injector.inject_faults(self.trace)
        self.steps = 0

    def begin(self, checkpoint: str = "") -> None:
        """Start a worker group from a checkpoint."""
        _begin(self.trace, checkpoint, at=time.time())
        self.steps = int(checkpoint.rpartition("-")[2] or 0)
        next(self.scenario)

    def report(self, commits: bool = False) -> None:
        """Report the next step, perhaps with a checkpoint, and resume the injector."""
        self.steps += 1
        _report(self.trace, time.time(), f"step-{self.steps}" if commits else "", step=self.steps)
        next(self.scenario)


def test_a_fault_comes_after_a_checkpoint_and_is_over_when_something_new_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fault_injector._FAULT_SECONDS, "storage", 0.0)
    faults = [PlannedFault("worker", 0.0, 0.9), PlannedFault("storage", 0.0, 0.0)]
    on = _InjectedTraining(tmp_path, monkeypatch, *faults, target=7)
    on.begin()
    on.report()
    assert not on.killed, "there is nothing to resume from"
    on.report(commits=True)
    assert on.killed == [101], "rank 1"
    on.report()
    assert not on.injector.injected, "that was the old group"
    on.begin("step-2")
    on.report()
    assert not on.injector.injected, "that was done before"
    on.report()
    [injected] = on.injector.injected
    assert (injected.what, injected.recovered, injected.redone, injected.workers) == ("rank 1 was killed", True, 1, 2)
    assert not on.outage.exists(), "the next one comes after the next checkpoint"
    on.report()
    on.report(commits=True)
    assert on.outage.exists()
    next(on.scenario)
    assert not on.outage.exists()
    assert len(on.injector.injected) == 1, "nothing was committed since"
    on.report(commits=True)
    assert [one.kind for one in on.injector.injected] == ["worker", "storage"]
    with pytest.raises(StopIteration):
        on.report()


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_fault_that_is_not_recovered_from_is_told_unless_the_end_of_the_loop_has_cut_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    on = _InjectedTraining(tmp_path, monkeypatch, PlannedFault("worker", 0.0, 0.0), timeout_seconds=0.05)
    on.begin()
    on.report(commits=True)
    assert on.killed == [100]
    on.trace.is_complete = is_complete
    if is_complete:
        on.scenario.close()
        assert (on.injector.injected, len(on.injector.faults)) == ([], 1), "the next training has it"
        return
    time.sleep(0.1)
    assert len([*on.scenario]) < 3
    [injected] = on.injector.injected
    assert not injected.recovered
    assert "NOT recovered" in injected.outcome


def test_an_undisturbed_training_ends_so_long_after_its_first_report() -> None:
    trace = Trace()
    scenario = fault_injector.run_undisturbed(trace, 10.0)
    _begin(trace, at=100.0)
    _report(trace, 111.0, step=1)
    next(scenario)
    _report(trace, 121.5, "step-2", step=2)
    with pytest.raises(StopIteration):
        next(scenario)


# ------------------------------------------------------------------------------------------ certificates


CERTIFICATE = Certificate(
    loop="loops:train", framework="torch", workers="1 to 2", seed=7, at=0.0, versions={"ray": "2.60.0"}
)
INJECTED = InjectedFault(kind="worker", what="rank 1 was killed", recovered=True, seconds=1.5, redone=1, workers=1)


def test_a_certificate_is_passed_only_if_every_fault_was_recovered_from_and_nothing_is_wrong(tmp_path: Path) -> None:
    good = CERTIFICATE.model_copy(update={"faults": [INJECTED], "metrics": {"loss": 0.5}})
    assert good.passed
    lost = CERTIFICATE.model_copy(update={"faults": [INJECTED.model_copy(update={"recovered": False})]})
    wrong = CERTIFICATE.model_copy(update={"findings": [Problem("never saves", "x", remedy="more often")]})
    assert not lost.passed
    assert not wrong.passed
    assert "# loops:train recovers from faults" in good.markdown()
    assert "| worker | rank 1 was killed | recovered after 1.5 s; workers: 1, repeated reports: 1 |" in good.markdown()
    assert "*To do:* more often" in wrong.markdown()
    good.save(tmp_path)
    saved = (tmp_path / "rehearsal-loops-train-7.json").read_text()
    assert json.loads(saved)["passed"] is True
    assert Certificate.model_validate_json(saved) == good
    assert (tmp_path / "rehearsal-loops-train-7.md").read_text() == good.markdown()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"faults": ["worker", "fire"]}, "fire"),
        ({"faults": []}, "worker, driver, freeze"),
        ({"workers": 0}, "workers=0"),
        ({"minutes": 0}, "above 0"),
        ({"framework": "tf"}, "'tf' is unknown"),
        (
            {"scaling": ElasticScaling(accelerator="gpu", resources_per_worker={"GPU": 0.5})},
            "2 workers need 2 GPUs, and this process may use 1",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], part: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigurationError, match=part):
        rehearse("json:loads", **arguments)


def test_a_rehearsal_that_is_interrupted_leaves_a_certificate_that_is_not_passed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = list[Path]()

    def interrupt(sandbox):
        folders.append(sandbox.folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sandbox, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rehearse("json:loads", save_to=tmp_path)
    saved = json.loads((tmp_path / "rehearsal-loads-0.json").read_text())
    assert (saved["passed"], [one["about"] for one in saved["findings"]]) == (False, ["rehearsal incomplete"])
    assert not folders[0].exists()


def test_a_training_ends_with_the_time_of_the_rehearsal_and_by_a_signal_whose_exception_an_import_has_dropped(
    tmp_path: Path,
) -> None:
    watch_signals()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    with closing(Sandbox(Payload("json:loads"), "none", ElasticScaling(), tmp_path, lambda *_: None)) as sandbox:
        sandbox._scenario = (None for _ in count())
        sandbox.check_stop()
        sandbox.ends_at = time.time()
        with pytest.raises(StopTraining):
            sandbox.check_stop()
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
        with pytest.raises(KeyboardInterrupt):
            sandbox.check_stop()


def test_the_command_refuses_what_the_function_does_and_knows_the_loop() -> None:
    for arguments, part in ((["json:loads", "--faults", "fire"], "fire"), (["no loop"], "'no loop'")):
        result = CliRunner().invoke(app, ["rehearse", *arguments])
        assert result.exit_code == 2
        assert part in result.stderr
