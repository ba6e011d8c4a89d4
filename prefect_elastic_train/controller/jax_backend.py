"""The backend of JAX trainings: joins the processes of a worker group, and takes them apart without a delay.

Uses ``ray.train.v2.jax.config._JaxBackend``, which has no public base class. Differences to it:

- On CPUs, Ray's joins no workers, so that each rank trains alone. Ours joins them, with collectives over Gloo.
- On GPUs, Ray's numbers the devices of each worker from 0, so that two workers of a host use the same one.
- On TPUs, Ray's sets ``MEGASCALE_*`` for several slices, and leaves the variables unchanged for one. A pod made for
  several slices has them in its environment, and libtpu would wait for slices that no longer exist.
- After the death of a rank, the others would wait for it as they shut down. Ours does not wait for dead ranks.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.v2.jax.config import JaxConfig, _JaxBackend

from prefect_elastic_train.worker import jax_processes

_COLLECTIVES_QUERY_SECONDS = 1.0  # for all ranks to answer; a dead one is noticed at once


class RunJaxBackend(_JaxBackend):  # type: ignore[misc]
    """Joins the worker processes of each worker group with ``jax.distributed``, and separates them at its end."""

    def on_start(self, worker_group: Any, backend_config: JaxConfig) -> None:
        """Join the workers of a worker group with ``jax.distributed`` before their train loops run.

        If a worker dies meanwhile, Ray starts another worker group.
        """
        if backend_config.use_tpu:
            if worker_group.get_worker_group_context().num_slices == 1:
                worker_group.execute(jax_processes.remove_multislice_variables)
            super().on_start(worker_group, backend_config)
            return
        platform = "cuda,cpu" if backend_config.use_gpu else "cpu"  # the first is the default
        size = len(worker_group)
        host, port = worker_group.execute_single(0, get_address_and_port)
        ray.get(
            [
                worker_group.execute_single_async(rank, jax_processes.join, platform, f"{host}:{port}", size, rank)
                for rank in range(size)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: JaxConfig) -> None:
        """Shut down ``jax.distributed`` in all workers of a worker group together, or in none if a rank is lost.

        Otherwise a worker would take the exit of another worker for a failure.
        """
        with suppress(ray.exceptions.RayError, TimeoutError):
            if any(ray.get(worker_group.execute_async(jax_processes.is_joined), timeout=_COLLECTIVES_QUERY_SECONDS)):
                timeout = jax_processes.LEAVE_SECONDS + _COLLECTIVES_QUERY_SECONDS
                ray.get(worker_group.execute_async(jax_processes.leave), timeout=timeout)


@dataclass
class RunJaxConfig(JaxConfig):  # type: ignore[misc]
    """Ray's ``JaxConfig`` with :class:`RunJaxBackend`. With neither TPUs nor GPUs, the workers train on CPUs."""

    backend_cls = RunJaxBackend


def run_jax_config(jax_config: JaxConfig | None, scaling_config: Any) -> JaxConfig:
    """Return the user's JAX configuration if it has a backend of its own, else a :class:`RunJaxConfig`."""
    if jax_config and jax_config.backend_cls is not _JaxBackend:
        return jax_config
    config = jax_config or scaling_config
    return RunJaxConfig(use_tpu=config.use_tpu, use_gpu=config.use_gpu)
