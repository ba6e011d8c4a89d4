"""A Ray cluster on this machine whose nodes come and go.

As a script: answers requests on its standard input, a JSON line each, until that closes. Where its environment names a
fork server, each node's workers are forked from one of its own, for the framework that is the argument.

Uses ``ray.cluster_utils.Cluster``, with which Ray tests itself, and ``ray._raylet.GcsClient``, since no public name
drains a node.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.supervisor import fork_server
from prefect_elastic_train.supervisor.nodes import change_nodes

COMMAND = (sys.executable, "-m", "prefect_elastic_train.rehearsal.nodes")
_ANSWER, _ANSWER_SECONDS = b"@answer ", 120.0


class NodesFailedError(ElasticTrainError):
    """The cluster ended, or did not answer in time."""


class Nodes:
    """Speaks by pipes with a process that was started with :data:`COMMAND`; who starts that ends what is of it.

    Attributes:
        address: ``host:port`` of the head, which has only so many CPUs.
        ids: The nodes that are there.
    """

    def __init__(self, process: subprocess.Popen[bytes], head_cpus: int = 0) -> None:
        self._process, self.ids = process, list[str]()
        self.address: str = self._ask("start", cpus=head_cpus)

    def add(self, **node: Any) -> str:
        """Add a node, with the arguments of ``Cluster.add_node``, and return its id once the cluster knows it."""
        self.ids.append(self._ask("add", node=node))
        return self.ids[-1]

    def remove(self, *node_ids: str) -> None:
        """Kill nodes, as lost machines."""
        for node_id in node_ids:
            self._ask("remove", node_id=node_id)
            self.ids.remove(node_id)

    def drain(self, node_id: str, seconds: float) -> None:
        """Announce that a node goes in so many seconds. Nobody takes it away: that is :meth:`remove`."""
        self._ask("drain", node_id=node_id, seconds=seconds)

    def _ask(self, what: str, **arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            stdin.flush()
            while select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                line = stdout.readline() or _ANSWER  # the end is no JSON
                if line.startswith(_ANSWER):
                    return json.loads(line.removeprefix(_ANSWER))
        except (BrokenPipeError, ValueError) as error:
            raise NodesFailedError(f"the cluster ended before it could {what}") from error
        raise NodesFailedError(f"the cluster did not {what} within {_ANSWER_SECONDS:g} s")


def serve(requests: Iterable[str], framework: str = "none") -> None:
    """Start a head, and do what the lines say."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.cluster_utils import Cluster
    from ray.core.generated import autoscaler_pb2

    cluster: Any = None
    server: subprocess.Popen[bytes] | None = None
    nodes: dict[str, tuple[Any, subprocess.Popen[bytes] | None]] = {}
    path = os.environ.get(FORK_SERVER_VARIABLE, "")
    change_nodes()
    for number, line in enumerate(requests):
        request = json.loads(line)
        what, answer = request["do"], None
        if path and what in ("start", "add"):
            os.environ[FORK_SERVER_VARIABLE] = f"{path}{number}"
            command = [sys.executable, "-m", fork_server.__name__, framework, "1"]
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if what == "start":
            head = {"num_cpus": request["cpus"], "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            answer = cluster.address
        elif what == "add":
            node = cluster.add_node(**request["node"])
            nodes[node.node_id], answer = (node, server), node.node_id
        elif what == "remove":
            node, server = nodes.pop(request["node_id"])
            cluster.remove_node(node, allow_graceful=False)
            if server is not None:
                server.kill()
                server.wait()
        elif what == "drain":
            reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
            deadline_ms = int((time.time() + request["seconds"]) * 1000)
            client = GcsClient(address=cluster.address)
            accepted, why = client.drain_node(request["node_id"], reason, "the market wants it back", deadline_ms)
            if not accepted:
                raise RuntimeError(f"the node cannot be drained: {why}")
        sys.stdout.buffer.write(_ANSWER + json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(sys.stdin, *sys.argv[1:])
