"""Patches how Ray starts the raylet of a node: it starts on a busy machine, and its workers are forked.

Uses ``ray._private.services`` and ``ray._raylet.persist_port``, since no option sets another program for workers, or
how long a node waits for its agents.
"""

import inspect
import os
import random
import socket
from contextlib import suppress
from typing import Any

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.supervisor import forked_worker

#: Below these are the ports that Ray gives its workers, above them those that the kernel assigns.
_PORTS = range(20_000, 32_768)
_PORT_PROBES = 100
#: Time that a node waits for its agents and workers to start. They may wait for the fork server. Ray's defaults: 30 and
#: 60 s.
_REGISTRATION = {"RAY_agent_register_timeout_ms": "120000", "RAY_worker_register_timeout_seconds": "120"}
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def patch_raylet_start() -> None:
    """Patch Ray in this process: a raylet gets fixed ports for its agents, and a fork server, if any, forks workers.

    A raylet exits if its agents have not written their ports within 15 s, which no option changes. The agents are
    Python processes, which take longer to start on a busy machine. With the ports written before, only runtime
    environments wait for the agents.
    """
    from ray._private import services
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    start_raylet = services.start_raylet
    os.environ.update(_REGISTRATION)

    def start_patched_raylet(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(start_raylet).bind(*args, **kwargs).arguments
        ports = set[int]()
        while len(ports) < len(_AGENT_PORTS):
            ports.add(free_port())
        for name, port in zip(_AGENT_PORTS, ports, strict=True):
            arguments[name] = arguments.get(name) or port
            persist_port(arguments["session_dir"], arguments["node_id"], name, arguments[name])
        if FORK_SERVER_VARIABLE in os.environ:
            os.environ[forked_worker.WORKER_VARIABLE] = arguments["worker_path"]
            arguments["worker_path"] = forked_worker.__file__
        return start_raylet(**arguments)

    services.start_raylet = start_patched_raylet


def free_port() -> int:
    """Return a free port for a Ray process that is started later, outside of the kernel's range for automatic ports.

    Ray takes seconds to listen on its ports, and a node cannot start if another process has taken one of them by then.
    """
    for port in random.sample(_PORTS, k=_PORT_PROBES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free on this machine")
