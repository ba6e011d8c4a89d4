"""Ray clusters on this machine: one as an operator starts it, and one whose nodes come and go."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, MARK_VARIABLE
from prefect_elastic_train.rehearsal.node_cluster import COMMAND, NodeCluster
from tests.support.processes import ROOT, call, carrying, free_port, kill_all, spawn, titled

TPU_TOPOLOGY, TPU_TYPE = "2x4", "TPU-V6E"
#: Carried by the processes of a cluster.
CLUSTER_VARIABLE = "TEST_CLUSTER_MARK"
#: The command `ray`, for a machine that other tests keep busy.
_PATIENT_RAY = (
    "import sys; from ray.scripts import scripts; from prefect_elastic_train.supervisor import raylet_patches; "
    "raylet_patches.patch_raylet_start(); sys.exit(scripts.main())"
)


class _Cluster:
    """Folder, token and processes of a cluster."""

    def __init__(self, **variables: str) -> None:
        self.token, self.mark = secrets.token_hex(16), secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = ""
        #: What a process needs to join.
        self.joining = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", MARK_VARIABLE)}
        self.environment = {**kept, **self.joining, CLUSTER_VARIABLE: self.mark, **variables}

    @property
    def block(self) -> dict[str, str]:
        """The fields of the `RayCluster` that joins it."""
        return {"address": self.address, "auth_token": self.token}

    def processes(self) -> list[psutil.Process]:
        """All processes of the cluster, workers included."""
        return carrying(f"{CLUSTER_VARIABLE}={self.mark}", self.folder)

    def kill(self) -> None:
        """Kill everything of the cluster at once, as a lost machine does."""
        kill_all(self.processes)

    def close(self) -> None:
        """End the cluster."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class RayHead(_Cluster):
    """A cluster with a dashboard, started with `ray start --head`."""

    def __init__(self, cpus: int, **variables: str) -> None:
        # As in an activated environment.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        super().__init__(PATH=path, **variables)
        self.cpus, self._port, self._dashboard_port = cpus, free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"http://127.0.0.1:{self._dashboard_port}"
        self.start()

    def start(self) -> None:
        """Start the head; it is up when this returns."""
        options = {
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self._dashboard_port,
            "node-ip-address": "127.0.0.1",
            "port": self._port,
            "ray-client-server-port": free_port(),
            "dashboard-agent-listen-port": 0,
            "num-cpus": self.cpus,
            "temp-dir": self.folder,
            # The kernel gives workers their ports: Ray's own choice may be that of a cluster beside this one.
            "min-worker-port": 0,
            "max-worker-port": 0,
        }
        start = [sys.executable, "-c", _PATIENT_RAY, "start", "--head", "--disable-usage-stats"]
        given = [f"--{name}={value}" for name, value in options.items()]
        # From a folder where nothing of this repository is to be found by accident, and without a pipe that stays open.
        call(*start, *given, folder=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=None)

    @property
    def jobs_block(self) -> dict[str, Any]:
        """The fields of the `RayCluster` that submits to it, with the loops of the tests."""
        modules = [str(ROOT / "tests"), str(ROOT / "flows")]
        return {"address": self.url, "auth_token": self.token, "runtime_env": {"py_modules": modules}}

    def dashboard(self, method: str, path: str) -> Any:
        """Ask the dashboard."""
        token = {"Authorization": f"Bearer {self.token}"}
        answer = httpx.request(method, f"{self.url}{path}", headers=token, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def jobs(self) -> list[dict[str, Any]]:
        """The submitted jobs, the newest last."""
        found = [job for job in self.dashboard("GET", "/api/jobs/") if job["type"] == "SUBMISSION"]
        return sorted(found, key=lambda job: int(job["start_time"]))

    def states(self, what: str, but: str) -> list[dict[str, Any]]:
        """What the dashboard knows of ``actors``, ``nodes`` or ``placement_groups`` that are in another state."""
        found = self.dashboard("GET", f"/api/v0/{what}?limit=1000")["data"]["result"]["result"]
        return [one for one in found if one["state"] != but]

    def placement_groups(self) -> list[dict[str, Any]]:
        """The placement groups that are not removed."""
        return self.states("placement_groups", "REMOVED")

    def job_driver(self) -> psutil.Process | None:
        """The driver that runs as a job, if one does."""
        return next((one for one in titled(self.processes(), "elastic_train_job") if one.name() != "sh"), None)

    def train_processes(self) -> list[psutil.Process]:
        """The controllers and workers that train in the cluster."""
        living = self.processes()
        return titled(living, "TrainController") + titled(living, "RayTrainWorker")


class ElasticCluster(_Cluster):
    """A head without resources for workers, and nodes that are added, drained and removed."""

    def __init__(self, *import_path: Path) -> None:
        # A killed node is noticed in four seconds, and a busy one is not taken for dead.
        health = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "8"}
        path = os.pathsep.join(map(str, (*import_path, ROOT)))
        super().__init__(PYTHONPATH=path, JAX_PLATFORMS="cpu", **health)
        # Forked workers are there sooner than booted ones, which leaves the processors to what is tested.
        self.environment |= {"RAY_TMPDIR": str(self.folder), FORK_SERVER_VARIABLE: str(self.folder / "fork")}
        self._holders: list[subprocess.Popen[bytes]] = []
        self._process = self._start(*COMMAND, "torch")
        try:
            self._nodes = NodeCluster(self._process)
        except BaseException:  # as SystemExit at a SIGTERM: nobody has it yet, who would close it
            self.close()
            raise
        self.address = self._nodes.address
        self.add, self.drain, self.remove = self._nodes.add, self._nodes.drain, self._nodes.remove

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": self.environment}
        return spawn(*command, log=self.folder / "cluster.log", **pipes)

    def add_gpu(self) -> str:
        """Add a node with one pretended GPU."""
        return self.add(num_cpus=1, num_gpus=1)

    def add_slice(self, name: str) -> list[str]:
        """Add the two hosts of a pretended v6e 2x4 slice."""
        return [self.add_host(name, number) for number in range(2)]

    def add_host(self, slice_name: str, number: int) -> str:
        """Add one of the two hosts of a pretended v6e 2x4 slice."""
        labels = {"tpu-slice-name": slice_name, "tpu-worker-id": str(number), "tpu-pod-type": "v6e-8"}
        return self.add(
            num_cpus=4,
            resources={"TPU": 4, f"accelerator_type:{TPU_TYPE}": 1, **({} if number else {"TPU-v6e-8-head": 1})},
            labels={f"ray.io/{name}": value for name, value in labels.items()},
            env_vars={
                "TPU_NAME": slice_name,
                "TPU_WORKER_ID": str(number),
                "TPU_ACCELERATOR_TYPE": "v6e-8",
                "TPU_TOPOLOGY": TPU_TOPOLOGY,
            },
        )

    def clear(self) -> None:
        """Remove all nodes and other jobs."""
        for holder in self._holders:
            holder.kill()
            holder.wait(10)
        self._holders.clear()
        self.remove(*self._nodes.ids)

    def hold(self, resources: dict[str, float], labels: dict[str, str]) -> subprocess.Popen[bytes]:
        """Occupy resources as another job; kill it to give them back."""
        code = (
            "import json, sys, ray\n"
            "address, resources, labels = json.loads(sys.argv[1])\n"
            "ray.init(address=address, log_to_driver=False)\n"
            "class Holder:\n    def ready(self): return True\n"
            "holder = ray.remote(num_cpus=0, resources=resources, label_selector=labels)(Holder).remote()\n"
            "ray.get(holder.ready.remote(), timeout=60)\n"
            "print('ready', flush=True)\n"
            "sys.stdin.read()\n"
        )
        holder = self._start(sys.executable, "-c", code, json.dumps([self.address, resources, labels]))
        self._holders.append(holder)
        assert any(line == b"ready\n" for line in holder.stdout), (self.folder / "cluster.log").read_text()[-4000:]
        return holder

    def close(self) -> None:
        """End the cluster."""
        for process in (*self._holders, self._process):
            process.kill()
            process.wait(10)
        super().close()
