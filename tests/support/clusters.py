"""A Ray cluster on this machine whose nodes come and go, in a process of its own.

As a script: answers requests on its standard input, a JSON line each, until that closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from prefect_elastic_train.core.spec import MARK_VARIABLE
from tests.support.processes import ROOT, of_cluster

TPU_TOPOLOGY = "2x4"
TPU_TYPE = "TPU-V6E"


class ElasticCluster:
    """A head without resources for workers, and nodes that are added, drained and removed."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._mark = secrets.token_hex(8)
        self._folder = tempfile.mkdtemp(prefix="elastic-", dir="/tmp")
        self._holders: list[subprocess.Popen[bytes]] = []
        self._nodes: set[str] = set()
        environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", MARK_VARIABLE)}
        self._environment = {
            **environment,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_TMPDIR": self._folder,
            "PYTHONPATH": str(ROOT),
            "TEST_CLUSTER_MARK": self._mark,
            "JAX_PLATFORMS": "cpu",
            # A killed node is noticed in two seconds.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
        }
        self._log = Path(self._folder, "cluster.log").open("wb")  # noqa: SIM115 - open as long as the cluster
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.clusters"],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.address: str = self._ask("start")["address"]

    @property
    def block(self) -> dict[str, str]:
        """The fields of the `RayCluster` that joins it."""
        return {"address": self.address, "auth_token": self.token}

    def add(self, **node: Any) -> str:
        """Add a node, with the arguments of `Cluster.add_node`, and give its id."""
        node_id = str(self._ask("add", node=node)["node_id"])
        self._nodes.add(node_id)
        return node_id

    def add_gpus(self, gpus: int) -> str:
        """Add a node with so many pretended GPUs."""
        return self.add(num_cpus=gpus, num_gpus=gpus)

    def add_host(self, slice_name: str, number: int) -> str:
        """Add one of the two hosts of a pretended v6e 2x4 slice."""
        head = {"TPU-v6e-8-head": 1} if number == 0 else {}
        return self.add(
            num_cpus=4,
            resources={"TPU": 4, f"accelerator_type:{TPU_TYPE}": 1, **head},
            labels={
                "ray.io/tpu-slice-name": slice_name,
                "ray.io/tpu-worker-id": str(number),
                "ray.io/tpu-pod-type": "v6e-8",
            },
            env_vars={
                "TPU_NAME": slice_name,
                "TPU_WORKER_ID": str(number),
                "TPU_ACCELERATOR_TYPE": "v6e-8",
                "TPU_TOPOLOGY": TPU_TOPOLOGY,
            },
        )

    def remove(self, *node_ids: str) -> None:
        """Kill nodes, as lost machines."""
        for node_id in node_ids:
            self._ask("remove", node_id=node_id)
            self._nodes.remove(node_id)

    def clear(self) -> None:
        """Remove all nodes and other jobs."""
        for holder in self._holders:
            holder.kill()
            holder.wait(10)
        self._holders.clear()
        self.remove(*self._nodes)

    def drain(self, node_id: str, seconds: float) -> None:
        """Give notice that a node goes in so many seconds. Nobody takes it away: that is `remove`."""
        self._ask("drain", node_id=node_id, seconds=seconds)

    def hold(self, resources: dict[str, float], labels: dict[str, str]) -> subprocess.Popen[bytes]:
        """Occupy resources as another job; kill it to give them back."""
        code = (
            "import json, sys, ray\n"
            "address, resources, labels = json.loads(sys.argv[1])\n"
            "ray.init(address=address, log_to_driver=False)\n"
            "class Holder:\n    def ready(self): return True\n"
            "holder = ray.remote(num_cpus=0, resources=resources, label_selector=labels)(Holder).remote()\n"
            "ray.get(holder.ready.remote(), timeout=60)\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([self.address, resources, labels])],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        for line in holder.stdout:
            if line.strip() == b"held":
                return holder
        raise AssertionError(f"the other job did not start: {self.log}")

    @property
    def log(self) -> str:
        """What the cluster's process printed."""
        return Path(self._folder, "cluster.log").read_text(errors="replace")[-4000:]

    def processes(self) -> list[psutil.Process]:
        """Give all processes of the cluster, workers included."""
        return of_cluster(f"TEST_CLUSTER_MARK={self._mark}", Path(self._folder))

    def close(self) -> None:
        """End the cluster."""
        import shutil

        for holder in self._holders:
            holder.kill()
            holder.wait(10)
        self._process.kill()
        self._process.wait(10)
        for _ in range(20):
            left = self.processes()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(b"@answer "):
                answer: dict[str, Any] = json.loads(line.removeprefix(b"@answer "))
                return answer
        raise AssertionError(f"the cluster ended: {self.log}")


def serve() -> None:
    """Start a head, and do what the lines of the standard input say."""
    from ray._raylet import GcsClient
    from ray.cluster_utils import Cluster
    from ray.core.generated import autoscaler_pb2

    cluster: Any = None
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "start":
            cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 0, "include_dashboard": False},
            )
            answer["address"] = cluster.address
        elif request["do"] == "add":
            node = cluster.add_node(**request["node"])
            nodes[node.node_id] = node
            answer["node_id"] = node.node_id
        elif request["do"] == "remove":
            cluster.remove_node(nodes.pop(request["node_id"]), allow_graceful=False)
        elif request["do"] == "drain":
            accepted, why = GcsClient(address=cluster.address).drain_node(
                request["node_id"],
                autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
                "the market wants it back",
                int((time.time() + request["seconds"]) * 1000),
            )
            assert accepted, why
        print("@answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
