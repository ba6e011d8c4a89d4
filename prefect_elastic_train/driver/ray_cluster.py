"""The Ray cluster as the driver sees it before a training: its address, its head, and its nodes' access to the storage.

Uses ``ray._raylet`` and ``ray._private.services``. ``ray.init`` reports a refused token as "Failed to connect", like a
dead head. It waits without a limit for a port that accepts connections and does not answer. And it does not return the
address that ``"auto"`` means.
"""

import logging
import socket
import threading
import time
from collections.abc import Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.controller.nodes import cluster_nodes
from prefect_elastic_train.storage.preflight import Probe

logger = logging.getLogger("prefect_elastic_train.driver")

_HEAD_REQUEST_SECONDS = 5
_PROBE_SECONDS = 30.0  # for all nodes together; a node that has not answered by then may be busy or dead


def try_head(address: str, timeout_seconds: float) -> Exception | None:
    """Connect to the Ray head at ``host:port`` with the token of this process; return the error, None if it answers."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    answers: list[Exception | None] = []

    def request() -> None:
        try:
            GcsClient(address=address).internal_kv_keys(b"session_name", timeout=_HEAD_REQUEST_SECONDS)
            answers.append(None)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            answers.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return answers[0] if answers else TimeoutError("no answer")


def find_address() -> str:
    """Return ``host:port`` of the Ray cluster that ``"auto"`` means: ``RAY_ADDRESS``, or the only one on this node."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return str(canonicalize_bootstrap_address_or_die("auto"))


def probe_from_nodes(probe: Probe, resources_per_worker: Mapping[str, float]) -> None:
    """Test a storage from each node that can hold a worker, except the driver's own node; raise the error of a node.

    A node that does not answer in time is only logged.
    """
    own_node = ray.get_runtime_context().get_node_id()
    # Without CPUs, so that it starts on a full node.
    task = ray.remote(num_cpus=0, max_retries=0)(lambda probe: probe.try_from(socket.gethostname()))
    references = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(probe)
        for node in cluster_nodes()
        if node.id != own_node
        and all(node.total.get(name, 0) >= amount for name, amount in resources_per_worker.items())
    ]
    deadline = time.monotonic() + _PROBE_SECONDS
    for reference in references:
        try:
            ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            logger.warning("A node did not test the storage: %s", error)
            ray.cancel(reference, force=True)
