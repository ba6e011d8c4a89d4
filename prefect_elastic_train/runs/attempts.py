"""Beginning an attempt: who may write a run, and taking it over from whoever did before."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from prefect_elastic_train.core.bounds import cut
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import (
    AttemptRecord,
    EndedRecord,
    Heartbeat,
    Owner,
    RunRecord,
    decode,
    encode,
)
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.version import __version__
from prefect_elastic_train.report.words import clock, duration
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import all_attempts, all_commits, lineage
from prefect_elastic_train.runs.heartbeat import HEARTBEAT_SECONDS
from prefect_elastic_train.runs.model import ResumePoint, RunDirectory
from prefect_elastic_train.runs.resume import adopt_snapshot, restore_snapshot
from prefect_elastic_train.runs.view import RunReader
from prefect_elastic_train.storage.store import RunStore

#: Bound of the take-over loop. It turns again only when somebody else took a step in between.
_MAX_TURNS = 20
#: A holder counts as dead after this many of its heartbeat intervals without a beat.
_MISSED_BEATS = 3
#: How much of an attempt's last words goes into the error that says why no other follows.
_CAUSE_CHARACTERS = 1000
#: How much of them is recorded.
_MESSAGE_BYTES = 4000


@dataclass(frozen=True)
class Begun:
    """An attempt that holds the fence.

    Attributes:
        attempt: Its number in the run directory.
        point: What it resumes from.
        counted: How many attempts of this flow run there were, this one included.
        without_progress: How many attempts before it, in a row, ended without a commit.
        notes: What the user should know: repairs, changed configuration, a driver that was ended.
        run_id: Id of the run, the same in all attempts.
    """

    attempt: int
    point: ResumePoint
    counted: int
    without_progress: int
    notes: list[str]
    run_id: str


@dataclass(frozen=True)
class Finished:
    """The run is complete and was this flow run's: nothing is left to do.

    Attributes:
        attempt: The attempt that completed it.
        ended: How that ended.
    """

    attempt: int
    ended: EndedRecord


@dataclass(frozen=True)
class _Past:
    """An attempt that ended or died, or still runs."""

    number: int
    record: AttemptRecord | None
    ended: EndedRecord | None
    #: Whose it is. With a torn record whose the run was before, as far as can be read.
    owner: Owner | None = None

    @property
    def flow_run_id(self) -> str:
        return self.owner.flow_run_id if self.owner else ""

    def state(self, store: RunStore) -> str:
        """How it is with the attempt, in words; their times are by the clock of the driver's machine."""
        torn = " (its record is torn)" if self.record is None else ""
        if self.ended is not None:
            return f"attempt {self.number} ended as {self.ended.outcome}{torn}"
        begun = seen = ""
        if self.record is not None:
            host = self.record.owner.host.partition("/")[0]
            begun = f", begun {clock(self.record.started_at)} UTC on {host or 'an unknown machine'},"
        beat = decode(Heartbeat, store.read(layout.HEARTBEAT))
        if beat is not None and beat.attempt == self.number:
            seen = f" (last sign of life {duration(time.time() - beat.at)} ago)"
        return f"attempt {self.number}{begun} may still be running{seen}{torn}"


def begin_attempt(
    store: RunStore,
    spec: DriverSpec,
    *,
    source: str | None = None,
    seed: Callable[[], None] | None = None,
    observe_seconds: float | None = None,
) -> Begun | Finished:
    """Take the run over, or say why not.

    Args:
        store: The run directory.
        spec: Who wants it, and how; its owner is the driver process.
        source: What `resume_from` of a new run came to; see :class:`RunRecord`.
        seed: Copies the checkpoint that a new run starts from; called while the run has no commit.
        observe_seconds: How long another flow run's attempt is watched for a sign of life; default three of
            its heartbeat intervals.

    Returns:
        The attempt, which holds the fence; or what the finished run left behind.

    Raises:
        AttemptFailedError: With outcome ``invalid``: the run is another flow run's, or is not the same
            training. With ``no_progress`` or ``driver_lost``: a budget is used up.
    """
    notes: list[str] = []
    request = spec.request
    run_id = _claim_run(store, request, source, notes).id
    for _ in range(_MAX_TURNS):
        past = _past_attempts(store)
        last = past[-1] if past else None
        if last is not None:
            if last.flow_run_id == request.owner.flow_run_id:
                if last.ended is not None and _has_finished(request, last):
                    return Finished(last.number, last.ended)
                _check_not_taken_over(request, past)
                note = _end_old_driver(last)
                notes += [note] if note else []
            else:
                _check_takeover(store, request, last, observe_seconds)
        counted, without_progress = _spent(store, request, past)
        _check_budgets(store, spec.failures, past, counted, without_progress)
        if seed is not None and next(lineage(store), None) is None:
            seed()
        newest = next(lineage(store), None)
        run = RunDirectory(store)
        point = run.resume_point
        # A number is never used again, also if somebody has removed the record of its attempt.
        numbers = [last.number if last else run.newest_writer, *(number for number, _ in all_commits(store))]
        attempt = max(numbers) + 1
        record = AttemptRecord(
            attempt=attempt,
            run_id=run_id,
            owner=request.owner,
            fingerprint=request.fingerprint,
            confirmed=False,
            base=point.base,
            dropped=point.dropped,
            repairs=point.repairs,
            versions=_versions(),
        )
        if not store.create(layout.attempt_name(attempt), encode(record)):
            continue  # somebody else began this attempt: look again at who holds the run
        if next(lineage(store, before=attempt), None) != newest:
            end_attempt(store, attempt, Outcome.SUPERSEDED.value, "the previous holder committed meanwhile", void=True)
            continue
        store.replace(layout.attempt_name(attempt), encode(record.model_copy(update={"confirmed": True})))
        if last is not None and last.ended is None:
            end_attempt(store, last.number, Outcome.DRIVER_LOST.value, f"taken over by attempt {attempt}")
        repairs = point.repairs + restore_snapshot(store, point)
        return Begun(attempt, point, counted + 1, without_progress, notes + repairs, run_id)
    raise AttemptFailedError(
        f"run {request.run_name!r} changed hands {_MAX_TURNS} times while this driver tried to begin; "
        "another flow run is starting on it, give this one another run_name",
        outcome=Outcome.INVALID,
    )


def peek(store: RunStore, spec: DriverSpec, observe_seconds: float | None = None) -> Finished | None:
    """Tell, without beginning anything, whether the run is finished for this flow run.

    Takes the arguments of :func:`begin_attempt`.

    Raises:
        AttemptFailedError: :func:`begin_attempt` would refuse because the run is another flow run's or training.
    """
    request = spec.request
    past = _past_attempts(store)
    if not past:
        existing = decode(RunRecord, store.read(layout.RUN))
        if existing is not None:
            _check_unbegun(store, request, existing)
        return None
    last = past[-1]
    if last.flow_run_id == request.owner.flow_run_id:
        existing = decode(RunRecord, store.read(layout.RUN))
        changed = _check_same_training(request, existing) if existing is not None else []
        if last.ended is not None and _has_finished(request, last):
            if changed and not request.resume:
                raise AttemptFailedError(
                    f"run {request.run_name!r} is finished, and {changed[0]}. Give this training another run_name, or "
                    "resume=True to train on from the run's last checkpoint",
                    outcome=Outcome.INVALID,
                )
            return Finished(last.number, last.ended)
    else:
        _check_takeover(store, request, last, observe_seconds)
    return None


def end_attempt(
    store: RunStore,
    attempt: int,
    outcome: str,
    message: str = "",
    *,
    result: dict[str, object] | None = None,
    void: bool = False,
) -> None:
    """Record how an attempt ended; the first record stays."""
    record = EndedRecord(
        attempt=attempt, outcome=outcome, message=cut(message, _MESSAGE_BYTES), result=result, void=void
    )
    store.create(layout.ended_name(attempt), encode(record))


def host_id() -> str:
    """Name where a process id means one process: this machine or container, since it was booted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}/{namespace}"


def process_start(pid: int) -> float:
    """When a process of this machine began, in clock ticks since boot: a time of day moves when the clock is set.

    Without ``/proc`` it is in seconds since the epoch.

    Raises:
        psutil.NoSuchProcess: There is none.
    """
    try:
        return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return psutil.Process(pid).create_time()


def is_alive(store: RunReader, record: AttemptRecord, observe_seconds: float | None = None) -> bool:
    """Tell whether an attempt that has not ended shows a sign of life.

    No clocks are compared: on the driver's own machine its process is looked up, elsewhere the heartbeat is
    watched for a change.
    """
    if record.owner.host == host_id():
        return _same_process(record.owner) is not None
    return _heart_beats(store, observe_seconds)


def _heart_beats(store: RunReader, observe_seconds: float | None) -> bool:
    """Watch the heartbeat of whichever attempt it is, for three of its intervals unless told otherwise."""
    first = store.read(layout.HEARTBEAT)
    beat = decode(Heartbeat, first)
    interval = beat.interval_seconds if beat else HEARTBEAT_SECONDS
    bound = observe_seconds if observe_seconds is not None else _MISSED_BEATS * interval
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        time.sleep(min(0.5, bound / 10))
        if store.read(layout.HEARTBEAT) != first:
            return True
    return False


def _claim_run(store: RunStore, request: RunRequest, source: str | None, notes: list[str]) -> RunRecord:
    """Create the run, or check that it is the same training; give its record."""
    record = RunRecord(
        name=request.run_name,
        id=uuid.uuid4().hex,
        creator=request.owner,
        fingerprint=request.fingerprint,
        resume_from=request.resume_from,
        source=source,
        part=request.part,
        versions=_versions(),
    )
    if store.read(layout.RUN) is None:
        if store.read(layout.SNAPSHOT) is not None and not store.names(layout.ATTEMPTS):
            if not request.resume:
                raise AttemptFailedError(
                    f"{store.uri} holds a run that another program wrote with Ray Train; give another run_name, "
                    "or resume=True to continue it",
                    outcome=Outcome.INVALID,
                )
            notes += adopt_snapshot(store)
        record = _as_begun(store, request, record)
        if store.create(layout.RUN, encode(record)):
            if all_attempts(store):
                notes.append("run.json was torn or missing and was written anew")
            elif request.resume and not notes:
                notes.append(f"resume=True, but there was no run {request.run_name!r} in this storage: it is a new one")
            return record
    existing = decode(RunRecord, store.read(layout.RUN))
    if existing is None:
        notes.append("run.json was torn or missing and was written anew")
        record = _as_begun(store, request, record)
        store.replace(layout.RUN, encode(record))
        return record
    if not all_attempts(store):
        _check_unbegun(store, request, existing)
    notes += _check_same_training(request, existing)
    return existing


def _versions() -> dict[str, str]:
    """Versions in use, for the records."""
    return {"ray": version("ray"), "prefect-elastic-train": __version__, "python": sys.version.split()[0]}


def _check_unbegun(store: RunStore, request: RunRequest, existing: RunRecord) -> None:
    """Refuse a run without an attempt that another flow run has claimed, unless the user wants it and it is free.

    Before its first attempt a run has no heartbeat, so only a driver on this machine is seen to live.
    """
    creator = existing.creator
    if creator.flow_run_id == request.owner.flow_run_id:
        return
    if not request.resume:
        raise _owned(store, request, creator, "it has not begun an attempt yet")
    if creator.host == host_id() and _same_process(creator) is not None:
        raise AttemptFailedError(
            f"run {request.run_name!r} is being started right now by {creator.describe()} on this machine, pid "
            f"{creator.pid}; cancel that flow run first, then resume",
            outcome=Outcome.INVALID,
        )


def _as_begun(store: RunStore, request: RunRequest, record: RunRecord) -> RunRecord:
    """Give the record of a run that has lost its own: whoever asks for a run is not its creator for that."""
    past = _past_attempts(store)
    begun = [attempt.record for attempt in past if attempt.record is not None]
    if begun:
        fingerprint = begun[-1].fingerprint or record.fingerprint
        ids = [record.id, *(attempt.run_id for attempt in begun if attempt.run_id)]
        return record.model_copy(update={"creator": begun[0].owner, "fingerprint": fingerprint, "id": ids[-1]})
    if past and not request.resume:
        raise _owned(store, request, None, past[-1].state(store))
    return record


def _check_same_training(request: RunRequest, existing: RunRecord) -> list[str]:
    """Refuse to go on with what may be another training; give what changed on purpose, in words."""
    if request.resume_from and existing.resume_from != request.resume_from:
        raise AttemptFailedError(
            f"run {request.run_name!r} exists and did not start from {request.resume_from!r}; resume_from starts a new "
            "run, so give it a new run_name",
            outcome=Outcome.INVALID,
        )
    differences = existing.fingerprint.differences(request.fingerprint)
    if not differences:
        return []
    if not (request.named or request.resume):
        raise AttemptFailedError(
            f"run {request.run_name!r} was begun with another configuration: {'; '.join(differences)}. If this flow "
            "trains several models, give each its own run_name; to continue this run with the new configuration, "
            f"give run_name={request.run_name!r}",
            outcome=Outcome.INVALID,
        )
    return ["the run has another configuration than before: " + "; ".join(differences)]


def _past_attempts(store: RunStore) -> list[_Past]:
    past: list[_Past] = []
    run = decode(RunRecord, store.read(layout.RUN))
    owner = run.creator if run is not None else None
    for number in all_attempts(store):
        record = decode(AttemptRecord, store.read(layout.attempt_name(number)))
        ended = decode(EndedRecord, store.read(layout.ended_name(number)))
        owner = record.owner if record is not None else owner
        past.append(_Past(number, record, ended, owner))
    return past


def _has_finished(request: RunRequest, last: _Past) -> bool:
    """Tell whether the flow run's own last attempt has finished what is asked for; with ``resume``, the same again."""
    if last.ended is None or last.ended.outcome != Outcome.COMPLETED.value:
        return False
    before = last.record.fingerprint if last.record is not None else None
    return not request.resume or (before is not None and not before.differences(request.fingerprint))


def _check_takeover(store: RunStore, request: RunRequest, last: _Past, observe_seconds: float | None) -> None:
    """Refuse another flow run's run unless the user wants it and nobody works on it."""
    if not request.resume:
        raise _owned(store, request, last.owner, last.state(store))
    if last.ended is not None:
        return
    if last.record is None:
        if _heart_beats(store, observe_seconds):
            raise AttemptFailedError(
                f"run {request.run_name!r} is being trained right now, by all that can be told by "
                f"{_describe(last.owner)}: its heart beats, and the record of attempt {last.number} is torn; "
                "cancel that flow run first, then resume",
                outcome=Outcome.INVALID,
            )
        return
    if is_alive(store, last.record, observe_seconds):
        owner = last.record.owner
        raise AttemptFailedError(
            f"run {request.run_name!r} is being trained right now by {owner.describe()} on "
            f"{owner.host.partition('/')[0]}, pid {owner.pid}; cancel that flow run first, then resume",
            outcome=Outcome.INVALID,
        )


def _describe(owner: Owner | None) -> str:
    return owner.describe() if owner is not None else "a flow run whose name cannot be read any more"


def _check_not_taken_over(request: RunRequest, past: list[_Past]) -> None:
    """Give way to another process of the same flow run that has taken over from this one."""
    supervisors = [attempt.record.owner.supervisor for attempt in past if attempt.record is not None]
    mine = request.owner.supervisor
    if mine and mine in supervisors and supervisors[-1] != mine:
        raise AttemptFailedError(
            f"attempt {past[-1].number} of run {request.run_name!r} was begun by another process of the same flow run; "
            "this one gives way",
            outcome=Outcome.SUPERSEDED,
        )


def _owned(store: RunStore, request: RunRequest, owner: Owner | None, state: str) -> AttemptFailedError:
    return AttemptFailedError(
        f"run {request.run_name!r} in {store.uri} belongs to {_describe(owner)}; {state}. Give this training another "
        "run_name, or resume=True to take the run over",
        outcome=Outcome.INVALID,
    )


def _spent(store: RunStore, request: RunRequest, past: list[_Past]) -> tuple[int, int]:
    """Count this flow run's attempts, and those in a row without a commit, since the last verdict.

    A verdict is an end that no automatic restart follows: only a person's retry gets past it, and that
    starts with fresh budgets.
    """
    progressed = {attempt for attempt, _ in lineage(store)}
    counted = without_progress = 0
    in_a_row = True
    for attempt in reversed(past):
        if attempt.flow_run_id != request.owner.flow_run_id:
            break
        if attempt.number in progressed:
            in_a_row = False
        if attempt.ended is not None:
            # One that a person stopped says nothing about the budgets, but its checkpoints are progress.
            if attempt.ended.void or attempt.ended.outcome == Outcome.CANCELLED.value:
                continue
            if attempt.ended.final or not _counts(attempt.ended.outcome):
                break
        counted += 1
        if in_a_row:
            without_progress += 1
    return counted, without_progress


def _counts(outcome: str) -> bool:
    """Tell whether an attempt that ended so may be followed by another one without a person's doing."""
    try:
        return Outcome(outcome).retryable or Outcome(outcome) is Outcome.SUPERSEDED
    except ValueError:  # written by a newer version
        return False


def _check_budgets(
    store: RunStore, failures: FailureSettings, past: list[_Past], counted: int, without_progress: int
) -> None:
    """Refuse another attempt when a budget is used up, and record that as the run's verdict."""
    if without_progress >= failures.max_attempts_without_progress:
        outcome = Outcome.NO_PROGRESS
        message = (
            f"{without_progress} attempts in a row ended without a new checkpoint, so another one would too. Mend "
            "what ends them and retry the flow run, or raise max_attempts_without_progress (now "
            f"{failures.max_attempts_without_progress}) of the FailureBudget"
        )
    elif counted > failures.driver_restarts:
        outcome = Outcome.DRIVER_LOST
        message = (
            f"the driver restarts of this flow run are used up: {counted} attempts began, 1 + driver_restarts "
            f"({failures.driver_restarts}) are allowed over all its resumes. Retry the flow run for a fresh budget, or "
            "raise driver_restarts of the FailureBudget"
        )
    else:
        return
    last = past[-1]
    ended = last.ended or EndedRecord(attempt=last.number, outcome=Outcome.DRIVER_LOST.value, message="it just died")
    store.replace(layout.ended_name(last.number), encode(ended.model_copy(update={"final": True, "verdict": message})))
    message += f". The last of them ended as {ended.outcome}: {ended.message[:_CAUSE_CHARACTERS]}"
    raise AttemptFailedError(message, outcome=outcome, attempt=last.number, final=True)


def _same_process(owner: Owner) -> psutil.Process | None:
    try:
        process = psutil.Process(owner.pid)
        if process_start(owner.pid) != owner.process_started_at:
            return None
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (psutil.Error, ValueError):
        return None


def _end_old_driver(last: _Past) -> str:
    """End this flow run's previous driver if it still lives on this machine. It is fenced off in any case."""
    if last.ended is not None or last.record is None or last.record.owner.host != host_id():
        return ""
    process = _same_process(last.record.owner)
    if process is None or process.pid == os.getpid():
        return ""
    try:
        process.kill()
        process.wait(10)
    except psutil.Error as error:
        return f"the driver of attempt {last.number} (pid {process.pid}) could not be ended: {error}"
    return f"the driver of attempt {last.number} (pid {process.pid}) was still alive and was ended"
