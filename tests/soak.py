"""Random faults on random trainings, for as long as asked: ``python -m tests.soak --minutes 30 --seed 1``.

An episode is a training with a session, and several faults of a seeded schedule, which do not wait for each other.
In the end a checker that shares no code with the package tells what came of it: by the loop's own ledger, its weights,
the commits in the run directory, and the processes that are left. Each episode is a line of JSON; ``--only SEED`` plays
one again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from prefect_elastic_train.rehearsal.schedule import DRAIN, DRIVER, GROWTH, NODE, STORAGE, WORKER, PlannedFault
from tests.support.buckets import BUCKET, Bucket
from tests.support.clusters import ElasticCluster
from tests.support.ledgers import check_ledger, lost_commits
from tests.support.processes import FlowProcess, prefect_server, read_ledger, titled, wait_for
from tests.support.s3 import FaultProxy, MotoServer
from tests.support.schedules import poisson
from tests.support.session_loops import jax_loop, same_weights, torch_loop

STEPS, SLOW_SECONDS, MEAN_SECONDS = 1200, 0.1, 3.0
OUTAGE, FLOW, API, DISK = "outage", "flow", "api", "disk"
#: Processes by what their titles hold.
TITLES = {
    "controller": "TrainController",
    "head": "gcs_server",
    "raylet": "raylet/raylet",
    "standby": "ray::RayTrainWorker",
    "keeper": "ray::Keeper",
}
FROZEN = "frozen "
PROCESSES = (WORKER, DRIVER, FLOW, "guard", *TITLES)
KINDS = {
    "local": (*PROCESSES, *(FROZEN + one for one in PROCESSES), API, DISK),
    "nodes": (WORKER, DRIVER, FLOW, "guard", "standby", "keeper", FROZEN + WORKER, NODE, DRAIN, GROWTH, GROWTH),
    "bucket": (WORKER, DRIVER, FLOW, STORAGE, STORAGE, OUTAGE),
}
#: Calls between Ray's processes of which some are lost, by Ray's own means.
RPC_FAILURES = {
    f"{service}.grpc_client.{call}": {"num_failures": 1, "req_failure_prob": percent, "resp_failure_prob": percent}
    for service, call, percent in (
        ("CoreWorkerService", "PushTask", 1),
        ("NodeManagerService", "RequestWorkerLease", 20),
        ("ray::rpc::InternalKVGcsService", "InternalKVGet", 20),
        ("ray::rpc::ActorInfoGcsService", "CreateActor", 20),
    )
}


class Episode:
    """One training and what is done to it."""

    def __init__(
        self, seed: int, folder: Path, url: str, proxy: FaultProxy, moto: MotoServer, stack: ExitStack, loop: str = ""
    ) -> None:
        self._chance = chance = random.Random(seed)
        self.seed, self._folder, self._url, self._api, self._stack = seed, folder, url, proxy, stack
        self.arena = chance.choice([*KINDS])
        self.faults = [*islice(poisson(KINDS[self.arena], seed, MEAN_SECONDS), chance.randint(10, 16))]
        self.played: list[str] = []
        loops = {"torch": torch_loop, "shards": torch_loop, "jax": jax_loop}
        kind = loop or chance.choice(["torch", "torch", "shards", "jax"])
        self._loop: Callable[[dict[str, Any]], None] = loops[kind]
        self._ledger, self._weights, self._slow = (folder / one for one in ("ledger.jsonl", "weights.npz", "slow"))
        self._slow.touch()
        # JAX wants as many rows of each process, of which there may be four.
        length, batch = (
            chance.choice([97, 200, 333]),
            chance.choice([8, 20, 33] if self._loop is torch_loop else [12, 24]),
        )
        of_epoch = length // batch if self._loop is jax_loop else math.ceil(length / batch)
        every = chance.choice([3, 7, 20, 40, "0.7s", "auto"])
        self.config = {
            "length": length,
            "global_batch": batch,
            "save_every": every,
            "steps": of_epoch * (STEPS // of_epoch),
            "micro_batch": chance.choice([0, 3]) if self._loop is torch_loop else 0,
            "recovery_points": chance.choice([1, 1, 5, "auto"]),
        }
        if kind == "shards":  # with dropout, since nothing may depend on the number of workers
            self.config |= {"shards": 8, "micro_batch": 0, "dropout": 0.1}
        # One save is uploaded while the next steps are done. Where saves come often the report of the one before may
        # still wait for the controller, which looks each 0.1 s; a bucket in trouble keeps that with the commit of a
        # third one.
        intervals = 2 + (every in (3, 7)) + (self.arena == "bucket")
        self._most_redone = intervals * every + 2 if isinstance(every, int) else STEPS
        self._cluster: ElasticCluster | None = None
        self._bucket: Bucket | None = None
        files = {"ledger": str(self._ledger), "weights": str(self._weights), "slow": str(self._slow)}
        scaling: dict[str, Any] = {"min_workers": 1, "max_workers": 2, "standby": chance.choice(["on", "auto", "off"])}
        often = {"resize_check_interval_seconds": 1, "stability_delay_seconds": 1}
        self._arguments: dict[str, Any] = {
            "loop": f"tests.support.session_loops:{self._loop.__name__}",
            "framework": self._loop.__name__.partition("_")[0],
            "config": {**self.config, **files, "sleep": SLOW_SECONDS},
            "failures": {
                "max_failures": -1,
                **dict.fromkeys(("driver_restarts", "max_attempts_without_progress"), 100),
                "driver_restart_delay_seconds": 0.2,
                "stall_timeout_seconds": 20,
                "node_strikes": 0,  # all nodes are killed again and again
            },
            "environment": {"PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": 20},
            "scaling": {**scaling, **often},
        }
        if self.arena == "nodes":
            self._cluster = ElasticCluster()
            stack.callback(self._cluster.close)
            self._nodes = [self._cluster.add_gpu(), self._cluster.add_gpu()]
            more = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "max_workers": 4}
            self._arguments["scaling"] |= more
            self._arguments |= {"cluster": self._cluster.block}
            if self._loop is torch_loop:
                self._arguments["torch_backend"] = "gloo"  # the GPUs are pretended ones
        elif self.arena == "bucket":
            storage = stack.enter_context(FaultProxy(moto.endpoint_url))
            self._bucket = Bucket(moto, storage, f"runs-{seed}")
            self._arguments["storage"] = self._bucket.block
        if self.arena != "nodes" and chance.random() < 0.15:
            self.arena += "+rpc"
            self._arguments["environment"]["RAY_testing_rpc_failure"] = json.dumps(RPC_FAILURES)
        self._disk = folder / "disk"
        self._disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self._disk)]
        self._can_fill = (
            self.arena.startswith("local") and not subprocess.run(mount, stderr=subprocess.DEVNULL).returncode
        )
        if self._can_fill:
            stack.callback(subprocess.run, ["umount", "--lazy", str(self._disk)])
        self._arguments.setdefault("storage", str(self._disk / "runs"))
        self._at_once = chance.random() < 0.3
        self._was_full = False

    def run(self) -> list[str]:
        """Play all faults, and return what is wrong in the end."""
        flow = self._start()
        if not self._at_once:
            flow.wait_for(self._ledger.exists, 180, "a first step")
        for fault in self.faults:
            time.sleep(fault.wait_seconds)
            if flow.process.poll() is not None:
                break
            flow, done = self._play(flow, fault)
            if done:
                self.played.append(fault.kind)
        if "rpc" not in self.arena:  # there faults go on
            self._slow.unlink()
        with contextlib.suppress(AssertionError):
            flow.living_driver()
        if self._was_full:  # which a flow process may have met only now
            flow.wait(900)
            flow = self._after_full_disk(flow)
        flow.completed(900)  # for a lost call costs a worker group, and other trainings have the machine too
        return [*self._wrong(flow)]

    def _start(self, **again: str) -> FlowProcess:
        arguments = json.loads(json.dumps({**self._arguments, **again}))
        flow = FlowProcess(self._folder / f"flow-{time.monotonic_ns()}", self._url, **arguments)
        self._stack.callback(flow.close)
        flow.living_driver()
        return flow

    def _play(self, flow: FlowProcess, fault: PlannedFault) -> tuple[FlowProcess, bool]:
        """Do what a fault is; return the flow process that goes on, and whether there was anything to do it to."""
        kind = fault.kind
        if kind == DISK:
            return self._fill(flow)
        if kind == API:
            with self._api.outage():
                time.sleep(1 + 10 * fault.chance)
        elif kind == STORAGE:
            self._bucket.proxy.faults(rate=0.2, kinds=("503", "stall", "reset", "cut"), stall_seconds=2, seed=self.seed)
            time.sleep(1 + 10 * fault.chance)
            self._bucket.proxy.faults(None)
        elif kind == OUTAGE:
            with self._bucket.proxy.outage():
                time.sleep(1 + 12 * fault.chance)
        elif kind == FLOW:
            flow.driver()
            flow.process.kill()
            flow.process.wait(10)
            wait_for(lambda: not flow.marked(), 60, "the processes of a killed flow process to end")  # a guard may boot
            return self._start(flow_run_id=flow.flow_run_id), True
        elif kind == GROWTH:
            if len(self._nodes) >= 4:
                return flow, False
            self._nodes.append(self._cluster.add_gpu())
        elif kind in (NODE, DRAIN):
            if len(self._nodes) < 2:
                return flow, False
            node = fault.choose(self._nodes)
            self._nodes.remove(node)
            if kind == DRAIN:
                self._cluster.drain(node, 10)
                time.sleep(10 * fault.chance)
            self._cluster.remove(node)
        else:
            return flow, self._signal(flow, fault)
        return flow, True

    def _fill(self, flow: FlowProcess) -> tuple[FlowProcess, bool]:
        """Have a disk that is full for a while, which ends a training that saves; it is gone on with then."""
        if not self._can_fill:
            return flow, False
        flow.driver()
        with (self._disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**12))
        with contextlib.suppress(subprocess.TimeoutExpired):
            flow.process.wait(20)
        (self._disk / "filler").unlink()
        self._was_full = True
        return self._after_full_disk(flow), True

    def _after_full_disk(self, flow: FlowProcess) -> FlowProcess:
        """Start a flow process again that a full disk has ended."""
        if flow.process.poll() is None or json.loads(flow.result_file.read_text())["state"] == "COMPLETED":
            return flow
        ended = json.loads(flow.result_file.read_text())
        assert ended["outcome"] == "storage_error", f"a full disk is told as {ended}"
        assert flow.marked() == [], "the processes of a training that a full disk has ended"
        return self._start(flow_run_id=flow.flow_run_id)

    def _signal(self, flow: FlowProcess, fault: PlannedFault) -> bool:
        victim = self._victim(flow, fault)
        if victim is None:
            return False
        try:
            if fault.kind.startswith(FROZEN):
                victim.suspend()
                time.sleep(1 + 24 * fault.chance**2)
                victim.resume()
            else:
                victim.kill()
        except psutil.Error:
            return False
        return True

    def _victim(self, flow: FlowProcess, fault: PlannedFault) -> psutil.Process | None:
        kind, driver = fault.kind.removeprefix(FROZEN), flow.driver()
        if kind in (DRIVER, FLOW, "guard"):
            return {DRIVER: driver, FLOW: psutil.Process(flow.pid)}.get(kind) or flow.guard()
        lines = read_ledger(self._ledger)
        of_group = {line["rank"]: line["pid"] for line in lines if lines and line["group"] == lines[-1]["group"]}
        if kind == WORKER:
            alive = [pid for pid in of_group.values() if psutil.pid_exists(pid)]
            return psutil.Process(fault.choose(alive)) if alive else None
        there = self._cluster.processes() if self._cluster is not None else flow.marked() if driver else []
        # A local cluster has none, and forks its workers.
        title = "fork_server" if kind == "standby" and self._cluster is None else TITLES[kind]
        found = [one for one in titled(there, title) if kind != "standby" or one.pid not in of_group.values()]
        return fault.choose(found) if found else None

    def _wrong(self, flow: FlowProcess) -> Iterator[str]:
        length = self.config["length"]
        if self._loop is jax_loop:  # which leaves out what does not fill a batch
            length = self.config["global_batch"] * (length // self.config["global_batch"])
        lines = read_ledger(self._ledger)
        yield from check_ledger(lines, self.config["steps"], length, self._most_redone).problems
        # The arguments are the test's own, which has no block saved.
        written = [file for file in self._folder.rglob("*") if file.is_file() and file.name != "arguments.json"]
        contents = {str(file): file.read_bytes() for file in written}
        if self._bucket is not None:
            contents |= {key: self._bucket.read(key) for key in self._bucket.all_keys()}
        histories = [data for name, data in contents.items() if "/.elastic_train/events/" in name]
        events = [json.loads(line) for data in histories for line in data.splitlines(True) if line.endswith(b"\n")]
        commits = [(one["at"], one["metrics"]["step"]) for one in events if one["kind"] == "checkpoint_committed"]
        yield from lost_commits(lines, commits) if commits else ["no commit is on record"]
        undisturbed = self._weights.with_name("undisturbed.npz")
        self._loop({**self.config, "weights": str(undisturbed)})
        if not same_weights(self._weights, undisturbed, relative=0.0 if "shards" in self.config else 1e-5):
            yield "the weights are not the undisturbed training's"

        def left() -> list[psutil.Process]:
            there = self._cluster.processes() if self._cluster is not None else []
            titles = ("RayTrainWorker", "TrainController", "ray::Keeper")
            return [*flow.marked(), *(process for title in titles for process in titled(there, title))]

        with contextlib.suppress(AssertionError):
            wait_for(lambda: not left(), 15)
        yield from (f"left: {one.cmdline()[:3]}" for one in left())
        secrets = [self._bucket.block["secret_access_key"]] if self._bucket else []
        secrets += [self._cluster.token] if self._cluster else []
        for secret in secrets:
            yield from (f"a secret is in {name}" for name, data in contents.items() if secret.encode() in data)


def play(seed: int, url: str, api: FaultProxy, moto: MotoServer, loop: str = "") -> dict[str, Any]:
    """Play an episode; return what it was and what was wrong."""
    began, line = time.monotonic(), dict[str, Any](seed=seed, faults=[])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"soak-{seed}-")))
        try:
            episode = Episode(seed, folder, url, api, moto, stack, loop)
            line |= {"arena": episode.arena, "loop": episode._loop.__name__, **episode.config, "faults": episode.played}
            line["problems"] = episode.run()
        except Exception as error:  # of this script too: it is told, and others follow
            line["problems"] = [f"{type(error).__name__}: {error}"]
        if line["problems"]:  # what is there to read, and how to see it again
            line["kept"] = shutil.copytree(folder, tempfile.mkdtemp(prefix=f"failed-soak-{seed}-"), dirs_exist_ok=True)
            line["again"] = f"python -m tests.soak --only {seed}{loop and f' --loop {loop}'}"
    return line | {"seconds": round(time.monotonic() - began)}


def main() -> int:
    """Play episodes until the time is up; 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="for so long (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the first episode; others count on (default: 1)")
    parser.add_argument("--only", type=int, help="play the episode of this seed and no other")
    parser.add_argument("--loop", choices=["torch", "shards", "jax"], default="", help="in all episodes")
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="end after so many")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what was started is ended
    until, seed, wrong, played = time.monotonic() + 60 * arguments.minutes, arguments.seed, 0, Counter[str]()
    with ExitStack() as stack:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else another one beside it starves its workers
        os.environ["PREFECT_HOME"] = home = stack.enter_context(tempfile.TemporaryDirectory(prefix="t-"))
        upstream = stack.enter_context(prefect_server(Path(home)))
        api = stack.enter_context(FaultProxy(upstream.removesuffix("/api")))
        moto = stack.enter_context(MotoServer())
        moto.create_bucket(BUCKET)
        while time.monotonic() < until and played.total() < arguments.faults:
            played_seed = seed if arguments.only is None else arguments.only
            print(f"# seed {played_seed}", flush=True)
            line = play(played_seed, f"{api.endpoint_url}/api", api, moto, arguments.loop)
            print(json.dumps(line), flush=True)
            played.update(line["faults"])
            wrong += bool(line["problems"])
            seed += 1
            if arguments.only is not None:
                break
    print(f"{played.total()} faults in {seed - arguments.seed} trainings, {wrong} went wrong: {dict(played)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
