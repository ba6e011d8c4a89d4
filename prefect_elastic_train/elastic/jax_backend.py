"""Joins the processes of a JAX worker group, also on CPUs, and takes them apart again without a delay.

Uses ``ray.train.v2.jax.config._JaxBackend``, which has no public base. What it does not do:

- On CPUs it joins nobody, so that each rank trains alone. Here they are joined, and collectives run over Gloo.
- On GPUs it counts the devices of each worker from 0, so that two workers of a host take the same one.
- On TPUs it sets ``MEGASCALE_*`` for several slices and leaves them alone for one. A pod that was made for several
  has them in its environment, and libtpu would wait for slices that are no longer there.
- When a rank has died, the others would wait for it as they shut down. Here nobody waits for the dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.v2.jax.config import JaxConfig, _JaxBackend
from ray.util.tpu import get_tpu_coordinator_env_vars

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0  # for all ranks to say that they live; a dead one is known at once
_LEAVE_SECONDS = 3.0  # for all ranks to meet at the end; less than the 5 s that Ray then waits for each worker


@dataclass
class RunJaxConfig(JaxConfig):  # type: ignore[misc]
    """Ray's ``JaxConfig`` with our backend; with neither TPUs nor GPUs, the workers train on CPUs."""

    @property
    def backend_cls(self) -> type[RunJaxBackend]:
        return RunJaxBackend


def run_jax_config(jax_config: JaxConfig | None, scaling_config: Any) -> JaxConfig:
    """Return how the workers are set up: as the user says, with an own backend too, or else for what they have."""
    if jax_config is not None and jax_config.backend_cls is not _JaxBackend:
        return jax_config
    given = jax_config or scaling_config
    return RunJaxConfig(use_tpu=given.use_tpu, use_gpu=given.use_gpu)


class RunJaxBackend(_JaxBackend):  # type: ignore[misc]
    """Sets the processes of a worker group up for JAX, each time one starts: its processes are always new."""

    def on_start(self, worker_group: Any, backend_config: JaxConfig) -> None:
        """Join the workers before their loops run; when one dies meanwhile, Ray starts another worker group."""
        if backend_config.use_tpu:
            if worker_group.get_worker_group_context().num_slices == 1:
                worker_group.execute(forget_other_slices)
            super().on_start(worker_group, backend_config)
            return
        platform = "cuda,cpu" if backend_config.use_gpu else "cpu"  # the first is the default
        size = len(worker_group)
        host, port = worker_group.execute_single(0, get_address_and_port)
        address = f"{host}:{port}"
        ray.get([worker_group.execute_single_async(rank, _join, platform, address, size, rank) for rank in range(size)])

    def on_shutdown(self, worker_group: Any, backend_config: JaxConfig) -> None:
        """Let the workers part before they are ended, all or none, so that none takes another's end for a failure."""
        try:
            if any(ray.get(worker_group.execute_async(_is_joined), timeout=_ANSWER_SECONDS)):
                ray.get(worker_group.execute_async(_leave), timeout=_LEAVE_SECONDS + _ANSWER_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.debug("jax.distributed is not shut down, a rank is gone: %s", error)


def forget_other_slices() -> None:
    """Remove what tells libtpu of more than one slice."""
    for name in get_tpu_coordinator_env_vars("", num_slices=2, slice_id=0):
        os.environ.pop(name, None)


def _join(platform: str, address: str, size: int, rank: int) -> None:
    """Choose the platform, unless the user's ``JAX_PLATFORMS`` does, and join the other processes if there are any."""
    if not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = platform  # read when JAX is imported
        if "jax" in sys.modules:  # as in a worker that is forked
            sys.modules["jax"].config.update("jax_platforms", platform)
    if size > 1:
        import jax

        # Ray has said which process this is and which devices it has; Slurm's or MPI's variables are about others.
        jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")


def _is_joined() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.distributed.is_initialized())


def _leave() -> None:
    """Part from the other processes, in a thread: this one stays free to be ended while the others are waited for."""
    import jax

    def shut_down() -> None:
        with contextlib.suppress(Exception):  # the process ends now
            jax.distributed.shutdown()

    leaving = threading.Thread(target=shut_down, name="leave jax.distributed", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
