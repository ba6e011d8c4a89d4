"""How an attempt ended, decided from what was raised in the driver."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome, StorageFaultError
from prefect_elastic_train.core.ray_output import cause as in_short
from prefect_elastic_train.core.ray_output import causes, distinct
from prefect_elastic_train.core.request import STOP_FILE, DriverSpec
from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.runs.commits import FencedOffError


def end_by_error(error: Exception, storage: StorageSettings) -> AttemptEnded:
    """How an attempt ended that raised an error, in ``fit()`` or around it."""
    if isinstance(error, AttemptFailedError):
        return AttemptEnded(outcome=error.outcome, message=str(error), final=error.final)
    outcome, message = _judge(error, storage)
    return AttemptEnded(outcome=outcome, message=message)


def end_by_signal(spec: DriverSpec, spec_file: Path) -> AttemptEnded:
    """How an attempt ended whose driver got a signal: as the supervisor has asked for, else as a lost driver's."""
    # Whoever else ends the driver, such as the guard of a dead flow process, does not mean the training.
    if spec.cluster.is_submitted:
        return AttemptEnded(outcome=Outcome.CANCELLED, message="the job was stopped")
    try:
        outcome = Outcome(spec_file.with_name(STOP_FILE).read_text())
    except (OSError, ValueError):
        message = "the driver was ended by a signal, as when its flow process has died"
        return AttemptEnded(outcome=Outcome.DRIVER_LOST, message=message)
    message = "its time was up" if outcome is Outcome.TIMED_OUT else "the flow run was told to stop"
    return AttemptEnded(outcome=outcome, message=message)


def _judge(error: Exception, storage: StorageSettings) -> tuple[Outcome, str]:
    if isinstance(error, ConfigurationError):
        return Outcome.INVALID, str(error)
    if isinstance(error, ImportError):
        return Outcome.INVALID, f"the driver lacks what it needs: {error}"
    # Without Ray Train it is no error of its, and its import takes seconds.
    found = _of_ray_train(error, storage) if "ray.train" in sys.modules else None
    if found is not None:
        return found
    cause = getattr(error, "controller_failure", error)  # of Ray Train's ControllerError
    if isinstance(cause, ConnectionError):
        return Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {in_short(str(cause))}"
    if isinstance(cause, OSError):
        return _of_storage(cause, storage)
    text = in_short(f"{type(cause).__name__}: {cause}")
    if cause is error:
        return Outcome.DRIVER_LOST, f"the driver failed: {text}"
    return Outcome.DRIVER_LOST, f"Ray Train's controller failed: {text}"


def _of_storage(error: OSError, storage: StorageSettings) -> tuple[Outcome, str]:
    """The ending by a storage error, which a new driver may heal if it passes; a known fault has its own message."""
    if isinstance(error, StorageFaultError):
        is_passing = not error.permanent
        message = str(error)
    else:
        is_passing = error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
        message = (
            f"cannot use storage {storage.uri!r}: {type(error).__name__}: {error}. Give the training one that exists "
            "or can be made, with room and write permission for this user"
        )
    return Outcome.DRIVER_LOST if is_passing else Outcome.STORAGE_ERROR, message


def _of_ray_train(error: Exception, storage: StorageSettings) -> tuple[Outcome, str] | None:
    """The ending by what only ``fit()`` raises, None for anything else."""
    import ray.exceptions as rays
    from ray.train import ControllerError, WorkerGroupError
    from ray.train.v2.api.exceptions import PreemptionError

    from prefect_elastic_train.elastic.loop_watch import CapacityTimeoutError, cause_of, decisive, in_full

    cause = error.controller_failure if isinstance(error, ControllerError) else error
    text = str(cause)
    if isinstance(cause, FencedOffError) or FencedOffError.__name__ in text:
        return Outcome.INVALID, text
    if "checkpoints are not consistent" in text:  # Ray's exception has no type of its own
        return Outcome.USER_ERROR, (
            "ranks reported different folders as one checkpoint: with NO_UPLOAD, all ranks must report the same path, "
            f"and none may upload. The folders: {text.partition('paths: ')[2].partition(chr(10))[0]}"
        )
    if isinstance(cause, CapacityTimeoutError):
        return Outcome.TIMED_OUT, text
    if isinstance(error, WorkerGroupError):
        found = decisive(error.worker_failures.values())
        if isinstance(found, StorageFaultError):
            return _of_storage(found, storage)
        if found is not None:
            return Outcome.USER_ERROR, f"{found} (FailureBudget.ignored_checkpoint is 'fail')"
        texts, also = distinct({rank: in_full(failure) for rank, failure in error.worker_failures.items()})
        why = "; ".join(causes(texts, also))
        outcome, reason = cause_of(error.worker_failures)
        assert outcome is not None  # the controller has waited
        return outcome, f"{reason}: {why}"
    if isinstance(error, PreemptionError):
        return Outcome.CLUSTER_LOST, f"preempted more often than max_preemption_failures allows: {error}"
    if isinstance(error, TypeError) and "serialize" in str(error):
        return Outcome.INVALID, f"the train loop or its configuration cannot be sent to the workers: {error}"
    if isinstance(cause, rays.RuntimeEnvSetupError):
        return Outcome.INVALID, f"the runtime environment cannot be set up: {cause}"
    if isinstance(cause, rays.ActorDiedError | rays.ActorUnavailableError):
        return Outcome.DRIVER_LOST, f"Ray Train's controller died: {in_short(text)}"
    # Ray's time-outs are OSErrors by inheritance, and no fault of the storage.
    if isinstance(cause, rays.RaySystemError | rays.GetTimeoutError):
        return Outcome.CLUSTER_LOST, f"the Ray cluster was lost: {in_short(text)}"
    return None
