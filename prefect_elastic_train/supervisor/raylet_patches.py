"""Patches of Ray's start of a raylet, so that it starts on a busy machine, and its workers are forked.

Uses ``ray._private.node`` and ``ray._raylet.persist_port``, since no option sets another program for workers, or
how long a node waits for its agents.
"""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE

from . import forked_worker

#: Below these are the ports that Ray gives its workers, above them those that the kernel assigns.
_PORTS = range(20_000, 32_768)
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def patch_raylet_start() -> None:
    """Patch Ray in this process: a raylet gets fixed ports for its agents, and a fork server, if any, forks workers.

    A raylet exits if its agents have not written their ports within 15 s, which no option changes. The agents are
    Python processes, which take longer to start on a busy machine. With the ports written before, only runtime
    environments wait for the agents.
    """
    from ray._private.node import Node
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    start_raylet = Node.start_raylet
    # Time that a node waits for its agents and workers to start. They may wait for the fork server. Ray's defaults: 30
    # and 60 s.
    os.environ.update(RAY_agent_register_timeout_ms="120000", RAY_worker_register_timeout_seconds="120")

    def start_patched_raylet(node: Any, *arguments: Any) -> None:
        parameters = vars(node._ray_params)
        for name, port in zip(_AGENT_PORTS, unused_ports(), strict=False):
            parameters[name] = port
            persist_port(node._session_dir, node._node_id, name, port)
        if FORK_SERVER_VARIABLE in os.environ:
            os.environ[forked_worker.WORKER_VARIABLE] = parameters["worker_path"]
            parameters["worker_path"] = forked_worker.__file__
        start_raylet(node, *arguments)

    Node.start_raylet = start_patched_raylet


def unused_ports() -> Iterator[int]:
    """Yield free ports for Ray processes that are started later, outside of the kernel's range for automatic ports.

    Ray takes seconds to listen on its ports, and a node cannot start if another process has taken one of them by then.
    """
    for port in random.sample(_PORTS, k=len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            yield port
