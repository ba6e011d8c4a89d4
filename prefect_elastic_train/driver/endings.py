"""The final event of an attempt, from the exception or the signal that ended it."""

import sys
from pathlib import Path

from prefect_elastic_train.core.causes import describe_causes, short_message
from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome, StorageFaultError
from prefect_elastic_train.core.request import STOP_FILE, DriverSpec
from prefect_elastic_train.core.settings import StorageSettings
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.storage.fault_classes import diagnose


def final_event_of_error(error: Exception, storage: StorageSettings) -> AttemptEnded:
    """Return the final event of an attempt that was ended by an exception, from ``fit()`` or around it."""
    if isinstance(error, AttemptFailedError):
        return AttemptEnded(outcome=error.outcome, message=str(error), final=error.final)
    outcome, message = _classify(error, storage)
    return AttemptEnded(outcome=outcome, message=message)


def final_event_of_signal(spec: DriverSpec, spec_file: Path) -> AttemptEnded:
    """Return the final event of an attempt whose driver was ended by a signal.

    It has the outcome that the supervisor wrote beside the spec file before it sent the signal. A signal of any other
    process, such as the guard, is not meant to end the training: the outcome is ``driver_lost``. A signal to a driver
    that runs as a Ray job means that the job was stopped: the outcome is ``cancelled``.
    """
    if spec.cluster.is_submitted:
        return AttemptEnded(outcome=Outcome.CANCELLED, message="the job was stopped")
    try:
        outcome = Outcome(spec_file.with_name(STOP_FILE).read_text())
        message = "its flow process stopped the driver"
    except (OSError, ValueError):
        outcome = Outcome.DRIVER_LOST
        message = "the driver was ended by a signal; its flow process has probably died"
    return AttemptEnded(outcome=outcome, message=message)


def _classify(error: Exception, storage: StorageSettings) -> tuple[Outcome, str]:
    """Return the outcome of an attempt that was ended by an exception, and the message about it."""
    cause = getattr(error, "controller_failure", error)  # a ControllerError wraps its cause
    match error:
        case ConfigurationError():
            return Outcome.INVALID, str(error)
        case ImportError():
            return Outcome.INVALID, f"the driver cannot import a module: {error}"
    # If Ray Train is not loaded, the error is not one of its; importing it takes seconds and may fail.
    ended = _classify_error_of_ray(cause) if "ray.train" in sys.modules else None
    if ended:
        return ended
    match cause:
        case ConnectionError():
            return Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {short_message(str(cause))}"
        case StorageFaultError():
            return _outcome_of_storage_error(cause), str(cause)
        case OSError():
            return _outcome_of_storage_error(cause), (
                f"cannot use storage {storage.uri!r}: {type(cause).__name__}: {cause}. Use a storage that exists or "
                "can be created, with free space and write permission for this user"
            )
    failed = "the driver" if cause is error else "Ray Train's controller"
    return Outcome.DRIVER_LOST, f"{failed} failed: {short_message(f'{type(cause).__name__}: {cause}')}"


def _classify_error_of_ray(cause: Exception) -> tuple[Outcome, str] | None:
    """Return outcome and message of an attempt that was ended by an error that Ray or ``fit()`` raises; else None."""
    import ray.exceptions as rays
    from ray.train import WorkerGroupError
    from ray.train.v2.api.exceptions import PreemptionError

    from prefect_elastic_train.controller.failures import CapacityTimeoutError, failures_of

    text = str(cause)
    if FencedOffError.__name__ in f"{type(cause).__name__} {text}":
        return Outcome.INVALID, text
    if "checkpoints are not consistent" in text:  # Ray has no exception type for it
        folders = text.partition("paths: ")[2].partition("\n")[0]
        return Outcome.USER_ERROR, (
            "ranks reported different folders as one checkpoint: with NO_UPLOAD, all ranks must report the same path, "
            f"and none may upload. The folders: {folders}"
        )
    match cause:
        case CapacityTimeoutError():
            return Outcome.TIMED_OUT, text
        case WorkerGroupError():
            return _classify_failures(failures_of(cause))
        case PreemptionError():
            return Outcome.CLUSTER_LOST, f"preempted more often than max_preemption_failures allows: {text}"
        case TypeError() if "serialize" in text:
            return Outcome.INVALID, f"the train loop or its configuration cannot be sent to the workers: {text}"
        case rays.RuntimeEnvSetupError():
            return Outcome.INVALID, f"the runtime environment cannot be set up: {text}"
        case rays.ActorDiedError() | rays.ActorUnavailableError():
            return Outcome.DRIVER_LOST, f"Ray Train's controller died: {short_message(text)}"
        # Ray's timeouts are subclasses of OSError, and not errors of the storage.
        case rays.RaySystemError() | rays.GetTimeoutError():
            return Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {short_message(text)}"
    return None


def _outcome_of_storage_error(error: OSError) -> Outcome:
    """Return the outcome of an attempt that was ended by a storage error.

    After a transient error it is ``driver_lost``, since a new driver may succeed; else ``storage_error``.
    """
    fault = diagnose(error)
    return Outcome.DRIVER_LOST if fault and not fault.permanent else Outcome.STORAGE_ERROR


def _classify_failures(failures: dict[int, Exception]) -> tuple[Outcome, str]:
    """Return the outcome of an attempt that the failures of a worker group's ranks ended, and the message about it."""
    from prefect_elastic_train.controller.failures import causes_of, classify_failure, decisive_failure

    decisive = decisive_failure(failures.values())
    if isinstance(decisive, StorageFaultError):
        return _outcome_of_storage_error(decisive), str(decisive)
    if decisive is not None:
        return Outcome.USER_ERROR, f"{decisive} (FailureBudget.ignored_checkpoint is 'fail')"
    outcome, reason = classify_failure(failures.values())
    return outcome, f"{reason}: {'; '.join(describe_causes(causes_of(failures)))}"
