"""What a train loop may know of the training that it is part of: ids to hand to other tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class RunContext:
    """Which training a worker works for. Nothing in it is a secret.

    Attributes:
        run_name: Name of the run.
        run_id: 32 lower-case hexadecimal digits that stay over restarts, retries and resumes, also by other flow runs.
            A run in another storage, one that was begun anew after the old one was deleted, and one that starts from
            another's checkpoint (``resume_from``) have others.
        attempt: Number of the driver's attempt, from 1. It grows with each new driver, so it belongs in no id.
        storage_uri, run_uri: The storage, without credentials, and the run directory in it.
        flow_run_id, flow_name: The flow run that the attempt works for, of a subflow the root's, as that one stays over
            retries, and its flow; empty outside of a flow.
        deployment_id, deployment_name: The deployment that it is a run of; the name is empty also if the Prefect API
            did not answer when the training was started.
        failures: How often workers, nodes and drivers of the run had failed when this worker started.
        trained_seconds: How long the run had trained when the attempt began.
        ends_at: When ``timeout_seconds`` are over, in seconds since the epoch; 0 without.
        score_attribute: Name of the metric that ranks checkpoints (``CheckpointPolicy``), empty without.
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


current: RunContext | None = None  # of this worker process, which works for one training; None outside of one


def run_context() -> RunContext:
    """Return which training this worker works for; the same on all ranks, and nothing is asked or waited for.

    ``wandb.init(project="mnist", id=run_context().run_id, resume="allow")``, on one rank, for instance.

    Raises:
        RuntimeError: This process is no worker of a training that ``elastic_train`` has started, or it is one of the
            processes that Ray Data and validation functions run in: hand those what they need.
    """
    if current is None:
        raise RuntimeError(
            "run_context() was called outside of a training: it knows the run only inside the train loop of "
            "elastic_train. To try a loop out without one, call it within `with use_run_context(RunContext(...)):`"
        )
    return current


@contextmanager
def use_run_context(context: RunContext) -> Iterator[None]:
    """Let :func:`run_context` return this until the ``with`` ends, for tests of loops and for plain Ray Train."""
    before = current
    enter_run(context)
    try:
        yield
    finally:
        enter_run(before)


def enter_run(context: RunContext | None) -> None:
    """Let :func:`run_context` return this in the process from now on."""
    global current
    current = context
