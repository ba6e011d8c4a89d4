"""A Ray cluster on this machine that gets and loses nodes while a side trains on it.

As a script: answers requests on its standard input, a JSON line each, until that closes.
"""

from __future__ import annotations

import json
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_TIMEOUT_SECONDS = 120.0
ANSWER = b"@answer "
START, ADD, DRAIN, KILL = "start", "add", "drain", "kill"
DRAIN_SECONDS = 30
"""From the announcement that a node goes until it does."""


class ClusterFailedError(RuntimeError):
    """The cluster ended, or did not answer in time."""


class GrowingCluster:
    """A head without resources for workers, and nodes with one CPU each, in a process of its own.

    Whoever makes it ends the process and all that is below it.

    Args:
        directory: Where Ray keeps its session directory and the process its log; it exists.
        environment: The environment of all processes of the cluster, without the token.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """What a process has to have in its environment to join."""
        self._log = directory / "cluster.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cluster"],
                env={**environment, **self.environment, "RAY_TMPDIR": str(directory)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                start_new_session=True,
            )
        self.address: str = self._ask(START)

    def add_node(self) -> float:
        """Add a node for one worker and wait until the cluster knows it.

        Returns:
            When that was, in seconds since the epoch.

        Raises:
            ClusterFailedError: The cluster ended, or the node did not come.
        """
        return float(self._ask(ADD))

    def take_node(self, how: str) -> float:
        """Take the newest node back: announce that it goes (`DRAIN`), or end it without a word (`KILL`).

        Returns:
            When that was, in seconds since the epoch.
        """
        return float(self._ask(how))

    def _ask(self, request: str, timeout: float = START_TIMEOUT_SECONDS) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            raise self._failed(f"ended before it could {request}") from error
        while select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = self._process.stdout.readline()
            if not line:
                raise self._failed(f"ended instead of an answer to {request}")
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise self._failed(f"did not answer to {request} within {timeout:.0f} s")

    def _failed(self, what: str) -> ClusterFailedError:
        return ClusterFailedError(f"The cluster {what}; it wrote:\n{self._log.read_text(errors='replace')[-4000:]}")


def drain(address: str, node_id: str) -> None:
    """Announce that a node goes."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + DRAIN_SECONDS) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node_id, reason, "the market wants it back", deadline_ms)
    if not accepted:
        raise RuntimeError(f"the node cannot be drained: {why}")


def serve() -> None:
    """Start a head, and do what the lines of the standard input say."""
    from ray.cluster_utils import Cluster

    cluster: Any = None
    newest: Any = None
    for line in sys.stdin:
        answer: Any = None
        request = json.loads(line)
        if request == START:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
            answer = cluster.address
        elif request == ADD:
            newest = cluster.add_node(num_cpus=1)
            answer = time.time()
        elif request == KILL:
            answer = time.time()
            cluster.remove_node(newest, allow_graceful=False)
        else:
            answer = time.time()
            drain(cluster.address, newest.node_id)
        sys.stdout.buffer.write(ANSWER + json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
