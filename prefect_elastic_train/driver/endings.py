"""How an attempt ended, decided from what was raised in the driver."""

from __future__ import annotations

from pathlib import Path

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    Outcome,
    StorageFaultError,
    is_passing,
)
from prefect_elastic_train.core.rank_errors import cause as in_short
from prefect_elastic_train.core.rank_errors import causes, distinct
from prefect_elastic_train.core.records import AttemptRecord, decode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.spec import STOP_FILE, DriverSpec
from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError, newest_attempt
from prefect_elastic_train.storage.store import RunStore


def end_by_error(error: Exception, storage: StorageSettings) -> AttemptEnded:
    """How an attempt ended that raised an error, whether or not it came to ``fit()``."""
    if isinstance(error, AttemptFailedError):
        return AttemptEnded(outcome=error.outcome, message=str(error), final=error.final)
    if isinstance(error, ConfigurationError):
        return AttemptEnded(outcome=Outcome.INVALID, message=str(error))
    if isinstance(error, ConnectionError):
        return AttemptEnded(outcome=Outcome.CLUSTER_LOST, message=f"the Ray cluster was lost: {in_short(str(error))}")
    if isinstance(error, OSError):
        what = f"cannot use storage {storage.uri!r}: {type(error).__name__}"
        why = "Give the training one that exists or can be made, with room and write permission for this user"
        outcome, message = _of_storage(error, f"{what}: {error}. {why}")
        return AttemptEnded(outcome=outcome, message=message)
    message = f"the driver failed: {type(error).__name__}: {in_short(str(error))}"
    return AttemptEnded(outcome=Outcome.DRIVER_LOST, message=message)


def end_by_signal(spec: DriverSpec, spec_file: Path) -> AttemptEnded:
    """How an attempt ended whose driver got a signal: as the supervisor has asked for, else as a lost driver's.

    Whoever else ends the driver, such as the guard of a dead flow process, does not mean the training.
    """
    if spec.cluster.is_submitted:
        return AttemptEnded(outcome=Outcome.CANCELLED, message="the job was stopped")
    try:
        outcome = Outcome(spec_file.with_name(STOP_FILE).read_text())
    except (OSError, ValueError):
        return AttemptEnded(outcome=Outcome.DRIVER_LOST, message="the driver was ended by a signal")
    message = "its time was up" if outcome is Outcome.TIMED_OUT else "the flow run was told to stop"
    return AttemptEnded(outcome=outcome, message=message)


def taken_over(store: RunStore, attempt: int, request: RunRequest) -> AttemptFailedError | None:
    """The error of an attempt that ended because somebody else has the run now, however that showed; else None."""
    newest = newest_attempt(store)
    if newest <= attempt:
        return None
    record = decode(AttemptRecord, store.read(layout.attempt_name(newest)))
    if record is None or record.owner.flow_run_id == request.owner.flow_run_id:
        message = f"attempt {newest}, of another process of the same flow run, has taken over"
        return AttemptFailedError(message, outcome=Outcome.SUPERSEDED, attempt=attempt)
    return AttemptFailedError(
        f"run {request.run_name!r} was taken over by {record.owner.describe()} with resume=True; what this attempt "
        "trained after that counts for nothing",
        outcome=Outcome.INVALID,
        attempt=attempt,
    )


def classify(error: Exception, attempt: int) -> AttemptFailedError:
    """Decide from what ``fit()`` raised how the attempt ended."""
    if isinstance(error, AttemptFailedError):
        return error
    outcome, message = _of_fit(error)
    return AttemptFailedError(message, outcome=outcome, attempt=attempt)


def _of_storage(error: OSError, message: str) -> tuple[Outcome, str]:
    """The ending by a storage error; a fault that is known has a message of its own."""
    known = str(error) if isinstance(error, StorageFaultError) else message
    return Outcome.DRIVER_LOST if is_passing(error) else Outcome.STORAGE_ERROR, known


def _of_fit(error: Exception) -> tuple[Outcome, str]:
    import ray.exceptions as rays
    from ray.train import ControllerError, WorkerGroupError
    from ray.train.v2.api.exceptions import PreemptionError

    from prefect_elastic_train.elastic.failures import CapacityTimeoutError, decisive, is_death

    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, FencedOffError) or FencedOffError.__name__ in str(cause):
        return Outcome.INVALID, str(cause)
    if isinstance(cause, CapacityTimeoutError):
        return Outcome.TIMED_OUT, str(cause)
    if isinstance(error, WorkerGroupError):
        found = decisive(error.worker_failures.values())
        if isinstance(found, StorageFaultError):
            return _of_storage(found, str(found))
        if found is not None:
            return Outcome.USER_ERROR, f"{found} (FailureBudget.ignored_checkpoint is 'fail')"
        texts, also = distinct({rank: f"{type(e).__name__}: {e}" for rank, e in error.worker_failures.items()})
        why = "; ".join(causes(texts, also))
        # When a rank dies, the others fail in their collectives: then its death is the cause.
        if not any(is_death(failure) for failure in error.worker_failures.values()):
            return Outcome.USER_ERROR, f"the train loop failed more often than max_failures allows: {why}"
        return Outcome.CLUSTER_LOST, f"workers died more often than max_failures allows: {why}"
    if isinstance(error, PreemptionError):
        return Outcome.CLUSTER_LOST, f"preempted more often than max_preemption_failures allows: {error}"
    if isinstance(error, TypeError) and "serialize" in str(error):
        return Outcome.INVALID, f"the train loop or its configuration cannot be sent to the workers: {error}"
    if isinstance(cause, rays.RuntimeEnvSetupError):
        return Outcome.INVALID, f"the runtime environment cannot be set up: {cause}"
    if isinstance(cause, rays.ActorDiedError | rays.ActorUnavailableError):
        return Outcome.DRIVER_LOST, f"Ray Train's controller died: {in_short(str(cause))}"
    # Ray's time-outs are OSErrors by inheritance, and no fault of the storage.
    if isinstance(cause, rays.RaySystemError | rays.GetTimeoutError | ConnectionError):
        return Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {in_short(str(cause))}"
    if isinstance(cause, OSError):
        return _of_storage(cause, f"the run directory could not be written: {cause}")
    return Outcome.DRIVER_LOST, f"Ray Train's controller failed: {in_short(f'{type(cause).__name__}: {cause}')}"
