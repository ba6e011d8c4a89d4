"""A Ray cluster on this machine whose nodes are added, drained and killed during a training.

As a script, this module owns the cluster. It reads requests from its standard input, one JSON object a line, until the
input is closed. If its environment names a fork server, each node gets one for the framework in the argument.

Uses ``ray.cluster_utils.Cluster``, with which Ray tests itself, and ``ray._raylet.GcsClient``, since Ray has no public
function that drains a node.
"""

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.supervisor import fork_server
from prefect_elastic_train.supervisor.raylet_patches import patch_raylet_start

COMMAND = (sys.executable, "-m", "prefect_elastic_train.rehearsal.node_cluster")
_REQUEST_TIMEOUT_SECONDS = 120.0


class NodeClusterError(ElasticTrainError):
    """The process that owns a rehearsal's Ray cluster has exited, or did not carry out a request in time."""


class NodeCluster:
    """Client of the process that owns a Ray cluster on this machine and runs :data:`COMMAND`.

    The caller starts and stops that process.

    Attributes:
        address: ``host:port`` of the head, whose node has ``head_cpus`` CPUs and no other resources.
        ids: Ray's ids of the other nodes, without those removed.
    """

    def __init__(self, process: subprocess.Popen[bytes], head_cpus: int = 0) -> None:
        self._process = process
        self.address: str = self._request("start", cpus=head_cpus)
        self.ids: list[str] = []

    def add(self, **node: Any) -> str:
        """Start a node of the Ray cluster, with the arguments of Ray's ``Cluster.add_node``.

        Return Ray's id of the node once it has joined the cluster.
        """
        node_id: str = self._request("add", **node)
        self.ids.append(node_id)
        return node_id

    def remove(self, *node_ids: str) -> None:
        """Kill nodes of the Ray cluster, by their ids, without a drain."""
        for node_id in node_ids:
            self._request("remove", node_id=node_id)
            self.ids.remove(node_id)

    def drain(self, node_id: str, seconds: float) -> None:
        """Drain a node: announce to the Ray cluster that the node will be preempted in ``seconds``.

        The caller has to kill the node with :meth:`remove`.
        """
        self._request("drain", node_id=node_id, seconds=seconds)

    def _request(self, method: str, **arguments: Any) -> Any:
        """Have the process that owns the Ray cluster call a method of :class:`_Server`, and return its result.

        Raise NodeClusterError if the process exits or does not respond in time.
        """
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin
        assert stdout
        try:
            stdin.write(json.dumps({"method": method, **arguments}).encode() + b"\n")
            stdin.flush()
            if select.select([stdout], [], [], _REQUEST_TIMEOUT_SECONDS)[0]:
                return json.loads(stdout.readline())  # a ValueError at the end of the output
        except (BrokenPipeError, ValueError) as error:
            raise NodeClusterError(f"the Ray cluster exited during the request {method!r}") from error
        raise NodeClusterError(f"the Ray cluster did not answer {method!r} within {_REQUEST_TIMEOUT_SECONDS:g} s")


class _Server:
    """Owner of the rehearsal's Ray cluster, in the process that :class:`NodeCluster` sends its requests to.

    Each public method carries out a request and returns its result.
    """

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._socket = os.environ.get(FORK_SERVER_VARIABLE, "")
        self._cluster: Any = None
        #: Ray's node and its fork server, if it has one, by the node's id.
        self._nodes: dict[str, tuple[Any, subprocess.Popen[bytes] | None]] = {}
        self._started_nodes = 0

    def start(self, cpus: int) -> str:
        from ray.cluster_utils import Cluster

        self._start_fork_server()
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
        return str(self._cluster.address)

    def add(self, **node: Any) -> str:
        server = self._start_fork_server()
        ray_node = self._cluster.add_node(**node)
        self._nodes[ray_node.node_id] = (ray_node, server)
        return str(ray_node.node_id)

    def remove(self, node_id: str) -> None:
        node, server = self._nodes.pop(node_id)
        self._cluster.remove_node(node, allow_graceful=False)
        if server is not None:
            server.kill()
            server.wait()

    def drain(self, node_id: str, seconds: float) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + seconds) * 1000)
        client = GcsClient(address=self._cluster.address)
        client.drain_node(node_id, reason, "preempted by a rehearsal", deadline_ms)  # always accepted for this reason

    def _start_fork_server(self) -> subprocess.Popen[bytes] | None:
        """Start the fork server of the node that is started next. Return None if nodes have no fork servers."""
        if not self._socket:
            return None
        self._started_nodes += 1
        os.environ[FORK_SERVER_VARIABLE] = f"{self._socket}{self._started_nodes}"
        command = [sys.executable, "-m", fork_server.__name__, self._framework, "1"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def serve(framework: str = "none") -> None:
    """Run a rehearsal's Ray cluster: carry out requests until the input ends, and print each result in one line.

    A request is a line of standard input: a JSON object with the name of a method of :class:`_Server` and its
    arguments.

    Args:
        framework: Framework that the fork servers import.
    """
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to standard output, too
    patch_raylet_start()
    server = _Server(framework)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(server, request.pop("method"))(**request)), file=results, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
