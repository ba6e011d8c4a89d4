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
        run_id: 32 lower-case hexadecimal digits that stay over restarts of workers and drivers, over retries of the
            flow run and over resumes by other flow runs. A run of the same name in another storage, or one that was
            begun anew after the old one was deleted, has others, and so has a run that starts from another's
            checkpoint (``resume_from``).
        attempt: Number of the driver's attempt in the run directory, from 1. It grows with each new driver and stays
            while workers are restarted, so it belongs in no id; good for telling apart what restarts have written.
        storage_uri: The storage, without credentials.
        run_uri: The run directory in it.
        flow_run_id: The flow run that the attempt works for, of a subflow the root's, as that one stays over retries;
            empty outside of a flow.
        flow_name: Name of that flow run's flow.
        deployment_id: The deployment that it is a run of; empty without.
        deployment_name: Name of that; empty also if the Prefect API did not answer when the training was started.
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


#: Of this worker process, which works for one training; None outside of one.
_current: RunContext | None = None


def run_context() -> RunContext:
    """Return which training this worker works for; the same on all ranks.

    Returns:
        The names and ids, made when the attempt began: nothing is asked or waited for.

    Raises:
        RuntimeError: This process is no worker of a training that ``elastic_train`` has started, or it is one of the
            processes that Ray Data and validation functions run in: hand those what they need.

    Example:
        ::

            import ray.train
            import wandb

            if ray.train.get_context().get_world_rank() == 0:
                wandb.init(project="mnist", id=run_context().run_id, resume="allow")
    """
    if _current is None:
        raise RuntimeError(
            "run_context() was called outside of a training: it knows the run only inside the train loop of "
            "elastic_train. To try a loop out without one, call it within `with use_run_context(RunContext(...)):`"
        )
    return _current


@contextmanager
def use_run_context(context: RunContext) -> Iterator[None]:
    """Let :func:`run_context` return this in the process, for tests of train loops and for plain Ray Train.

    Args:
        context: What it returns until the ``with`` ends.
    """
    before = _current
    enter_run(context)
    try:
        yield
    finally:
        enter_run(before)


def enter_run(context: RunContext | None) -> None:
    """Let :func:`run_context` return this in the process from now on."""
    global _current
    _current = context
