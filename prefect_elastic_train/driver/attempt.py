"""One attempt in the driver: its work on the run directory, and around ``fit()``."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from prefect_elastic_train.core.events import (
    SESSION_EVENTS,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ClusterWanted,
    Event,
    FirstStep,
)
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.payload import Payload
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.records import EndedRecord
from prefect_elastic_train.core.request import PRINT_PATCH, DriverSpec
from prefect_elastic_train.core.size_limits import bounded_metrics
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.time_limits import EXIT_STEP_SECONDS, TERMINATION_GRACE_SECONDS
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.report.accounts import add_up
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt, check_run_is_free, end_attempt
from prefect_elastic_train.runs.commits import restore_snapshot
from prefect_elastic_train.runs.heartbeat import HEARTBEAT_SECONDS, start_heartbeat, this_process
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.runs.run_directory import RunDirectory, newest_attempt_number
from prefect_elastic_train.runs.seeding import choose_source, copy_source, record_completed_run
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.preflight import preflight

from .event_relay import EventOutput, EventReceiver, EventRecorder
from .joining import error_within, join_cluster, limit_to_local_cluster
from .ray_contract import check_ray
from .termination_signals import count_signals
from .user_code import load_payload, make_datasets

logger = logging.getLogger("prefect_elastic_train.driver")

#: Time for which the run is read again and again before the preflight, from a storage that does not answer.
_FIRST_READ_SECONDS = 15.0
#: Time within which two SIGTERM count as one.
_SAME_SIGNAL_SECONDS = 3.0


class Attempt:
    """The attempt of this driver: takes over the run for the flow run of the spec, and trains it.

    Call :meth:`run`, :meth:`close` and :meth:`leave_cluster` in this order.

    Attributes:
        saves_first: True while a SIGTERM lets a session save before it ends the attempt.

    Args:
        spec: The input of the driver.
        output: The driver's standard output.
        details: The lines that Ray prints.
        started_at: Time at which the driver process was started, or at which a pre-started driver got its spec, in
            seconds since the epoch; 0: unknown.
    """

    saves_first = False
    _terminated_at = 0.0  # time of the first SIGTERM that lets a session save
    _run_id = ""
    _is_retried = False

    def __init__(self, spec: DriverSpec, output: EventOutput, details: Details, started_at: float = 0.0) -> None:
        owner = spec.request.owner.model_copy(update=this_process())
        self.spec = replace(spec, request=replace(spec.request, owner=owner))
        self._started_at = started_at
        self._storage = Storage(spec.storage)
        self.store = self._storage.run(spec.request.run_name)
        self.recorder = EventRecorder(output, details, self.store, spec)
        self._stop_heartbeat: Callable[[], None] = lambda: None
        self._receiver = EventReceiver(self._receive)
        self._is_saved = threading.Event()  # there is nothing to save any more after SIGTERM

    def run(self) -> AttemptEnded:
        """Run the attempt until the train loop has returned, and return the final event.

        Raises:
            BaseException: Any other end of the attempt.
        """
        check_ray()
        finished = self._check_run()
        if finished:
            return self._end_of_finished(finished)
        if self.spec.storage.preflight:
            preflight(self.spec.storage)
        payload = self._join()
        begun = self.begin()
        if isinstance(begun, EndedRecord):
            return self._end_of_finished(begun)
        self._train(payload, begun)
        return self._complete()

    def _receive(self, event: Event) -> None:
        """Record an event of the controller, and whether the loop has saved all that it has done."""
        self.recorder.emit(event)
        if isinstance(event, SESSION_EVENTS):
            self.saves_first = isinstance(event, FirstStep) and not self.spec.cluster.is_submitted
        if not self.saves_first or (
            isinstance(event, CheckpointCommitted) and event.metrics.get("step", 0) >= event.step
        ):
            self._is_saved.set()

    def _handle_termination(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: request a save, and end the attempt after it. A SIGTERM more than 3 s later ends it at once.

        One within 3 s is ignored: systemd signals this process and the flow process, which forwards the signal.
        """
        now = time.monotonic()
        if self.saves_first and not self._terminated_at:
            self._terminated_at = now
            start_thread(self._save_and_end)
        elif now - self._terminated_at > _SAME_SIGNAL_SECONDS:
            _interrupt()

    def _save_and_end(self) -> None:
        self._is_saved.clear()
        if self._receiver.request_save():
            self._is_saved.wait(TERMINATION_GRACE_SECONDS)
        _interrupt()

    def begin(self) -> Begun | EndedRecord:
        """Take over the run, start the heartbeat and the history of the attempt, and publish the attempt's start.

        Returns the attempt that has begun, or, if the run is finished already, the record of its end.
        """
        spec = self.spec
        recorder = self.recorder
        recorder.set_activity("preparing the run directory")
        seed = partial(copy_source, self._storage, spec.request, self.store)
        begun = begin_attempt(self.store, spec, seed)
        if isinstance(begun, EndedRecord):
            return begun
        recorder.attempt = begun.attempt
        self._run_id = begun.run_id
        limited = self.store.with_retry_limit(HEARTBEAT_SECONDS)
        self._stop_heartbeat = start_heartbeat(limited, begun.attempt, _interrupt)
        recorder.history = HistoryWriter(limited, begun.attempt)
        if begun.attempt > 1:
            recorder.recall_history()
        failures = spec.failures
        budgets = {
            "driver restart": failures.driver_restarts + 1 - begun.counted,
            "worker failure": failures.max_failures,
            "preemption": failures.max_preemption_failures,
        }
        point = begun.point
        recorder.emit(
            AttemptStarted(
                run_name=spec.request.run_name,
                run_uri=self.store.uri,
                checkpoint=point.checkpoint,
                checkpoint_at=point.commit.at if point.commit else 0.0,
                driver_started_at=self._started_at,
                counted=begun.counted,
                left={name: number for name, number in budgets.items() if number >= 0},
                previous_end=spec.previous_end,
                started_from=RunDirectory(self.store).started_from,
                inherited=bounded_metrics(point.initial_metrics, spec.checkpoints.score_attribute),
                notes=begun.notes,
            )
        )
        return begun

    def find_successor(self) -> AttemptEnded | None:
        """Return the final event of this attempt if another attempt has taken over the run, else None.

        Returns None also if the storage does not answer.
        """
        attempt = self.recorder.attempt
        request = self.spec.request
        try:
            newest = newest_attempt_number(self.store) if attempt else 0
            if newest <= attempt:
                return None
            record = RunDirectory(self.store).attempt_record(newest)
        except OSError:
            return None
        owner = record.owner if record else request.owner
        is_own = owner.flow_run_id == request.owner.flow_run_id
        return AttemptEnded(
            outcome=Outcome.SUPERSEDED if is_own else Outcome.INVALID,
            message=f"run {request.run_name!r} was taken over by attempt {newest}, which another process began for "
            f"{owner.describe()}; the training of this attempt after that does not count",
        )

    def close(self, ended: AttemptEnded) -> None:
        """Record the end of the attempt in the run directory if the attempt has begun, and publish its final event.

        If another attempt has taken over the run, the outcome is ``superseded``, unless this attempt completed it.
        """
        recorder = self.recorder
        recorder.set_activity("recording the attempt's end")
        if count_signals():  # this process must exit soon
            self.store = self.store.with_retry_limit(1.0)
        if ended.outcome is not Outcome.COMPLETED:
            ended = self.find_successor() or ended
        self._receiver.close()
        self._stop_heartbeat()
        if recorder.attempt:
            failed = ended.outcome in (Outcome.USER_ERROR, Outcome.DRIVER_LOST, Outcome.CLUSTER_LOST)
            if failed and recorder.details.content():
                _run_limited(recorder.write_details)
                message = (
                    f"{ended.message.rstrip('.')}; details: {self.store.uri}/{layout.details_name(recorder.attempt)}"
                )
                ended = ended.model_copy(update={"message": message})
            try:
                end_attempt(self.store, recorder.attempt, ended.outcome, ended.message, result=ended.result)
            except OSError as error:
                logger.warning("could not record the end of attempt %d: %s", recorder.attempt, error)
        recorder.emit(ended)
        recorder.close()
        self._is_retried = ended.outcome.retryable and not ended.final
        if ended.outcome is Outcome.COMPLETED:
            # After the final event, which a storage that does not answer must not delay. Without this record,
            # resume_from='latest' does not find the run.
            _run_limited(lambda: record_completed_run(self._storage, self.spec.request.run_name))

    def leave_cluster(self, stuck: bool) -> None:
        """Release the attempt's reservation of resources, disconnect from the Ray cluster, remove unfinished uploads.

        Args:
            stuck: True if ``fit()`` has not returned; the driver then does not disconnect.
        """
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if not self.spec.cluster.is_local:  # no other training uses a local cluster
            _run_limited(self._release_resources)
        if not stuck:
            _run_limited(ray.shutdown)
        if self.recorder.attempt:
            # Workers may have begun another upload before they exited.
            _run_limited(self._abandon_uploads)

    def _check_run(self) -> EndedRecord | None:
        """Check that the flow run may train the run and that its storage is there.

        Returns the record of the run's end if the run is finished, else None. Writes nothing.

        Raises:
            AttemptFailedError: The flow run may not train the run, or the storage is empty although it was used before.
        """
        spec = self.spec
        self.recorder.set_activity("checking that the run is free")
        store = self.store.with_retry_limit(_FIRST_READ_SECONDS) if spec.storage.preflight else self.store
        # Before anything is written, since a mount may be missing.
        finished = check_run_is_free(RunDirectory(store), spec.request)
        root = self._storage.folder(spec.storage.root)
        known, variable = spec.request.known_storage
        if not finished and known == root.uri and not root.folders():
            raise AttemptFailedError(
                f"trainings have used storage {known} before, and it is empty: its mount is missing here, or it was "
                "emptied. Nothing was written. Make the storage available and retry the flow run; if it was emptied on "
                f"purpose, run `prefect variable delete {variable}` first",
                outcome=Outcome.STORAGE_ERROR,
            )
        return finished

    def _join(self) -> Payload:
        """Load the user's objects, join the Ray cluster, and return the objects."""
        spec = self.spec
        recorder = self.recorder
        if spec.request.resume_from and not RunDirectory(self.store).newest_commit_id:
            choose_source(self._storage, spec.request)  # if it fails, nothing was started or written
        recorder.emit(ClusterWanted())
        recorder.set_activity("")
        os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        if not spec.cluster.is_local:  # else the environment of its node has the variable
            os.environ.setdefault(PRINT_PATCH, "0")
        payload = load_payload(spec)
        recorder.set_activity("joining the cluster")
        try:
            cluster = join_cluster(spec)
        except AttemptFailedError as error:
            # The address of a cluster that this run never reached is probably misspelt: a retry does not help.
            is_known = spec.cluster.is_local or spec.cluster.is_submitted or newest_attempt_number(self.store)
            error.final = not is_known
            raise
        recorder.emit(cluster)
        self.spec = replace(spec, scaling=limit_to_local_cluster(spec, cluster.resources))
        return payload

    def _train(self, payload: Payload, begun: Begun) -> None:
        """Run ``fit()`` until the train loop has returned on all ranks."""
        from .trainer import make_trainer

        spec = self.spec
        owner = spec.request.owner
        tally = self.recorder.report.tally
        context = RunContext(
            run_name=spec.request.run_name,
            run_id=begun.run_id,
            attempt=begun.attempt,
            storage_uri=spec.storage.uri,
            run_uri=self.store.uri,
            flow_run_id=owner.flow_run_id if owner.is_flow_run else "",
            **owner.model_dump(include={"flow_name", "deployment_id", "deployment_name"}),
            failures=begun.attempt - 1 + tally.worker_failures + tally.preemptions,
            trained_seconds=tally.account().productive_seconds,
            ends_at=spec.ends_at,
            score_attribute=spec.checkpoints.score_attribute,
        )
        self.recorder.set_activity("making the datasets")
        datasets = make_datasets(payload)
        self.recorder.set_activity("")
        try:
            trainer = make_trainer(spec, payload, datasets, self.store, context, self._receiver.address)
        except (TypeError, ValueError, DeprecationWarning) as error:
            raise ConfigurationError(f"Ray Train does not accept the configuration: {error}") from error
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = str(spec.poll_interval_seconds)
        signal.signal(signal.SIGTERM, self._handle_termination)  # Ray has replaced the handler
        self.recorder.start_metrics()
        trainer.fit()

    def _complete(self) -> AttemptEnded:
        """Return the final event, with the run's result, after the train loop has returned on all ranks."""
        assert self.recorder.history
        self.recorder.set_activity("adding up the run's result")
        self._receiver.finish(EXIT_STEP_SECONDS)
        self.recorder.history.close()
        restore_snapshot(self.store, RunDirectory(self.store).newest_commit)
        ended = AttemptEnded(outcome=Outcome.COMPLETED, attempt=self.recorder.attempt)
        return ended.model_copy(update={"result": self._result(ended)})

    def _end_of_finished(self, finished: EndedRecord) -> AttemptEnded:
        """Return the final event of an attempt on a run that was finished before, with the recorded result."""
        self.recorder.recall_history()
        requested = self.spec.request.fingerprint
        trained_with = RunDirectory(self.store).fingerprint or requested
        return AttemptEnded(
            outcome=Outcome.COMPLETED,
            already_finished=True,
            message="the run was finished before; its result is returned",
            warning=trained_with.uncompared(requested),
            result=finished.result or self._result(),
        )

    def _result(self, *new_events: AttemptEnded) -> dict[str, Any]:
        from prefect_elastic_train.runs.inspecting import make_result

        return make_result(
            self.store,
            add_up(chain(read_history(self.store), new_events)),
            self.spec.storage_block,
            self.spec.checkpoints.score_attribute,
        ).model_dump(mode="json")

    def _release_resources(self) -> None:
        from prefect_elastic_train.controller.keepers import stop_keepers
        from prefect_elastic_train.controller.scaling_policy import release_reservation, requester_id

        # All attempts of a run have the same id, and a successor may use it by now.
        if newest_attempt_number(self.store) == self.recorder.attempt:
            release_reservation(requester_id(self.store))
            if not self._is_retried:
                stop_keepers(self._run_id)

    def _abandon_uploads(self) -> None:
        if newest_attempt_number(self.store) == self.recorder.attempt:
            self.store.abort_uploads()


def _interrupt() -> None:
    """End ``fit()`` by the signal that the supervisor sends."""
    os.kill(os.getpid(), signal.SIGINT)


def _run_limited(action: Callable[[], object]) -> None:
    """Run an action, but wait only for a limited time: a cluster or storage may not answer. Its errors are logged."""
    error = error_within(EXIT_STEP_SECONDS, action)
    if error:
        logger.warning("leaving the cluster and the storage: %r", error)
