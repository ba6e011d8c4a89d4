"""One attempt, from the spec to its end: all work on the run directory, and around ``fit()``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from prefect_elastic_train.core.bounds import bounded_metrics
from prefect_elastic_train.core.events import AttemptEnded, AttemptStarted, ClusterConnected, ClusterWanted
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.records import AttemptRecord, EndedRecord, decode
from prefect_elastic_train.core.request import PRINT_PATCH, DriverSpec
from prefect_elastic_train.driver.fit import connect, fit_local_cluster, make_datasets, prepare
from prefect_elastic_train.driver.interruptions import interruptions
from prefect_elastic_train.driver.relay import AttemptTeller, EventOutput, EventReceiver
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.report.accounts import Tally
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt, end_attempt, peek
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.runs.liveness import HEARTBEAT_SECONDS, HeartbeatWriter, this_process
from prefect_elastic_train.runs.model import RunDirectory, all_attempts, newest_attempt, refusal
from prefect_elastic_train.runs.resume import choose_source, note_completed, restore_snapshot, seed_from_source
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.preflight import preflight
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger("prefect_elastic_train.driver")

#: How long each step of leaving the cluster may take. With one, that stays below the grace of supervisor and guard.
_LEAVE_SECONDS = 2.5
#: How long a storage that does not answer is asked for the run, before the preflight.
_LOOK_SECONDS = 15.0


class Attempt:
    """An attempt of this process, which becomes the owner of the run that the spec wants.

    Its steps are taken in order: :meth:`run`, :meth:`close`, :meth:`leave_cluster`.
    """

    def __init__(self, spec: DriverSpec, output: EventOutput, details: Details, began_at: float = 0.0) -> None:
        #: When the process began, or a spare one was needed, in seconds since the epoch; 0: unknown.
        self._began_at = began_at
        owner = spec.request.owner.model_copy(update=this_process())
        self.spec = replace(spec, request=replace(spec.request, owner=owner))
        self._storage = open_storage(spec.storage)
        self.store = self._storage.run(spec.request.run_name)
        self.teller = AttemptTeller(output, details, self.store, spec)
        self._heartbeat: HeartbeatWriter | None = None
        self._receiver = EventReceiver(self.teller.emit)
        self._past = Tally()  # of the attempts before

    def run(self) -> AttemptEnded:
        """Run the attempt until the loop has returned; raises whatever ends it otherwise."""
        spec = self.spec
        teller = self.teller

        def is_new() -> bool:
            return next(RunDirectory(self.store).lineage, None) is None

        teller.doing("looking whether the run is free")  # before anything is written where a mount may be missing
        store = self.store.impatient(_LOOK_SECONDS) if spec.storage.preflight else self.store
        finished = peek(RunDirectory(store), spec.request)
        if finished is not None:
            return self.finish(finished)
        root = self._storage.folder(spec.storage.root)
        known, variable = spec.request.known_storage
        if known == root.uri and not root.folders():
            raise refusal(
                f"trainings have used storage {known} before, and it is empty: its mount is missing here, or it was "
                "emptied. Nothing was written. Make the storage available and retry the flow run; if it was emptied on "
                f"purpose, run `prefect variable delete {variable}` first",
                Outcome.STORAGE_ERROR,
            )
        with ExitStack() as trying:
            probe = trying.enter_context(preflight(spec.storage)) if spec.storage.preflight else None
            if spec.request.resume_from and is_new():  # refused before a cluster is started or joined
                teller.doing("looking for the checkpoint that the run starts from")
                choose_source(self._storage, spec.request)
            teller.emit(ClusterWanted())
            teller.doing("")
            os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
            if spec.is_alone:
                os.environ.pop(PRINT_PATCH, None)  # its node has it
            else:
                os.environ.setdefault(PRINT_PATCH, "0")
            payload = prepare(spec)
            teller.doing("joining the cluster")
            try:
                address, dashboard_url, resources = connect(spec)
            except AttemptFailedError as error:
                # A cluster that this run never reached is more likely misspelt than lost: no retry heals that.
                own = spec.cluster.is_local or spec.cluster.is_submitted
                error.final = error.final or not (own or all_attempts(self.store))
                raise
            teller.emit(ClusterConnected(address=address, dashboard_url=dashboard_url, resources=resources))
            spec = replace(spec, scaling=fit_local_cluster(spec, resources))
            if probe is not None and not spec.cluster.is_local and is_new():
                from prefect_elastic_train.elastic.cluster import resources_per_worker, try_from_nodes

                # Before the first checkpoint each node is to show that it can write it.
                teller.doing("trying the storage from the nodes")
                try_from_nodes(probe, resources_per_worker(spec.scaling))
        begun = self.begin()
        if isinstance(begun, EndedRecord):
            return self.finish(begun)
        owner = spec.request.owner
        context = RunContext(
            run_name=spec.request.run_name,
            run_id=begun.run_id,
            attempt=begun.attempt,
            storage_uri=spec.storage.uri,
            run_uri=self.store.uri,
            flow_run_id=owner.flow_run_id if owner.is_flow_run else "",
            **owner.model_dump(include={"flow_name", "deployment_id", "deployment_name"}),
            failures=begun.attempt - 1 + self._past.worker_failures + self._past.preemptions,
            trained_seconds=self._past.account().productive_seconds,
            ends_at=spec.ends_at,
            score_attribute=spec.checkpoints.score_attribute,
        )
        from prefect_elastic_train.elastic.controller import make_trainer

        teller.doing("making the datasets")
        datasets = make_datasets(payload)
        teller.doing("")
        try:
            trainer = make_trainer(spec, payload, datasets, self.store, context, self._receiver.receiving)
        except (TypeError, ValueError, DeprecationWarning) as error:
            raise ConfigurationError(f"Ray Train does not accept the configuration: {error}") from error
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = str(spec.poll_interval_seconds)
        trainer.fit()
        # The controller has sent all its events before fit() returned; let the last ones arrive.
        time.sleep(0.1)
        return self.complete()

    def begin(self) -> Begun | EndedRecord:
        """Take the fence and say so."""
        from prefect_elastic_train.elastic.standby import may_replace

        spec = self.spec
        teller = self.teller
        notes: list[str] = []

        def seed() -> None:
            teller.doing("copying the checkpoint that the run starts from")
            notes.extend(seed_from_source(self._storage, spec.request, self.store))

        teller.doing("looking for where to resume")
        begun = begin_attempt(self.store, spec, seed)
        if isinstance(begun, EndedRecord):
            return begun
        teller.attempt = begun.attempt
        impatient = self.store.impatient(HEARTBEAT_SECONDS)
        # The signal ends fit(), as it does when the supervisor sends it.
        interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
        self._heartbeat = HeartbeatWriter(impatient, begun.attempt, on_fenced_off=interrupt)
        teller.history = HistoryWriter(impatient, begun.attempt)
        if begun.attempt > 1:
            self._past = teller.recall()
        scaling = spec.scaling
        needs_none = scaling.standby == "off" or spec.is_forked
        if not needs_none and not may_replace(scaling, spec.request.framework):
            notes.append("there are no standby workers: each device, but for GPUs with torch, wants its own process")
        commit = begun.point.commit
        failures = spec.failures
        left = {
            "driver restart": begun.restarts_left,
            "worker failure": failures.max_failures,
            "preemption": failures.max_preemption_failures,
        }
        teller.emit(
            AttemptStarted(
                run_name=spec.request.run_name,
                run_uri=self.store.uri,
                checkpoint=begun.point.checkpoint,
                checkpoint_at=commit.at if commit is not None else 0.0,
                driver_started_at=self._began_at,
                counted=begun.counted,
                left={name: number for name, number in left.items() if number >= 0},
                previous_end=spec.previous_end,
                started_from=RunDirectory(self.store).started_from,
                inherited=bounded_metrics(begun.point.inherited_metrics, spec.checkpoints.score_attribute),
                notes=[*notes, *begun.notes],
            )
        )
        return begun

    def complete(self) -> AttemptEnded:
        """The end of an attempt whose loop has returned, with the result."""
        assert self.teller.history is not None
        self.teller.doing("adding the run's result up")
        self._receiver.finish(_LEAVE_SECONDS)
        self.teller.history.close()
        restore_snapshot(self.store, RunDirectory(self.store).look_back(whole=False))
        ended = AttemptEnded(outcome=Outcome.COMPLETED, attempt=self.teller.attempt)
        return ended.model_copy(update={"result": self._result(ended)})

    def finish(self, finished: EndedRecord) -> AttemptEnded:
        """The end of an attempt with nothing to do: the result that the run has had since an earlier one."""
        self.teller.recall()
        message = "the run was finished before, and its result is given back"
        result = finished.result or self._result()
        trained_with = RunDirectory(self.store).fingerprint
        warning = trained_with.uncompared(self.spec.request.fingerprint) if trained_with is not None else ""
        return AttemptEnded(
            outcome=Outcome.COMPLETED, already_finished=True, message=message, warning=warning, result=result
        )

    def _result(self, *more: AttemptEnded) -> dict[str, Any]:
        from prefect_elastic_train.report.accounts import add_up
        from prefect_elastic_train.runs.inspecting import make_result

        return make_result(
            self.store,
            add_up(chain(read_history(self.store), more)),
            self.spec.storage_block,
            self.spec.checkpoints.score_attribute,
        ).model_dump(mode="json")

    def taken_over(self) -> AttemptEnded | None:
        """How the attempt ended if somebody else has the run now, however that showed, as far as the storage tells."""
        attempt = self.teller.attempt
        request = self.spec.request
        store = self._patient_enough()
        self.teller.doing("looking whether somebody has taken the run over")
        try:
            newest = newest_attempt(store) if attempt else 0
            if newest <= attempt:
                return None
            record = decode(AttemptRecord, store.read(layout.attempt_name(newest)))
        except OSError:
            return None
        if record is None or record.owner.flow_run_id == request.owner.flow_run_id:
            message = f"attempt {newest}, of another process of the same flow run, has taken over"
            return AttemptEnded(outcome=Outcome.SUPERSEDED, message=message)
        message = (
            f"run {request.run_name!r} was taken over by {record.owner.describe()} with resume=True; what this attempt "
            "trained after that counts for nothing"
        )
        return AttemptEnded(outcome=Outcome.INVALID, message=message)

    def close(self, ended: AttemptEnded) -> None:
        """Say the last word, and record it with the attempt if one was begun."""
        teller = self.teller
        self._receiver.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if teller.attempt and not ended.already_finished:
            store = self._patient_enough()
            teller.doing("recording the attempt's end")
            failed = ended.outcome in (Outcome.USER_ERROR, Outcome.DRIVER_LOST, Outcome.CLUSTER_LOST)
            if failed and teller.details.content():
                _within(_LEAVE_SECONDS, teller.write_details)
                message = f"{ended.message.rstrip('.')}; details: {store.uri}/{layout.details_name(teller.attempt)}"
                ended = ended.model_copy(update={"message": message})
            try:
                end_attempt(store, teller.attempt, ended.outcome.value, ended.message, result=ended.result)
            except OSError as error:
                logger.warning("could not record the end of attempt %d: %s", teller.attempt, error)
        teller.emit(ended)
        teller.close()
        if ended.outcome is Outcome.COMPLETED:
            # A storage that is away shall not hide the end; resume_from='latest' would not find this run.
            _within(_LEAVE_SECONDS, lambda: note_completed(self._storage, self.spec.request.run_name))

    def _patient_enough(self) -> RunStore:
        """The run directory for the last word: who was told to end has some seconds, others may wait for a storage."""
        return self.store.impatient(1.0) if interruptions() else self.store

    def leave_cluster(self, stuck: bool) -> None:
        """Leave nothing of the attempt in the cluster, also when ``fit()`` is stuck, which tidies up after itself."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if not self.spec.cluster.is_local:  # where nobody waits for it
            _within(_LEAVE_SECONDS, self._release)
        if not stuck:
            _within(_LEAVE_SECONDS, ray.shutdown)
        if self.teller.attempt:
            # Workers may have begun another upload while they were told to end.
            _within(_LEAVE_SECONDS, self._abandon_uploads)

    def _release(self) -> None:
        from prefect_elastic_train.elastic.policy import release_reservation, requester_id

        if newest_attempt(self.store) == self.teller.attempt:  # or the id, one for all attempts, is the successor's
            release_reservation(requester_id(self.store))

    def _abandon_uploads(self) -> None:
        store = self.store.impatient(1.0)
        if newest_attempt(store) == self.teller.attempt:
            store.abandon_uploads()


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do something for a bounded time, if it can be done: a cluster or a storage that is gone does not answer."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the attempt has ended, however this does
            logger.warning("leaving the cluster and the storage: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=seconds)
