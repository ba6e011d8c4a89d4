"""Joining the processes of a JAX worker group, and leaving it without waiting for dead ranks."""

import os
import signal
import sys
from contextlib import suppress

from ray.util.tpu import get_tpu_coordinator_env_vars

from prefect_elastic_train.core.threads import start_thread

LEAVE_SECONDS = 3.0  # for all ranks to leave together; less than the 5 s that Ray then waits for each worker


def remove_multislice_variables() -> None:
    """Remove the environment variables by which libtpu expects more than one TPU slice."""
    for name in get_tpu_coordinator_env_vars("", num_slices=2, slice_id=0):
        os.environ.pop(name, None)


def join(platform: str, address: str, size: int, rank: int) -> None:
    """Select the JAX platform of this worker, and join the worker group's processes with ``jax.distributed``.

    The variable ``JAX_PLATFORMS`` takes precedence. A worker group of one worker has no processes to join.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = platform  # read when JAX is imported
        if "jax" in sys.modules:  # a forked worker has it already
            sys.modules["jax"].config.update("jax_platforms", platform)
    if size > 1:
        import jax

        handler = signal.getsignal(signal.SIGTERM)
        # Ray sets rank and devices. The variables of Slurm or MPI, if any, describe other processes.
        jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)  # JAX has installed its own


def is_joined() -> bool:
    """Return True if this worker has joined its worker group with ``jax.distributed``."""
    jax = sys.modules.get("jax")
    return bool(jax and jax.distributed.is_initialized())


def leave() -> None:
    """Shut down ``jax.distributed`` in this worker, and wait up to `LEAVE_SECONDS` until all ranks do so.

    A thread does it, so that this process can be terminated while JAX waits for a rank.
    """
    import jax

    def shut_down() -> None:
        with suppress(Exception):  # the process exits next
            jax.distributed.shutdown()

    start_thread(shut_down).join(LEAVE_SECONDS)
