"""The final event of an attempt, from the exception or the signal that ended it."""

import sys
from pathlib import Path

from prefect_elastic_train.core.causes import describe_causes, short_message
from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome, StorageFaultError
from prefect_elastic_train.core.request import STOP_FILE, DriverSpec
from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.storage.fault_classes import diagnose


def final_event_of_error(error: Exception, storage: StorageSettings) -> AttemptEnded:
    """Return the final event of an attempt that was ended by an exception, from ``fit()`` or around it."""
    if isinstance(error, AttemptFailedError):
        return AttemptEnded(outcome=error.outcome, message=str(error), final=error.final)
    if isinstance(error, ConfigurationError):
        return _ended(Outcome.INVALID, str(error))
    if isinstance(error, ImportError):
        return _ended(Outcome.INVALID, f"the driver lacks what it needs: {error}")
    cause = getattr(error, "controller_failure", error)  # a ControllerError wraps its cause
    # If Ray Train is not loaded, the error is not one of its; importing it takes seconds.
    ended = _ended_by_ray_train(error, cause, storage) if "ray.train" in sys.modules else None
    if ended is not None:
        return ended
    if isinstance(cause, ConnectionError):
        return _ended(Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {short_message(str(cause))}")
    if isinstance(cause, OSError):
        return _ended_by_storage(cause, storage)
    failed = "the driver" if cause is error else "Ray Train's controller"
    return _ended(Outcome.DRIVER_LOST, f"{failed} failed: {short_message(f'{type(cause).__name__}: {cause}')}")


def final_event_of_signal(spec: DriverSpec, spec_file: Path) -> AttemptEnded:
    """Return the final event of an attempt whose driver was ended by a signal.

    It has the outcome that the supervisor wrote beside the spec file before it sent the signal. A signal of any other
    process, such as the guard, is not meant to end the training: the outcome is ``driver_lost``. A signal to a driver
    that runs as a Ray job means that the job was stopped: the outcome is ``cancelled``.
    """
    if spec.cluster.is_submitted:
        return _ended(Outcome.CANCELLED, "the job was stopped")
    try:
        outcome = Outcome(spec_file.with_name(STOP_FILE).read_text())
    except (OSError, ValueError):
        return _ended(Outcome.DRIVER_LOST, "the driver was ended by a signal, as when its flow process has died")
    if outcome is Outcome.TIMED_OUT:
        return _ended(outcome, "the training's time was over")
    return _ended(outcome, "the flow run was stopped")


def _ended(outcome: Outcome, message: str) -> AttemptEnded:
    return AttemptEnded(outcome=outcome, message=message)


def _ended_by_storage(error: OSError, storage: StorageSettings) -> AttemptEnded:
    """Return the final event of an attempt that was ended by a storage error.

    After a transient error the outcome is ``driver_lost``, since a new driver may succeed; else ``storage_error``.
    """
    fault = diagnose(error)
    is_transient = fault is not None and not fault.permanent
    message = str(error)
    if not isinstance(error, StorageFaultError):
        message = (
            f"cannot use storage {storage.uri!r}: {type(error).__name__}: {error}. Give the training one that exists "
            "or can be made, with room and write permission for this user"
        )
    return _ended(Outcome.DRIVER_LOST if is_transient else Outcome.STORAGE_ERROR, message)


def _ended_by_ray_train(error: Exception, cause: Exception, storage: StorageSettings) -> AttemptEnded | None:
    """Return the final event of an attempt ended by an error that only ``fit()`` raises; None for any other error."""
    import ray.exceptions as rays
    from ray.train import WorkerGroupError
    from ray.train.v2.api.exceptions import PreemptionError

    from prefect_elastic_train.controller.failures import CapacityTimeoutError

    text = str(cause)
    if isinstance(cause, FencedOffError) or FencedOffError.__name__ in text:
        return _ended(Outcome.INVALID, text)
    if "checkpoints are not consistent" in text:  # Ray has no exception type for it
        folders = text.partition("paths: ")[2].partition("\n")[0]
        return _ended(
            Outcome.USER_ERROR,
            "ranks reported different folders as one checkpoint: with NO_UPLOAD, all ranks must report the same path, "
            f"and none may upload. The folders: {folders}",
        )
    if isinstance(cause, CapacityTimeoutError):
        return _ended(Outcome.TIMED_OUT, text)
    if isinstance(error, WorkerGroupError):
        return _ended_by_workers(error.worker_failures, storage)
    if isinstance(error, PreemptionError):
        return _ended(Outcome.CLUSTER_LOST, f"preempted more often than max_preemption_failures allows: {error}")
    if isinstance(error, TypeError) and "serialize" in str(error):
        return _ended(Outcome.INVALID, f"the train loop or its configuration cannot be sent to the workers: {error}")
    if isinstance(cause, rays.RuntimeEnvSetupError):
        return _ended(Outcome.INVALID, f"the runtime environment cannot be set up: {cause}")
    if isinstance(cause, rays.ActorDiedError | rays.ActorUnavailableError):
        return _ended(Outcome.DRIVER_LOST, f"Ray Train's controller died: {short_message(text)}")
    # Ray's timeouts are subclasses of OSError, and not errors of the storage.
    if isinstance(cause, rays.RaySystemError | rays.GetTimeoutError):
        return _ended(Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {short_message(text)}")
    return None


def _ended_by_workers(failures: dict[int, Exception], storage: StorageSettings) -> AttemptEnded:
    from prefect_elastic_train.controller.failures import causes_of, classify_failure, decisive_failure

    decisive = decisive_failure(failures.values())
    if isinstance(decisive, StorageFaultError):
        return _ended_by_storage(decisive, storage)
    if decisive is not None:
        return _ended(Outcome.USER_ERROR, f"{decisive} (FailureBudget.ignored_checkpoint is 'fail')")
    outcome, reason = classify_failure(failures.values())
    return _ended(outcome, f"{reason}: {'; '.join(describe_causes(causes_of(failures)))}")
