"""Ids and times of the training that a worker belongs to, for a train loop and the tools it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunContext:
    """Names, ids and times of the training that a worker belongs to. It contains no secrets.

    Attributes:
        run_name: Name of the run.
        run_id: 32 lower-case hexadecimal digits. It stays the same over restarts, retries and resumes, also by other
            flow runs. A run has a new id if it is in another storage, is created again after it was deleted, or starts
            from another run's checkpoint (``resume_from``).
        attempt: Number of the driver's attempt, from 1. Each new driver increases it, so do not use it in an id.
        storage_uri: URI of the storage, without credentials.
        run_uri: URI of the run directory in the storage.
        flow_run_id: Id of the flow run that started the attempt. For a subflow it is the id of the root flow run, which
            stays the same over retries. Empty outside of a flow.
        flow_name: Name of that flow. Empty outside of a flow.
        deployment_id: Id of the deployment of that flow run. Empty without one.
        deployment_name: Name of that deployment. Also empty if the Prefect API did not answer when training started.
        failures: Failures of workers, nodes and drivers in this run before this worker started.
        trained_seconds: Committed training time of the run before this attempt, in seconds.
        ends_at: Time at which ``timeout_seconds`` are over, in seconds since the epoch; infinite or 0: no timeout.
        score_attribute: Name of the metric that ranks checkpoints (``CheckpointPolicy``). Empty without one.
        skipped_steps: Steps whose batches a session skips, since its :class:`Guard` has found a problem at them.
    """

    run_name: str
    run_id: str
    attempt: int
    storage_uri: str
    run_uri: str
    flow_run_id: str = ""
    flow_name: str = ""
    deployment_id: str = ""
    deployment_name: str = ""
    failures: int = 0
    trained_seconds: float = 0.0
    ends_at: float = 0.0
    score_attribute: str = ""
    skipped_steps: tuple[int, ...] = ()


#: Module state: a loop calls :func:`run_context` without arguments, and a worker process runs one training. It is set
#: before the loop begins.
current: RunContext | None = None


def of_worker(train: Any) -> RunContext:
    """Return the run context of a worker with this Ray Train context, if any; under plain Ray Train, only names."""
    experiment = train.get_experiment_name() if train else ""
    return current or RunContext(experiment, experiment, 1, "", "")


def run_context() -> RunContext:
    """Return the run context: names, ids and times of the training that this worker belongs to.

    It is the same on all ranks, and is returned without communication.

    Raises:
        RuntimeError: This process is not a worker of ``elastic_train``. Processes in which Ray Data or validation
            functions run are not either: pass them what they need.

    Example::

        wandb.init(project="mnist", id=run_context().run_id, resume="allow")  # on one rank
    """
    if current is None:
        raise RuntimeError(
            "run_context() was called outside of a training: it is available only in the train loop of "
            "elastic_train. To test a loop without one, call it within `with use_run_context(RunContext(...)):`"
        )
    return current


@contextmanager
def use_run_context(context: RunContext) -> Iterator[None]:
    """Set the result of :func:`run_context` within a ``with`` block, for tests of loops and for plain Ray Train.

    Example::

        with loop.use_run_context(loop.RunContext("test", "0" * 32, 1, "", "")):
            train_loop({"steps": 3})
    """
    global current
    before = current
    current = context
    try:
        yield
    finally:
        current = before
