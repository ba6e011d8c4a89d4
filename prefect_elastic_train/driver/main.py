"""One driver attempt, from the spec to the last event.

The driver does all work on the run directory, so the supervisor works the same whether or not it can see the
storage. It ends with one ``attempt_ended`` event; a driver that ends without one was lost.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from prefect_elastic_train.core.bounds import bounded_metrics
from prefect_elastic_train.core.events import (
    ALIVE_SECONDS,
    AttemptEnded,
    AttemptStarted,
    ClusterConnected,
    ClusterWanted,
    ControllerAlive,
    Event,
    GroupFailed,
    Report,
    RunRecalled,
)
from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    Outcome,
    StorageFaultError,
    is_passing,
)
from prefect_elastic_train.core.rank_errors import cause
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.records import AttemptRecord, decode
from prefect_elastic_train.core.result import RunResult, bounded
from prefect_elastic_train.core.spec import STOP_FILE, DriverSpec, read_spec
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.driver.interruptions import interruptions, notice_interruptions
from prefect_elastic_train.driver.relay import EventOutput, EventReceiver, LineStream
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.ancestry import inherited_metrics, started_from
from prefect_elastic_train.runs.attempts import (
    Begun,
    Finished,
    begin_attempt,
    end_attempt,
    host_id,
    peek,
    process_start,
)
from prefect_elastic_train.runs.commits import all_attempts, lineage, newest_attempt
from prefect_elastic_train.runs.heartbeat import HEARTBEAT_SECONDS, HeartbeatWriter
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.runs.seeding import choose_source
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.preflight import Probe, preflight
from prefect_elastic_train.storage.retrying_store import RetryingStore

__all__ = ["main"]

logger = logging.getLogger("prefect_elastic_train.driver")

#: How long a driver that was told to end may take before it ends without Ray Train's help.
_STUCK_SECONDS = 4.5
#: How long each step of leaving the cluster may take. With one, that stays below the grace of supervisor and guard.
_LEAVE_SECONDS = 2.5
#: How long after a failure what Ray says of it is written: the lines of other processes take a moment to come.
_DETAILS_SECONDS = 2.0
#: How long the history may take to read before an attempt begins.
_RECALL_SECONDS = 20.0


class _Stopped(BaseException):
    """The supervisor asked this driver to end."""


def main(arguments: list[str]) -> int:
    """Run one attempt as the spec file says."""
    output = EventOutput(sys.stdout)
    details = Details()
    for name, write in (("stdout", output.write_text), ("stderr", sys.stderr.write)):
        descriptor = getattr(sys, f"__{name}__").fileno()
        setattr(sys, name, LineStream(partial(details.take, write), descriptor))
    # Whatever a library writes there itself must not end up in the middle of an event.
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    notice_interruptions()
    spec_file = Path(arguments[0])
    spec = read_spec(spec_file)
    output.is_shared = spec.cluster.is_submitted
    driver = _Driver(spec, output, details)
    threading.Thread(target=_end_if_stuck, args=(driver, spec_file), name="elastic-train-stop", daemon=True).start()
    try:
        ended = driver.run()
    except (_Stopped, KeyboardInterrupt, SystemExit):
        ended = driver.stopped(spec_file)
    except Exception as error:  # noqa: BLE001 - the last resort: an unforeseen end is told, not swallowed
        details.keep("".join(traceback.format_exception(error)))
        ended = _end_by(driver.spec, error)
    # From here on a second signal must not cut the last word short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    driver.end_process(ended)
    return 0


def _end_by(spec: DriverSpec, error: Exception) -> AttemptEnded:
    """Return how an attempt ended that raised an error."""
    if isinstance(error, AttemptFailedError):
        return AttemptEnded(outcome=error.outcome, message=str(error), final=error.final)
    if isinstance(error, ConfigurationError):
        return AttemptEnded(outcome=Outcome.INVALID, message=str(error))
    if isinstance(error, ConnectionError):
        return AttemptEnded(outcome=Outcome.CLUSTER_LOST, message=f"the Ray cluster was lost: {cause(str(error))}")
    if isinstance(error, OSError):
        outcome = Outcome.DRIVER_LOST if is_passing(error) else Outcome.STORAGE_ERROR
        return AttemptEnded(outcome=outcome, message=_storage_message(spec, error))
    message = f"the driver failed: {type(error).__name__}: {cause(str(error))}"
    return AttemptEnded(outcome=Outcome.DRIVER_LOST, message=message)


def _end_if_stuck(driver: _Driver, spec_file: Path) -> None:
    """End a driver that was told to end and cannot.

    While Ray Train's controller waits for a placement group, ``fit()`` does not get out of its handler of SIGINT.
    """
    while not interruptions():
        time.sleep(0.1)
    time.sleep(_STUCK_SECONDS)
    driver.end_process(driver.stopped(spec_file), stuck=True)


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do something for a bounded time: a cluster that is gone does not answer."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=seconds)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped


class _Driver:
    """State of the attempt, and its end."""

    def __init__(self, spec: DriverSpec, output: EventOutput, details: Details) -> None:
        self.spec = spec
        self._output = output
        self._details = details
        self._storage = open_storage(spec.storage)
        self._store = self._storage.run(spec.request.run_name)
        self._emitting = threading.Lock()
        self._score = spec.checkpoints.score_attribute
        self._sequence = 0
        self._reports = 0
        self._attempt = 0
        #: What there is to say of the checkpoint that the run starts from.
        self._source_notes: list[str] = []
        self._history: HistoryWriter | None = None
        self._heartbeat: HeartbeatWriter | None = None
        self._receiver: EventReceiver | None = None
        self._ending = threading.Lock()

    def run(self) -> AttemptEnded:
        """Run the attempt and give its end."""
        if not self.spec.storage.preflight:
            return self._run(None, ExitStack())
        with ExitStack() as trying:
            return self._run(trying.enter_context(preflight(self.spec.storage)), trying)

    def _run(self, probe: Probe | None, trying: ExitStack) -> AttemptEnded:
        spec = self._as_owner()
        with self._showing_life("looking whether the run is free"):
            finished = peek(self._store, spec)
        if finished is not None:
            return self._finished(finished)
        source = None
        if self.spec.request.resume_from and next(lineage(self._store), None) is None:
            with self._showing_life("looking for the checkpoint that the run starts from"):
                chosen = choose_source(self._storage, spec.request, self._store)
            source = chosen.checkpoint
            self._source_notes += chosen.notes
        self.emit(ClusterWanted())
        # The poll interval is read when Ray Train is imported in the controller, which inherits it from here.
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = str(self.spec.poll_interval_seconds)
        # Ray Train's own print tees what the worker's standard output carries already: every line twice.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
        os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        if self.spec.cluster.is_local:
            # Nobody drains a node of a cluster that lives on this machine, so no worker group waits for a watcher.
            os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        from prefect_elastic_train.driver import fit as training
        from prefect_elastic_train.driver import joining

        prepared = training.prepare(self.spec)
        try:
            with self._showing_life("joining the cluster"):
                address, dashboard_url, resources = joining.connect(self.spec)
        except AttemptFailedError as error:
            # A cluster that this run never reached is more likely misspelt than lost: no retry heals that.
            own = self.spec.cluster.is_local or self.spec.cluster.is_submitted
            error.final = error.final or not (own or all_attempts(self._store))
            raise
        self.emit(ClusterConnected(address=address, dashboard_url=dashboard_url, resources=resources))
        scaling = joining.fit_local_cluster(
            self.spec, resources, cpus_for_datasets=1 if prepared.payload.datasets else 0
        )
        if probe is not None and not self.spec.cluster.is_local and next(lineage(self._store), None) is None:
            self._try_from_nodes(probe)
        trying.close()
        begun = self._begin_attempt(spec, source)
        if isinstance(begun, Finished):
            return self._finished(begun)
        self._begin(begun)
        assert self._receiver is not None
        with self._showing_life("making the datasets"):
            datasets = training.make_datasets(prepared, begun.attempt)
        try:
            spec = replace(spec, scaling=scaling)
            context = self._context(begun)
            training.fit(spec, prepared, datasets, self._store, context, self._receiver.receiving)
        except AttemptFailedError as error:
            raise self._taken_over(begun.attempt) or error from error
        return self._completed(begun)

    def _try_from_nodes(self, probe: Probe) -> None:
        """Find out before the first checkpoint whether each node can write it. A run that has one has shown that."""
        from prefect_elastic_train.elastic.cluster import try_from_nodes
        from prefect_elastic_train.elastic.translate import resources_per_worker

        with self._showing_life("trying the storage from the nodes"):
            try_from_nodes(probe, resources_per_worker(self.spec.scaling))

    def stopped(self, spec_file: Path) -> AttemptEnded:
        """Tell a stop that the supervisor asked for, and one for a successor, from any other.

        Whoever else ends the driver, such as the guard of a dead flow process, does not mean the training.
        """
        try:
            taken_over = self._taken_over(self._attempt) if self._attempt else None
        except OSError:
            taken_over = None
        if taken_over is not None:
            return AttemptEnded(outcome=taken_over.outcome, message=str(taken_over))
        if self.spec.cluster.is_submitted:
            return AttemptEnded(outcome=Outcome.CANCELLED, message="the job was stopped")
        try:
            outcome = Outcome(spec_file.with_name(STOP_FILE).read_text())
        except (OSError, ValueError):
            return AttemptEnded(outcome=Outcome.DRIVER_LOST, message="the driver was ended by a signal")
        message = "its time was up" if outcome is Outcome.TIMED_OUT else "the flow run was told to stop"
        return AttemptEnded(outcome=outcome, message=message)

    def emit(self, event: Event) -> None:
        """Number an event and send it to the supervisor and into the history."""
        with self._emitting:
            self._sequence += 1
            update: dict[str, Any] = {"sequence": self._sequence, "attempt": self._attempt}
            if isinstance(event, Report):
                self._reports += 1
                update["index"] = self._reports
            event = event.model_copy(update=update)
            self._output.put(event)
            if self._history is not None:
                self._history.add(event)
        if isinstance(event, GroupFailed):
            self._details.keep_errors(event.errors, event.also)
            later = threading.Timer(_DETAILS_SECONDS, self._write_details)
            later.daemon = True
            later.start()

    def close(self, ended: AttemptEnded) -> None:
        """Say the last word, and record it with the attempt if one was begun."""
        if self._receiver is not None:
            self._receiver.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._attempt and not ended.already_finished:
            # Whoever was told to end has some seconds; any other may wait for the storage to record its end.
            store = self._store.impatient(1.0) if interruptions() else self._store
            _within(_LEAVE_SECONDS, lambda: self._abandon_uploads(store))
            if ended.outcome in (Outcome.USER_ERROR, Outcome.DRIVER_LOST, Outcome.CLUSTER_LOST):
                _within(_LEAVE_SECONDS, self._write_details)
                details = f"{store.uri}/{layout.details_name(self._attempt)}"
                ended = ended.model_copy(update={"message": f"{ended.message.rstrip('.')}; details: {details}"})
            try:
                end_attempt(store, self._attempt, ended.outcome.value, ended.message, result=ended.result)
            except OSError as error:
                logger.warning("could not record the end of attempt %d: %s", self._attempt, error)
        self.emit(ended)
        if self._history is not None:
            self._history.close()

    def end_process(self, ended: AttemptEnded, stuck: bool = False) -> None:
        """Say the last word and end this process; the first caller does it, and any other waits for that.

        Args:
            ended: How the attempt ended.
            stuck: ``fit()`` does not return, so that Ray Train cannot tidy up after itself.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(60)
            return
        ray = sys.modules.get("ray")
        self.close(ended)
        if ray is not None and ray.is_initialized():
            if not self.spec.cluster.is_local:
                _within(_LEAVE_SECONDS, self._release)
            if not stuck:
                _within(_LEAVE_SECONDS, ray.shutdown)
            if self._attempt:
                # Workers may have begun another upload while they were told to end.
                _within(_LEAVE_SECONDS, lambda: self._abandon_uploads(self._store.impatient(1.0)))
        self._output.close()
        # Threads of Ray or of the user's libraries may not keep a finished driver.
        sys.stdout.flush()
        sys.stderr.flush()
        # Ray's dashboard shows a job's exit code.
        os._exit(0 if ended.outcome is Outcome.COMPLETED else 1)

    def _write_details(self) -> None:
        """Write what Ray has said itself beside the run's records."""
        try:
            self._store.impatient(1.0).replace(layout.details_name(self._attempt), self._details.content())
        except OSError as error:
            logger.warning("could not write the details of what failed: %s", error)

    def _release(self) -> None:
        from prefect_elastic_train.driver.fit import requester_id
        from prefect_elastic_train.elastic.policy import release_reservation

        if newest_attempt(self._store) > self._attempt:
            return  # all attempts of a run reserve under one id, and it is the successor's now
        release_reservation(requester_id(self._store))

    def _abandon_uploads(self, store: RetryingStore) -> None:
        """Leave no parts of checkpoints behind that nobody will complete."""
        try:
            if newest_attempt(store) == self._attempt:
                store.abandon_uploads()
        except OSError as error:
            logger.warning("unfinished uploads may be left: %s", error)

    def _as_owner(self) -> DriverSpec:
        """Return the spec with this process in the request's owner."""
        process = {"host": host_id(), "pid": os.getpid(), "process_started_at": process_start(os.getpid())}
        request = self.spec.request
        return replace(self.spec, request=replace(request, owner=request.owner.model_copy(update=process)))

    def _context(self, begun: Begun) -> RunContext:
        """Give what the train loop may know of the run."""
        owner = self.spec.request.owner
        return RunContext(
            run_name=self.spec.request.run_name,
            run_id=begun.run_id,
            attempt=begun.attempt,
            storage_uri=self.spec.storage.uri,
            run_uri=self._store.uri,
            flow_run_id=owner.flow_run_id if owner.is_flow_run else "",
            flow_name=owner.flow_name,
            deployment_id=owner.deployment_id,
            deployment_name=owner.deployment_name,
        )

    def _begin_attempt(self, spec: DriverSpec, source: str | None) -> Begun | Finished:
        from prefect_elastic_train.runs.seeding import seed_from_source

        def seed() -> None:
            with self._showing_life("copying the checkpoint that the run starts from"):
                self._source_notes += seed_from_source(self._storage, spec.request, self._store)

        with self._showing_life("looking for where to resume"):
            return begin_attempt(self._store, spec, source=source, seed=seed)

    def _begin(self, begun: Begun) -> None:
        self._attempt = begun.attempt
        impatient = self._store.impatient(HEARTBEAT_SECONDS)
        # The signal ends fit(), as it does when the supervisor sends it.
        self._heartbeat = HeartbeatWriter(
            impatient,
            begun.attempt,
            on_fenced_off=lambda: os.kill(os.getpid(), signal.SIGINT),
        )
        self._heartbeat.start()
        self._history = HistoryWriter(impatient, begun.attempt)
        self._receiver = EventReceiver(self.emit)
        if begun.attempt > 1:
            with self._showing_life("reading the history"):
                self._recall()
        commit = begun.point.commit
        self.emit(
            AttemptStarted(
                run_name=self.spec.request.run_name,
                run_uri=self._store.uri,
                checkpoint=begun.point.checkpoint,
                checkpoint_at=commit.at if commit is not None else 0.0,
                driver_started_at=psutil.Process().create_time(),
                counted=begun.counted,
                previous_end=self.spec.previous_end,
                started_from=started_from(self._store),
                inherited=bounded_metrics(inherited_metrics(commit), self._score) if commit is not None else {},
                notes=[*self._source_notes, *begun.notes],
            )
        )

    def _recall(self) -> None:
        """Tell a supervisor what it may not have seen: what the history adds up to. Not at any price."""
        from prefect_elastic_train.report.run_report import RunReport

        deadline = time.monotonic() + _RECALL_SECONDS
        checkpoints = self.spec.checkpoints
        report = RunReport(
            run_name=self.spec.request.run_name,
            score_attribute=checkpoints.score_attribute,
            score_order=checkpoints.score_order,
        )
        try:
            for event in read_history(self._store.impatient(_RECALL_SECONDS)):
                report.take(event)
                if time.monotonic() > deadline:
                    logger.warning("the history takes too long to read; the run's report begins anew")
                    return
            self.emit(RunRecalled(report=report.model_dump(mode="json")))
        except Exception as error:  # noqa: BLE001 - a report is no reason to end a training
            logger.warning("the history cannot be read; the run's report begins anew: %s", error)

    @contextmanager
    def _showing_life(self, doing: str) -> Iterator[None]:
        """Stand in for the controller, which does not live yet, during what may rightly take its time."""
        done = threading.Event()
        since = time.time()

        def run() -> None:
            while not done.wait(ALIVE_SECONDS):
                self.emit(ControllerAlive(doing=doing, seconds=time.time() - since))

        threading.Thread(target=run, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _taken_over(self, attempt: int) -> AttemptFailedError | None:
        """Tell whether the training ended because somebody else has the run now, however that showed."""
        newest = newest_attempt(self._store)
        if newest <= attempt:
            return None
        record = decode(AttemptRecord, self._store.read(layout.attempt_name(newest)))
        if record is None or record.owner.flow_run_id == self.spec.request.owner.flow_run_id:
            return AttemptFailedError(
                f"attempt {newest}, of another process of the same flow run, has taken over",
                outcome=Outcome.SUPERSEDED,
                attempt=attempt,
            )
        return AttemptFailedError(
            f"run {self.spec.request.run_name!r} was taken over by {record.owner.describe()} with resume=True; what "
            "this attempt trained after that counts for nothing",
            outcome=Outcome.INVALID,
            attempt=attempt,
        )

    def _completed(self, begun: Begun) -> AttemptEnded:
        # The controller has sent all its events before fit() returned; let the last ones arrive.
        time.sleep(0.1)
        ended = AttemptEnded(outcome=Outcome.COMPLETED, attempt=begun.attempt)
        assert self._history is not None
        assert self._receiver is not None
        self._receiver.finish(_LEAVE_SECONDS)
        self._history.close()
        return ended.model_copy(update={"result": self._result(ended).model_dump(mode="json")})

    def _finished(self, finished: Finished) -> AttemptEnded:
        """Give the result that the run has had since an earlier attempt."""
        with self._showing_life("reading the history"):
            self._recall()
        message = "the run was finished before, and its result is given back"
        ended = AttemptEnded(outcome=Outcome.COMPLETED, already_finished=True, message=message)
        found = finished.ended.result
        # Another version may have written it, with another bound or none.
        result = bounded(RunResult.model_validate(found), self._score) if found else self._result()
        return ended.model_copy(update={"result": result.model_dump(mode="json")})

    def _result(self, *more: Event) -> RunResult:
        from itertools import chain

        from prefect_elastic_train.report.accounts import add_up
        from prefect_elastic_train.runs.reading import make_result

        accounts = add_up(chain(read_history(self._store), more))
        return make_result(self._store, self.spec.request.run_name, accounts, self.spec.storage_block, self._score)


def _storage_message(spec: DriverSpec, error: OSError) -> str:
    if isinstance(error, StorageFaultError):
        return str(error)
    what = "LocalStorage a directory" if isinstance(spec.storage, LocalStorageSettings) else "the training a storage"
    return (
        f"cannot use storage {spec.storage.uri!r}: {type(error).__name__}: {error}. Give {what} that exists or can be "
        "made, with room and write permission for this user"
    )
