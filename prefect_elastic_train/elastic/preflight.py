"""Trying a storage from each node that may train."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.elastic.cluster_view import cluster_nodes
from prefect_elastic_train.storage.preflight import Probe

__all__ = ["try_from_nodes"]

logger = logging.getLogger("prefect_elastic_train.driver")

#: How long all nodes together may take. One that says nothing until then may be busy or gone; it is not waited for.
_SECONDS = 30.0


def try_from_nodes(probe: Probe, resources_per_worker: Mapping[str, float]) -> None:
    """Try a storage from each node that can hold a worker, bar the driver's own.

    Raises:
        StorageFaultError: A node cannot use it.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        node.id
        for node in cluster_nodes()
        if node.id != own and all(node.total.get(name, 0) >= amount for name, amount in resources_per_worker.items())
    ]
    # Without CPUs, so that it starts on a node that others fill.
    task = ray.remote(num_cpus=0, max_retries=0)(_try_here)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(probe)
        for node in nodes
    ]
    done, silent = ray.wait(asked, num_returns=len(asked), timeout=_SECONDS) if asked else ([], [])
    for answer in done:
        try:
            ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            logger.warning("A node did not try the storage: %s", error)
    for answer in silent:
        ray.cancel(answer, force=True)
    if silent:
        logger.warning("%d of %d nodes did not try the storage within %g s", len(silent), len(asked), _SECONDS)


def _try_here(probe: Probe) -> None:
    probe.try_from(socket.gethostname())
