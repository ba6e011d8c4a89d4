"""Beginning an attempt: who may write a run, and taking it over from whoever did before."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

import psutil

from prefect_elastic_train.core.bounds import cut
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, EndedRecord, RunRecord, encode
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.version import __version__
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.liveness import driver_process, is_alive
from prefect_elastic_train.runs.model import RECENT, SEED_COMMIT, Attempt, ResumePoint, RunDirectory, refusal
from prefect_elastic_train.runs.resume import adopt_snapshot, restore_snapshot
from prefect_elastic_train.storage.store import RunStore

_MAX_TURNS = 20  # of the take-over loop, which turns again only when somebody else took a step in between
#: How much of an attempt's last words is recorded, and goes into the error that says why no other follows.
_MESSAGE_BYTES = 4000
#: An attempt that ended so may be followed by another one without a person's doing.
_COUNTED = {outcome.value for outcome in Outcome if outcome.retryable or outcome is Outcome.SUPERSEDED}
_VERSIONS = {"ray": version("ray"), "prefect-elastic-train": __version__, "python": sys.version.split()[0]}


@dataclass(frozen=True)
class Begun:
    """An attempt that holds the fence."""

    attempt: int
    point: ResumePoint
    counted: int  # number of attempts of this flow run that count, this one included
    restarts_left: int  # how many may follow without any progress that makes up for them
    notes: list[str]  # what the user should know: repairs, changed configuration, a driver that was ended
    run_id: str


def begin_attempt(store: RunStore, spec: DriverSpec, seed: Callable[[], None] | None = None) -> Begun | EndedRecord:
    """Take the run over for the spec's owner, or return how it was finished before, so that nothing is left to do.

    ``seed`` copies the checkpoint that a new run starts from; it is called once, if the run has no commit.

    Raises:
        AttemptFailedError: The run is another flow run's or not the same training, or a budget is used up.
    """
    notes: list[str] = []
    request = spec.request
    for _ in range(_MAX_TURNS):
        run = RunDirectory(store)
        newest = next(run.lineage, None)
        if (finished := peek(run, request)) is not None:
            return finished
        if run.record is None:
            notes += _claim(run, request)
            continue
        last = run.newest_attempt
        if last is not None:
            notes += _end_old_driver(last, request)
        counted, restarts_left = _count(run, spec)
        point, attempt = run.resume_point, run.next_number  # refused where commits are lost: no copy replaces them
        if seed is not None and newest is None:
            seed()
            seed = None
            continue
        record = AttemptRecord(
            attempt=attempt,
            run_id=run.record.id,
            owner=request.owner,
            fingerprint=request.fingerprint,
            confirmed=False,
            base=point.base,
            dropped=point.dropped,
            repairs=point.repairs,
            versions=_VERSIONS,
            score_attribute=spec.checkpoints.score_attribute,
        )
        if not store.create(layout.attempt_name(attempt), encode(record)):
            continue  # somebody else began this attempt: look again at who holds the run
        if next(RunDirectory(store, attempt - 1).lineage, None) != newest:
            end_attempt(store, attempt, Outcome.SUPERSEDED.value, "the previous holder committed meanwhile")
            continue
        store.replace(layout.attempt_name(attempt), encode(record.model_copy(update={"confirmed": True})))
        if last is not None and last.ended is None:
            end_attempt(store, last.number, Outcome.DRIVER_LOST.value, f"taken over by attempt {attempt}")
        before = run.fingerprint or run.record.fingerprint
        if differences := before.differences(request.fingerprint):
            notes.append("the run has another configuration than before: " + "; ".join(differences))
        warning = before.uncompared(request.fingerprint)
        if warning and run.owner is not None and run.owner.supervisor != request.owner.supervisor:
            notes.append(warning)  # a task retry has the same values
        notes += point.repairs + restore_snapshot(store, point)
        return Begun(attempt, point, counted + 1, restarts_left, notes, run.record.id)
    raise refusal(
        f"run {request.run_name!r} changed hands {_MAX_TURNS} times while this driver tried to begin; another flow run "
        "is starting on it, give this one another run_name"
    )


def end_attempt(
    store: RunStore, attempt: int, outcome: str, message: str = "", *, result: dict[str, object] | None = None
) -> None:
    """Record how an attempt ended; the first record stays."""
    record = EndedRecord(attempt=attempt, outcome=outcome, message=cut(message, _MESSAGE_BYTES), result=result)
    store.create(layout.ended_name(attempt), encode(record))


def peek(run: RunDirectory, request: RunRequest) -> EndedRecord | None:
    """Return how the flow run's own run was finished; None if there is something to do. Refuse what may not be done."""
    record, last, owner, name = run.record, run.newest_attempt, run.owner, request.run_name
    is_own = owner is not None and owner.flow_run_id == request.owner.flow_run_id
    if request.begun and not (run.numbers or run.commits):
        raise refusal(
            f"attempts of run {name!r} have begun, and {run.uri} holds none of them: the storage is not mounted here, "
            "is another one than before, or the run was deleted. Nothing was written. Make the storage available and "
            "retry the flow run; to begin again without it, start a new flow run, or give another run_name",
            Outcome.STORAGE_ERROR,
        )
    if record is None and last is None:
        if run.is_foreign and not request.resume:
            raise refusal(
                f"{run.uri} holds a run that another program wrote with Ray Train; give another run_name, or "
                "resume=True to continue it"
            )
    elif not is_own:
        _check_takeover(run, request)
    if record is not None and request.resume_from and record.resume_from != request.resume_from:
        raise refusal(
            f"run {name!r} exists and did not start from {request.resume_from!r}; resume_from starts a new run, so "
            "give it a new run_name"
        )
    finished = last.ended if is_own and last is not None and last.outcome == Outcome.COMPLETED.value else None
    differences = run.fingerprint.differences(request.fingerprint) if run.fingerprint is not None else []
    if request.resume and (differences or run.fingerprint is None):
        finished = None  # it trains on
    if differences and not request.resume and (finished is not None or not request.named):
        raise refusal(
            f"run {name!r} was trained with another configuration: {'; '.join(differences)}. If this flow trains "
            f"several models, give each its own run_name; to continue this run with the new configuration, give "
            f"run_name={name!r}, and resume=True if it is finished"
        )
    mine = request.owner
    if finished is None and owner is not None and is_own and owner.supervisor != mine.supervisor:
        records = map(run.attempt_record, run.numbers[-RECENT:])
        was_mine = mine.supervisor in [one.owner.supervisor for one in records if one is not None]
        is_beside = 0 < mine.execution == owner.execution
        if was_mine or (is_beside and not (last and last.ended) and is_alive(run.store, owner)):
            raise refusal(
                f"the newest attempt of run {name!r} in {run.uri} was begun by another "
                f"{'training' if is_beside else 'process'} of the same flow run, so this one stops. "
                "Trainings that run at the same time need a run_name each",
                Outcome.INVALID if is_beside else Outcome.SUPERSEDED,
            )
    return finished


def _check_takeover(run: RunDirectory, request: RunRequest) -> None:
    """Refuse another flow run's run unless the user wants it and nobody works on it."""
    last, owner = run.newest_attempt, run.owner
    whose = owner.describe() if owner is not None else "a flow run whose name cannot be read any more"
    if not request.resume:
        raise refusal(
            f"run {request.run_name!r} in {run.uri} belongs to {whose}. Give this training another run_name, or "
            "resume=True to take the run over"
        )
    known = owner if last is None or last.record is not None else None  # of a torn one the heartbeat tells
    if (last is None or last.ended is None) and is_alive(run.store, known):
        place = f" on {owner.host.partition('/')[0]}, pid {owner.pid}" if owner is not None else ""
        raise refusal(
            f"run {request.run_name!r} is being trained right now by {whose}{place}; cancel that flow run first, then "
            "resume"
        )


def _claim(run: RunDirectory, request: RunRequest) -> list[str]:
    """Create the record of a run, or write it anew where it is lost; return what there is to say of it."""
    begun = [*filter(None, map(run.attempt_record, run.numbers))]
    is_torn = run.read(layout.RUN) is not None
    notes = adopt_snapshot(run.store) if run.is_foreign and not run.numbers else []
    record = RunRecord(
        name=request.run_name,
        id=begun[-1].run_id if begun else uuid.uuid4().hex,
        # Whoever asks for a run that has lost its record is not its creator for that.
        creator=begun[0].owner if begun else request.owner,
        fingerprint=run.fingerprint or request.fingerprint,
        resume_from=request.resume_from,
        part=request.part,
        versions=_VERSIONS,
    )
    if is_torn:
        run.store.replace(layout.RUN, encode(record))
    elif not run.store.create(layout.RUN, encode(record)):
        return []
    if is_torn or run.numbers:
        notes.append("run.json was torn or missing and was written anew")
    elif request.resumed and not notes:
        notes.append(
            f"the flow run ran before, and there was no run {request.run_name!r} in {run.uri}: it is a new one. If it "
            "had trained before, cancel it and mount the storage"
        )
    elif request.resume and not notes:
        notes.append(f"resume=True, but there was no run {request.run_name!r} in this storage: it is a new one")
    return notes


def _count(run: RunDirectory, spec: DriverSpec) -> tuple[int, int]:
    """Count this flow run's attempts since the last end that nobody restarts, and the restarts left after the next.

    An attempt stops counting once later ones have committed enough training. Fail if a budget is used up.
    """
    failures, lineage = spec.failures, run.lineage
    newest = sys.maxsize, 0
    counted = idle = 0
    in_a_row, trained = True, 0.0
    for attempt in map(run.attempt, reversed(run.numbers)):
        record, ended = attempt.record, attempt.ended
        if record is not None and record.owner.flow_run_id != spec.request.owner.flow_run_id:
            break
        if 0 < failures.forgive_after_seconds <= trained:  # this holds for all earlier attempts, too
            break
        while newest[0] > attempt.number:
            newest = next(lineage, SEED_COMMIT)
        if newest[0] == attempt.number:
            in_a_row = False
            commit = run.commit(newest)
            trained += commit.trained if commit is not None else 0.0
        # One that gave way before it did anything, or that a person stopped, spends no budget; commits are progress.
        if attempt.outcome == Outcome.CANCELLED.value or (record is not None and not record.confirmed):
            continue
        if ended is not None and (ended.verdict or attempt.outcome not in _COUNTED):
            break
        counted, idle = counted + 1, idle + in_a_row
    if idle >= failures.max_attempts_without_progress:
        outcome = Outcome.NO_PROGRESS
        verdict = (
            f"{idle} attempts in a row ended without a new checkpoint, so another one would end so, too. Correct what "
            "ends them and retry the flow run, or raise max_attempts_without_progress (now "
            f"{failures.max_attempts_without_progress}) of the FailureBudget"
        )
    elif counted > failures.driver_restarts:
        outcome = Outcome.DRIVER_LOST
        verdict = (
            f"the driver restarts of this flow run are used up: {counted} attempts began, 1 + "
            f"driver_restarts ({failures.driver_restarts}) are allowed over all its resumes. Retry the flow run for a "
            "fresh budget, or raise driver_restarts of the FailureBudget"
        )
    else:
        return counted, failures.driver_restarts - counted
    last = run.attempt(run.numbers[-1])
    ended = last.ended or EndedRecord(attempt=last.number, outcome=Outcome.DRIVER_LOST.value, message="no last word")
    run.store.replace(layout.ended_name(last.number), encode(ended.model_copy(update={"verdict": verdict})))
    message = f"{verdict}. The last of them ended as {ended.outcome}: {cut(ended.message, _MESSAGE_BYTES // 4)}"
    raise AttemptFailedError(message, outcome=outcome, attempt=last.number, final=True)


def _end_old_driver(last: Attempt, request: RunRequest) -> list[str]:
    """End this flow run's previous driver if it still lives on this machine. It is fenced off in any case."""
    owner = last.record.owner if last.record is not None and last.ended is None else None
    process = driver_process(owner) if owner is not None and owner.flow_run_id == request.owner.flow_run_id else None
    if process is None or process.pid == os.getpid():
        return []
    with suppress(psutil.Error):
        process.kill()
        process.wait(10)
    return [f"the driver of attempt {last.number} (pid {process.pid}) was still alive and was ended"]
