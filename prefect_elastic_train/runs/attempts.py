"""Start of an attempt: the checks whether it may write the run, and the takeover from the attempt before."""

import os
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import NamedTuple

import psutil

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, EndedRecord, Owner, RunRecord, encode
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.size_limits import truncate
from prefect_elastic_train.core.version import __version__
from prefect_elastic_train.storage.store import RunStore

from . import layout
from .commits import adopt_snapshot, restore_snapshot
from .heartbeat import driver_process, is_alive
from .run_directory import SEED_COMMIT, RecordedAttempt, ResumePoint, RunDirectory

_RECENT = 10  # number of the newest attempts that are searched for those of this call of ``elastic_train``
_MAX_TRIES = 20  # number of tries of a takeover; each was prevented by a change of the run in between
#: Size limit of an attempt's message in the record of its end. A quarter goes into the error about an exhausted budget.
_MESSAGE_BYTES = 4000
#: Outcomes that another attempt may follow without a person's action.
_COUNTED = {outcome.value for outcome in Outcome if outcome.retryable or outcome is Outcome.SUPERSEDED}
_VERSIONS = {"ray": version("ray"), "prefect-elastic-train": __version__, "python": sys.version.split()[0]}


class Begun(NamedTuple):
    """Result of :func:`begin_attempt`: an attempt that holds the fence, so that its driver can train the run."""

    attempt: int
    point: ResumePoint
    counted: int  # number of attempts of this flow run that count against its budget, with this one
    notes: list[str]  # messages for the user: repairs, changed configuration, a driver that was killed
    run_id: str


def begin_attempt(
    store: RunStore, spec: DriverSpec, seed: Callable[[], list[str]] | None = None
) -> Begun | EndedRecord:
    """Start an attempt that takes over the run of the spec; or, if the run is completed, return the record of its end.

    Args:
        store: The run directory.
        spec: The spec of the driver, with the owner of the attempt.
        seed: Copies the checkpoint of another run that a new run starts from, and returns messages for the user; called
            at most once, if the run has no commit.

    Raises:
        AttemptFailedError: The run belongs to another flow run or is not the same training, or a budget is exhausted.
    """
    notes: list[str] = []
    request = spec.request
    for _ in range(_MAX_TRIES):
        run = RunDirectory(store)
        newest = run.newest_commit_id
        completed = check_run_is_free(run, request)
        if completed:
            return completed
        if not run.record:
            notes += _record_or_adopt_run(run, request)
            continue
        last = run.newest_attempt
        notes += _kill_driver(last, request)
        counted = _check_budgets(run, spec)
        point = run.resume_point  # raises if commits are lost: then no copy may replace them
        if seed and not newest:
            notes += seed()
            seed = None
            continue
        attempt = run.next_attempt_number
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
            continue  # another process started this attempt: check again who holds the run
        if RunDirectory(store, attempt - 1).newest_commit_id != newest:
            continue  # the previous holder committed meanwhile: this attempt stays unconfirmed
        store.replace(layout.attempt_name(attempt), encode(record.model_copy(update={"confirmed": True})))
        if last.number and not last.ended:
            end_attempt(store, last.number, Outcome.DRIVER_LOST, f"taken over by attempt {attempt}")
        notes += [*_configuration_notes(run, request), *(point.repairs or _snapshot_notes(run, point))]
        restore_snapshot(store, point.commit)
        return Begun(attempt, point, counted + 1, notes, run.record.id)
    raise AttemptFailedError(
        f"run {request.run_name!r} was changed {_MAX_TRIES} times while this driver tried to start; another flow run "
        "is starting on it, give this one another run_name"
    )


def end_attempt(
    store: RunStore, attempt: int, outcome: str, message: str = "", *, result: dict[str, object] | None = None
) -> None:
    """Record the outcome, message and result of an attempt in the run directory, unless they are recorded already."""
    record = EndedRecord(attempt=attempt, outcome=outcome, message=truncate(message, _MESSAGE_BYTES), result=result)
    store.create(layout.ended_name(attempt), encode(record))


def check_run_is_free(run: RunDirectory, request: RunRequest) -> EndedRecord | None:
    """Check that the flow run of a request may train the run. Write nothing.

    Returns:
        The record of the end of the last attempt, if the run is completed and is not to be trained further; else None.

    Raises:
        AttemptFailedError: The run belongs to another flow run, another process trains it, it is not the requested
            training, or it is missing.
    """
    name = request.run_name
    if request.begun and not (run.attempt_numbers or run.commit_ids):
        raise AttemptFailedError(
            f"attempts of run {name!r} have begun, and {run.uri} holds none of them: the storage is not mounted here, "
            "is another one than before, or the run was deleted. Nothing was written. Make the storage available and "
            "retry the flow run; to begin again without it, start a new flow run, or give another run_name",
            outcome=Outcome.STORAGE_ERROR,
        )
    last = run.newest_attempt
    is_own = run.owner is not None and run.owner.flow_run_id == request.owner.flow_run_id
    if not run.record and not last.number:
        if run.is_foreign and not request.resume:
            raise AttemptFailedError(
                f"{run.uri} holds a run that another program wrote with Ray Train; give another run_name, or "
                "resume=True to continue it"
            )
    elif not is_own:
        _check_takeover(run, request)
    if run.record and request.resume_from and run.record.resume_from != request.resume_from:
        raise AttemptFailedError(
            f"run {name!r} exists and did not start from {request.resume_from!r}; resume_from starts a new run, so "
            "give it a new run_name"
        )
    completed = last.ended if is_own and last.outcome == Outcome.COMPLETED else None
    differences = (run.fingerprint or request.fingerprint).differences(request.fingerprint)
    if differences and request.resume:
        completed = None  # it is trained further
    elif differences and (completed or not request.named):
        raise AttemptFailedError(
            f"run {name!r} was trained with another configuration: {'; '.join(differences)}. If this flow trains "
            f"several models, give each its own run_name; to continue this run with the new configuration, give "
            f"run_name={name!r}, and resume=True if it is finished"
        )
    if is_own and not completed:
        _check_not_superseded(run, request.owner)
    return completed


def _check_takeover(run: RunDirectory, request: RunRequest) -> None:
    """Raise an error unless the request may take over this run of another flow run.

    It may if the user gave ``resume=True`` and the run's driver is not alive.
    """
    last = run.newest_attempt
    owner = run.owner
    holder = owner.describe() if owner else "a flow run whose name cannot be read any more"
    if not request.resume:
        raise AttemptFailedError(
            f"run {request.run_name!r} in {run.uri} belongs to {holder}. Give this training another run_name, or "
            "resume=True to take the run over"
        )
    # If the newest record is torn, the owner is that of an earlier attempt, and the heartbeat decides.
    if not last.ended and is_alive(run.store, owner if last.record or not last.number else None):
        location = f" on {owner.host.partition('/')[0]}, pid {owner.pid}" if owner else ""
        raise AttemptFailedError(
            f"run {request.run_name!r} is being trained right now by {holder}{location}; cancel that flow run first, "
            "then resume"
        )


def _check_not_superseded(run: RunDirectory, owner: Owner) -> None:
    """Raise an error if another call of ``elastic_train`` in the same flow run trains the run, or took it over."""
    holder = run.owner
    if not holder or holder.supervisor == owner.supervisor:
        return
    records = filter(None, map(run.attempt_record, run.attempt_numbers[-_RECENT:]))
    was_holder = any(record.owner.supervisor == owner.supervisor for record in records)
    is_same_execution = 0 < owner.execution == holder.execution
    if was_holder or (is_same_execution and not run.newest_attempt.ended and is_alive(run.store, holder)):
        raise AttemptFailedError(
            f"the newest attempt of run {run.name!r} in {run.uri} was started by another "
            f"{'training' if is_same_execution else 'process'} of the same flow run, so this one stops. "
            "Trainings that run at the same time need a run_name each",
            outcome=Outcome.INVALID if is_same_execution else Outcome.SUPERSEDED,
        )


def _record_or_adopt_run(run: RunDirectory, request: RunRequest) -> list[str]:
    """Write the run's record, ``run.json``, if it is missing or torn; return messages for the user.

    Checkpoints that Ray Train wrote into the run directory without this package are committed first.
    """
    newest = run.newest_record
    is_torn = run.read(layout.RUN) is not None
    notes = adopt_snapshot(run.store) if run.is_foreign and not run.attempt_numbers else []
    record = RunRecord(
        name=request.run_name,
        id=newest.run_id if newest else uuid.uuid4().hex,
        creator=run.owner or request.owner,
        fingerprint=run.fingerprint or request.fingerprint,
        resume_from=request.resume_from,
        training_name=request.training_name,
        versions=_VERSIONS,
    )
    if is_torn:
        run.store.replace(layout.RUN, encode(record))
    elif not run.store.create(layout.RUN, encode(record)):
        return []
    if is_torn or run.attempt_numbers:
        notes.append("run.json was torn or missing and was rewritten")
    elif request.resumed and not notes:
        notes.append(
            f"the flow run ran before, and there was no run {request.run_name!r} in {run.uri}: a new run starts. If "
            "the flow run trained before, cancel it and mount the storage"
        )
    elif request.resume and not notes:
        notes.append(f"resume=True, but there was no run {request.run_name!r} in this storage: a new run starts")
    return notes


def _check_budgets(run: RunDirectory, spec: DriverSpec) -> int:
    """Return the number of attempts of the flow run that count against its budgets.

    If a budget is exhausted, record that in the end of the last attempt, and raise an AttemptFailedError.
    """
    failures = spec.failures
    progress = _counted_attempts(run, spec)
    counted = len(progress)
    without_progress = progress.count(False)
    if without_progress >= failures.max_attempts_without_progress:
        outcome = Outcome.NO_PROGRESS
        reason = (
            f"{without_progress} attempts in a row ended without a new checkpoint, and the next one would end the same "
            "way. Correct the cause and retry the flow run, or raise max_attempts_without_progress (now "
            f"{failures.max_attempts_without_progress}) of the FailureBudget"
        )
    elif counted > failures.driver_restarts:
        outcome = Outcome.DRIVER_LOST
        reason = (
            f"the driver restarts of this flow run are used up: {counted} attempts began, 1 + "
            f"driver_restarts ({failures.driver_restarts}) are allowed over all its resumes. Retry the flow run for a "
            "fresh budget, or raise driver_restarts of the FailureBudget"
        )
    else:
        return counted
    last = run.newest_attempt
    ended = last.ended or EndedRecord(attempt=last.number, outcome=Outcome.DRIVER_LOST, message="no final event")
    run.store.replace(layout.ended_name(last.number), encode(ended.model_copy(update={"exhausted_budget": reason})))
    raise AttemptFailedError(
        f"{reason}. The last of them ended as {ended.outcome}: {truncate(ended.message, _MESSAGE_BYTES // 4)}",
        outcome=outcome,
        attempt=last.number,
        final=True,
    )


def _counted_attempts(run: RunDirectory, spec: DriverSpec) -> list[bool]:
    """Return a bool for each attempt that counts against the budgets, newest first.

    It is True if the attempt or a later one committed a checkpoint. Attempts of this flow run count, since the last
    attempt that no automatic restart follows. An attempt no longer counts once later attempts have committed
    ``forgive_after_seconds`` of training. Cancelled attempts do not count.
    """
    lineage = run.lineage
    newest = (sys.maxsize, 0)
    progress = []
    has_progress = False
    trained = 0.0
    for attempt in map(run.attempt, reversed(run.attempt_numbers)):
        record = attempt.record
        if record and record.owner.flow_run_id != spec.request.owner.flow_run_id:
            break
        if 0 < spec.failures.forgive_after_seconds <= trained:  # true of all earlier attempts, too
            break
        while newest[0] > attempt.number:
            newest = next(lineage, SEED_COMMIT)
        if newest[0] == attempt.number:
            has_progress = True
            commit = run.commit(newest)
            trained += commit.trained if commit else 0.0
        # Attempts that did nothing, or that a person cancelled, do not count. Their commits are progress.
        if attempt.outcome == Outcome.CANCELLED or (record and not record.confirmed):
            continue
        if attempt.ended and (attempt.ended.exhausted_budget or attempt.outcome not in _COUNTED):
            break
        progress.append(has_progress)
    return progress


def _configuration_notes(run: RunDirectory, request: RunRequest) -> list[str]:
    """Return messages about values of the configuration that differ from the attempt before, or cannot be compared."""
    before = run.fingerprint or request.fingerprint
    notes = []
    if differences := before.differences(request.fingerprint):
        notes.append("the run has another configuration than before: " + "; ".join(differences))
    warning = before.uncompared(request.fingerprint)
    # A task retry has the same values.
    if warning and run.owner and run.owner.supervisor != request.owner.supervisor:
        notes.append(warning)
    return notes


def _snapshot_notes(run: RunDirectory, point: ResumePoint) -> list[str]:
    """Return a message if Ray's snapshot file is torn, or has more reports than the commit that replaces it.

    Fewer reports are no fault: the file is written after a commit, and not by incremental commits.
    """
    mirror = run.mirror
    reports = point.commit.snapshot["current_report_index"] if point.commit else 0
    is_unused = mirror["current_report_index"] > reports if mirror else run.read(layout.SNAPSHOT) is not None
    return ["Ray's snapshot was torn, or written by another program, and was not used"] if is_unused else []


def _kill_driver(last: RecordedAttempt, request: RunRequest) -> list[str]:
    """Kill the driver of the last attempt if this flow run owns it and it still runs on this machine; return messages.

    On another machine, the driver stops at its next check of the fence.
    """
    owner = last.owner
    if last.ended or not owner or owner.flow_run_id != request.owner.flow_run_id:
        return []
    process = driver_process(owner)
    if not process or process.pid == os.getpid():
        return []
    with suppress(psutil.Error):
        process.kill()
        process.wait(10)
    return [f"the driver of attempt {last.number} (pid {process.pid}) was still alive and was killed"]
