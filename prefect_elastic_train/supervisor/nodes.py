"""Ray's nodes as this package starts them on one machine: they boot on a busy one, and fork their workers.

Uses ``ray._private.services`` and ``ray._raylet.persist_port``, since no option names another program for workers, nor
how long a node waits for its agents.
"""

from __future__ import annotations

import inspect
import os
import random
import socket
from contextlib import suppress
from typing import Any

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.supervisor import forked_worker

#: Free of those that Ray gives its workers, below, and that the kernel gives out by itself, above.
_PORTS = range(20_000, 32_768)
_PORT_PROBES = 100
#: How long a node waits for its agents and workers to boot, for which those may wait for the fork server; Ray's own are
#: 30 and 60 s.
_REGISTRATION = {"RAY_agent_register_timeout_ms": "120000", "RAY_worker_register_timeout_seconds": "120"}
_AGENTS_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def change_nodes() -> None:
    """Have the nodes that this process starts know their agents' ports, and fork their workers if there is a server.

    A raylet waits for 15 s, whatever is set, until its agents have written down where they listen, and then dies. They
    are Python processes, which take longer to boot on a busy machine. Until they have, only runtime environments wait.
    """
    from ray._private import services
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    start_raylet = services.start_raylet
    os.environ.update(_REGISTRATION)

    def start_raylet_otherwise(*arguments: Any, **more: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*arguments, **more).arguments
        ports = set[int]()
        while len(ports) < len(_AGENTS_PORTS):
            ports.add(free_port())
        for name, port in zip(_AGENTS_PORTS, ports, strict=True):
            given[name] = given.get(name) or port
            persist_port(given["session_dir"], given["node_id"], name, given[name])
        if FORK_SERVER_VARIABLE in os.environ:
            os.environ[forked_worker.WORKER_VARIABLE] = given["worker_path"]
            given["worker_path"] = forked_worker.__file__
        return start_raylet(**given)

    services.start_raylet = start_raylet_otherwise


def free_port() -> int:
    """Return a free port that nobody is given by the kernel before Ray's process listens there."""
    # That takes seconds, and one port of a node in other hands ends all of it.
    for port in random.sample(_PORTS, k=_PORT_PROBES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free on this machine")
