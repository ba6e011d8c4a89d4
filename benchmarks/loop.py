"""What a session costs and how well it chooses when to save: `python -m benchmarks.loop`.

`blocked`: how long a save by the session blocks a training, compared with `torch.save` and a report that waits.
`points`: how long a recovery point blocks it, compared with a plain copy of the state, and steps a second with and
without.
`restore`: seconds that a session takes to restore a recovery point after a kill, and the checkpoint files it reads.
`overhead`: steps a second with a session's batches and step, to a loop written by hand. `shards`: the time of a step
of two workers with shards, to that of DistributedDataParallel. `replays`: the time of a step with replays, to that of
one without. `replay_errors`: the errors in 10,000 steps with replays. `cadence`: the share of time that is kept with
the interval that the session chooses, to the best fixed one, simulated. `run`: the same in trainings whose worker is
killed again and again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import BUCKET, LATENCY_SECONDS, LOCAL_FOLDER, s3_settings
from benchmarks.common import base_environment, machine_lines, markdown_table, parse_arguments, ratio_target, summary
from prefect_elastic_train import loop
from tests.support.s3 import FaultProxy, MotoServer
from tests.support.shard_loops import digests

MIB = 2**20
PARTS = ("blocked", "points", "restore", "overhead", "shards", "replays", "replay_errors", "cadence", "run")
SIZES = (100 * MIB, 1024 * MIB)
SAVES = 5
POINTS, WARM_POINTS = 20, 10
#: For the step rate: seconds between recovery points, bytes of the state, and steps.
POINT_STEP_SECONDS, POINT_BYTES, POINT_STEPS = 0.3, 16 * MIB, 100
OVERHEAD_STEPS, OVERHEAD_ROUNDS = 50, 60
SHARDS, SHARD_WORKERS, SHARD_BATCH, SHARD_STEPS, SHARD_ROUNDS = 16, 2, 128, 5, 12
REPLAY_STEPS = 10_000
#: Simulated: mean time between failures and seconds that a save takes; and what a restart takes.
FAILURES, COSTS, RESTART_SECONDS = (300, 1800, 7200, 86400), (1, 5, 20, 60, 120), 30.0
SEEDS, WEEK = 4, 7 * 86400.0
#: Of the real run: mean time between kills, size of the state, length of a training, and the other intervals.
KILL_SECONDS, RUN_BYTES, RUN_SECONDS, RUN_INTERVALS = 30.0, 200 * MIB, 150.0, ("auto", "5s", "30s")


# -- in a worker


def _model(size: int) -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size // 16)) for _ in range(4))


def blocked_loop(config: dict[str, Any]) -> None:
    """Save by hand and by a session, in turn, and write how long the loop stood still each time."""
    import ray.train
    import torch

    model = _model(config["bytes"])
    found: dict[str, list[float]] = {"by hand": [], "session": []}
    with loop.session(loop.TorchState(model=model), steps=config["saves"], global_batch=1, save_every=1) as session:
        for _ in range(config["saves"]):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), Path(folder, "model.pt"))
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))
            found["by hand"].append(time.monotonic() - began)
            began = time.monotonic()
            session.step()
            found["session"].append(time.monotonic() - began)
            time.sleep(1 + 2 * found["by hand"][-1])  # uploaded by then
    Path(config["results"]).write_text(json.dumps(found))


def points_loop(config: dict[str, Any]) -> None:
    """Make a recovery point after each step. Write how long each one, and a plain copy before it, blocks the loop."""
    import numpy as np

    model = _model(config["bytes"])
    source, target = np.ones(config["bytes"], np.uint8), np.ones(config["bytes"], np.uint8)
    found: dict[str, list[float]] = {"plain copy": [], "recovery point": [], "step": []}
    plan: dict[str, Any] = {"global_batch": 1, "save_every": 10**6, "recovery_points": config["points"]}
    with loop.session(loop.TorchState(model=model), steps=10**6, **plan) as session:
        while len(found["step"]) < config["steps"] + WARM_POINTS:
            if config["copies"]:
                time.sleep(config["seconds"])  # as before a recovery point
                began = time.monotonic()
                np.copyto(target, source)
                found["plain copy"].append(time.monotonic() - began)
            began = time.monotonic()
            time.sleep(config["seconds"])
            session.step()
            if session.recovery_points.step or config["points"] == "off":
                found["recovery point"].append(session.recovery_points.seconds)
                found["step"].append(time.monotonic() - began)
        Path(config["results"]).write_text(json.dumps({name: one[-config["steps"] :] for name, one in found.items()}))


def restore_loop(config: dict[str, Any]) -> None:
    """Make recovery points and kill this worker, repeatedly. Write the time of each restore."""
    model = _model(config["bytes"])
    results = Path(config["results"])
    restored = json.loads(results.read_text()) if results.exists() else []
    plan: dict[str, Any] = {"steps": 10**6, "global_batch": 1, "save_every": 10**6}
    began = time.monotonic()
    with loop.session(loop.TorchState(model=model), **plan, recovery_points=1) as session:
        seconds = time.monotonic() - began
        begun_from = session.done
        if begun_from:
            restored.append(seconds)
        else:
            session.step(save=True)  # a checkpoint, which restores must not read
        while len(restored) < config["restores"]:
            time.sleep(0.1)
            session.step()
            if session.done >= begun_from + POINTS and session.recovery_points.step == session.done:
                results.write_text(json.dumps(restored))
                time.sleep(1.0)  # the keeper has computed the checksums by then
                while session._writing.locked():  # a restore is measured without an upload beside it
                    time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
    results.write_text(json.dumps(restored))


def overhead_loop(config: dict[str, Any]) -> None:
    """Take the same steps by hand and with a session, in turn, and write the seconds of each round."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    inputs, targets = torch.randn(4096, 256), torch.randn(4096, 1)
    hidden = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(1024, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Any, y: Any) -> Any:
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def by_hand(epoch: int) -> Iterator[None]:
        done = 0
        while True:
            order = torch.from_numpy(np.random.default_rng(epoch).permutation(len(inputs)))
            for batch in order.split(128):
                step(inputs[batch], targets[batch]).item()
                done += 1
                if done % OVERHEAD_STEPS == 0:
                    yield
            epoch += 1

    def with_session() -> Iterator[None]:
        plan = {"steps": OVERHEAD_STEPS * (OVERHEAD_ROUNDS + 2), "global_batch": 128}
        state = loop.TorchState(model=model, optimizer=optimizer)
        with loop.session(state, save_every="10000s", **plan) as session:
            for x, y in session.batches((inputs, targets)):
                session.step({"loss": step(x, y).item()})
                if session.done % OVERHEAD_STEPS == 0:
                    yield

    sides = {"by hand": by_hand(0), "session": with_session()}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(OVERHEAD_ROUNDS + 1):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            began = time.monotonic()
            next(sides[name])
            found[name].append(time.monotonic() - began)
    Path(config["results"]).write_text(json.dumps({name: rounds[1:] for name, rounds in found.items()}))


def _shard_model(kind: str) -> tuple[Any, Any]:
    """A network and its input: convolutions of images with some width, or linear layers with many weights."""
    import torch

    torch.manual_seed(0)
    if kind == "linear":
        hidden = [torch.nn.Linear(256, 2048), *(torch.nn.Linear(2048, 2048) for _ in range(4))]
        return torch.nn.Sequential(*hidden, torch.nn.Linear(2048, 10)), torch.randn(4096, 256)
    layers: list[Any] = [torch.nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(4):
        layers += [torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1)]
    width = int(kind.split()[-1])
    inputs = torch.randn(1024, 3, width, width)
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32 * width**2, 10)), inputs


def shards_loop(config: dict[str, Any]) -> None:
    """Take steps with DistributedDataParallel and with shards, in turn, and write the seconds of each round."""
    import ray.train
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    targets = torch.randint(0, 10, (4096,))

    def loss_of(model: Any, samples: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(samples), labels)

    def with_ddp(parts: int) -> Iterator[None]:
        model, inputs = _shard_model(config["model"])
        wrapped, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters())
        size = SHARD_BATCH // SHARD_WORKERS // parts
        while True:
            for _ in range(SHARD_STEPS):
                optimizer.zero_grad()
                order = torch.randperm(len(inputs))[: size * parts].split(size)
                with wrapped.no_sync():
                    for part in order[:-1]:
                        (loss_of(wrapped, inputs[part], targets[part]) / parts).backward()
                (loss_of(wrapped, inputs[order[-1]], targets[order[-1]]) / parts).backward()
                optimizer.step()
            yield

    def with_shards() -> Iterator[None]:
        model, inputs = _shard_model(config["model"])
        optimizer = torch.optim.Adam(model.parameters())
        plan = {"steps": SHARD_STEPS * (SHARD_ROUNDS + 2), "global_batch": SHARD_BATCH, "shards": SHARDS}
        state = loop.TorchState(model=model, optimizer=optimizer)
        with loop.session(state, save_every="10000s", **plan) as session:
            for samples, labels in session.batches((inputs, targets[: len(inputs)])):
                session.backward(loss_of(model, samples, labels) * session.weight)
                if not session.is_last_part:
                    continue
                optimizer.step()
                session.step()
                if session.done % SHARD_STEPS == 0:
                    yield

    sides = {
        "shards": with_shards(),
        "DDP, micro-batches": with_ddp(SHARDS // SHARD_WORKERS),
        "DDP, one batch": with_ddp(1),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(SHARD_ROUNDS + 1):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            began = time.monotonic()
            next(sides[name])
            found[name].append((time.monotonic() - began) / SHARD_STEPS)
    if rank == 0:
        Path(config["results"]).write_text(json.dumps({name: rounds[1:] for name, rounds in found.items()}))


def replays_loop(config: dict[str, Any]) -> None:
    """Take steps of which each third one has replays, and write the seconds of those without and with.

    A comparison after a step counts as part of the next step's time, so what that step takes more is added.
    """
    import ray.train
    import torch

    torch.set_num_threads(1)
    model, inputs = _shard_model(config["model"])
    if not config["shards"]:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    data = (inputs, torch.randint(0, 10, (len(inputs),)))
    plan = {"steps": 18 * SHARD_STEPS, "global_batch": SHARD_BATCH, "shards": config["shards"]}
    times: list[float] = []
    state = loop.TorchState(model=model, optimizer=optimizer)
    with loop.session(state, save_every="10000s", replay_every=3, **plan) as session:
        began = time.monotonic()
        for samples, labels in session.batches(data, micro_batch=config["micro_batch"]):
            loss = torch.nn.functional.cross_entropy(model(samples), labels)
            session.backward(loss * session.weight)
            if session.is_last_part:
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                times.append(time.monotonic() - began)
                began = time.monotonic()
    groups = [*zip(times[::3], times[1::3], times[2::3], strict=True)][SHARD_STEPS:]  # without the first ones
    plain = [third for _, _, third in groups]
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["results"]).write_text(json.dumps([plain, [first + more - third for first, more, third in groups]]))


def killed_loop(config: dict[str, Any]) -> None:
    """Take steps for a while, and be killed again and again; write what was done when the time was over."""
    model = _model(config["bytes"])
    started = Path(config["results"]).with_suffix(".started")
    if not started.exists():
        started.write_text(str(time.time()))
    ends_at = float(started.read_text()) + RUN_SECONDS
    dies_at = time.time() + random.Random(f"{config['seed']} {int(time.time())}").expovariate(1 / KILL_SECONDS)
    plan = {"steps": 10**6, "global_batch": 1, "save_every": config["save_every"], "save_within": (1.0, 600.0)}
    with loop.session(loop.TorchState(model=model), **plan) as session:
        while (now := time.time()) < ends_at:
            if now > dies_at:
                os._exit(1)
            time.sleep(0.02)
            session.step()
        Path(config["results"]).write_text(json.dumps({"done": session.done * 0.02 / RUN_SECONDS}))


# -- what is measured


def train(name: str, **config: Any) -> dict[str, Any]:
    """Run one of the loops above in a worker of plain Ray Train, in a process of its own, and return what it wrote."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        config |= {"results": f"{folder}/results.json", "loop": name, "storage": folder}
        command = [sys.executable, "-m", "benchmarks.loop", "--child", json.dumps(config)]
        environment = {**base_environment(), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr, timeout=1200)
        found: dict[str, Any] = json.loads(Path(config["results"]).read_text())
        return found


def _train_here(config: dict[str, Any]) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    run = RunConfig(name="run", storage_path=config["storage"], failure_config=FailureConfig(max_failures=-1))
    scaling = ScalingConfig(num_workers=config.get("workers", 1))
    TorchTrainer(globals()[config["loop"]], train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    ray.shutdown()


def measure_blocked(repeats: int) -> list[str]:
    """Print how long a loop stands still on a disk and on S3, and return the targets."""
    from prefect_elastic_train import CheckpointPolicy, LocalStorage, S3Storage, elastic_train

    rows, targets = [], []
    with MotoServer() as server, FaultProxy(server.endpoint_url) as proxy:
        server.create_bucket(BUCKET)
        proxy.latency(LATENCY_SECONDS)
        settings = s3_settings(proxy.endpoint_url)
        bucket = S3Storage(**{name: getattr(settings, name) for name in type(settings).model_fields})
        with tempfile.TemporaryDirectory(dir=LOCAL_FOLDER) as folder:
            results = Path(folder, "results.json")
            for place, storage in {"disk": LocalStorage(path=f"{folder}/runs"), "S3": bucket}.items():
                for size in SIZES:
                    config = {"results": str(results), "saves": SAVES * repeats, "bytes": size}
                    how: Any = {"storage": storage, "checkpoints": CheckpointPolicy(keep=1)}
                    elastic_train("benchmarks.loop:blocked_loop", train_loop_config=config, **how)
                    found, what = json.loads(results.read_text()), f"{size // MIB} MiB, {place}"
                    rows.append([what, *(summary(seconds, 3) for seconds in found.values())])
                    targets.append(ratio_target(f"blocked [s], {what}", found["session"], found["by hand"], limit=0.05))
    print(markdown_table(["state", "by hand, s", "session, s"], rows))
    return targets


def measure_points(repeats: int) -> list[str]:
    """Print how long a recovery point blocks a loop, and its steps a second, and return the targets."""
    from prefect_elastic_train import ElasticScaling, LocalStorage, elastic_train

    rows, targets = [], []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:

        def measured(**config: Any) -> dict[str, list[float]]:
            results = Path(folder, "results.json")
            config |= {"results": str(results)}
            elastic_train(
                "benchmarks.loop:points_loop",
                train_loop_config=config,
                storage=LocalStorage(path=f"{folder}/runs"),
                scaling=ElasticScaling(standby="off"),
            )
            found: dict[str, list[float]] = json.loads(results.read_text())
            return found

        for size in SIZES:
            found = measured(bytes=size, points=1, copies=True, seconds=0.5, steps=POINTS * repeats)
            what = f"{size // MIB} MiB"
            rows.append([what, summary(found["plain copy"], 4), summary(found["recovery point"], 4)])
            ratio = (f"recovery point to plain copy, {what}", found["recovery point"], found["plain copy"])
            targets.append(ratio_target(*ratio, limit=2.0))
        with_points, without = (
            measured(bytes=POINT_BYTES, points=points, copies=False, seconds=POINT_STEP_SECONDS, steps=POINT_STEPS)
            for points in (1, "off")
        )
    rate = sum(without["step"]) / sum(with_points["step"])
    targets.append(
        f"- steps a second with a recovery point of {POINT_BYTES // MIB} MiB each {POINT_STEP_SECONDS} s, to "
        f"those without: {rate:.3f} (>= 0.98): {'PASS' if rate >= 0.98 else 'FAIL'}"
    )
    print(markdown_table(["state", "plain copy, s", "recovery point, s"], rows))
    return targets


def measure_restore(repeats: int) -> list[str]:
    """Print how long a session takes to restore a recovery point, and return the targets."""
    from prefect_elastic_train import ElasticScaling, FailureBudget, S3Storage, elastic_train

    rows, medians = [], []
    with MotoServer() as server, FaultProxy(server.endpoint_url) as proxy:
        server.create_bucket(BUCKET)
        settings = s3_settings(proxy.endpoint_url)
        storage = S3Storage(**{name: getattr(settings, name) for name in type(settings).model_fields})
        for size in SIZES:
            with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
                results = Path(folder, "results.json")
                elastic_train(
                    "benchmarks.loop:restore_loop",
                    train_loop_config={"results": str(results), "bytes": size, "restores": repeats},
                    storage=storage,
                    scaling=ElasticScaling(standby="off"),
                    failures=FailureBudget(max_failures=-1),
                )
                seconds = json.loads(results.read_text())
            reads = sum(seen.method == "GET" and ".distcp" in seen.path for seen in proxy.requests)
            rows.append([f"{size // MIB} MiB", summary(seconds, 3), str(reads)])
            medians.append(statistics.median(seconds))
    seconds_per_gib = (medians[1] - medians[0]) / (SIZES[1] - SIZES[0]) * 2**30
    verdict = "PASS" if seconds_per_gib <= 0.25 and not reads else "FAIL"
    target = (
        f"- restore: {seconds_per_gib:.2f} s more for each GiB (<= 0.25), {reads} reads of checkpoints (0): {verdict}"
    )
    print(markdown_table(["state", "restore, s", "checkpoint files read"], rows))
    return [target]


def measure_overhead(repeats: int) -> list[str]:
    """Print the time of steps, and return the target."""
    found: dict[str, list[float]] = {"by hand": [], "session": []}
    for _ in range(repeats):
        for name, rounds in train("overhead_loop").items():
            found[name] += [1000 * seconds / OVERHEAD_STEPS for seconds in rounds]
    print(markdown_table(["loop", "ms a step"], [[name, summary(each, 3)] for name, each in found.items()]))
    return [ratio_target("a step [ms]", found["session"], found["by hand"], limit=1.02)]


def measure_shards(repeats: int) -> list[str]:
    """Print the time of steps with shards and with DistributedDataParallel, and return the targets."""
    rows, targets = [], []
    for model in ("convolutions of width 16", "convolutions of width 32", "linear"):
        found: dict[str, list[float]] = {}
        for _ in range(repeats):
            for name, rounds in train("shards_loop", model=model, workers=SHARD_WORKERS).items():
                found.setdefault(name, []).extend(1000 * seconds for seconds in rounds)
        rows += [[model, name, summary(each, 1)] for name, each in found.items()]
        targets.append(ratio_target(f"a step [ms], {model}", found["shards"], found["DDP, micro-batches"], limit=1.05))
    print(markdown_table(["model", "loop", "ms a step"], rows))
    return targets


def measure_replays(repeats: int) -> list[str]:
    """Print the time of steps with replays and without, and return the targets."""
    rows, targets = [], []
    for model in ("convolutions of width 16", "convolutions of width 32", "linear"):
        for name, plan in {
            "shards, 8 of each worker": {"shards": SHARDS, "micro_batch": 0},
            "DDP, 8 micro-batches": {"shards": 0, "micro_batch": SHARD_BATCH // SHARDS},
            "DDP, 2 micro-batches": {"shards": 0, "micro_batch": SHARD_BATCH // SHARD_WORKERS // 2},
            "DDP, one batch": {"shards": 0, "micro_batch": 0},
        }.items():
            found: list[list[float]] = [[], []]
            for _ in range(repeats):
                rounds = train("replays_loop", model=model, workers=SHARD_WORKERS, **plan)
                for each, seconds in zip(found, rounds, strict=True):
                    each += [1000 * one for one in seconds]
            rows.append([model, name, *(summary(each, 1) for each in found)])
            print(rows[-1], file=sys.stderr)
            targets.append(ratio_target(f"a step [ms], {model}, {name}", found[1], found[0], limit=2.2))
    print(markdown_table(["model", "loop", "ms a step", "ms a step with replays"], rows))
    return targets


def measure_replay_errors(repeats: int) -> list[str]:
    """Train with replays in each step, and return the targets."""
    targets = []
    for shards in repeats * (4, 0):
        digests(3, shards=shards, replay_every=1, steps=REPLAY_STEPS, limit_seconds=3600)  # raises an error
        targets.append(f"- errors of {REPLAY_STEPS} steps with replays, 3 ranks, {shards} shards: 0: PASS")
    return targets


def kept_share(interval: Callable[[loop.Cadence], float], between: float, cost: float, seed: int) -> float:
    """Simulate a training whose saves take ``cost`` seconds, and return the share of its time that is kept."""
    import simpy

    chance, world, kept = random.Random(seed), simpy.Environment(), 0.0
    cadence = loop.Cadence("auto", clock=lambda: world.now)

    def trainer() -> Iterator[Any]:
        nonlocal kept
        while True:
            try:
                if cadence.failures and failed:
                    failed.clear()
                    yield world.timeout(RESTART_SECONDS)
                trained = interval(cadence)
                yield world.timeout(trained)
                yield world.timeout(cost)
                cadence.saved(cost)
                kept += trained
            except simpy.Interrupt:
                cadence.failures += 1
                failed.append(1)

    failed: list[int] = []
    training = world.process(trainer())

    def faults() -> Iterator[Any]:
        while True:
            yield world.timeout(chance.expovariate(1 / between))
            training.interrupt()

    world.process(faults())
    seconds = max(200 * between, WEEK)
    world.run(until=seconds)
    return kept / seconds


def measure_cadence(repeats: int) -> list[str]:
    """Print the shares of time that are kept, and return the target."""
    rows, worst = [], 0.0
    for between in FAILURES:
        for cost in COSTS:

            def mean(interval: Callable[[loop.Cadence], float], mtbf: float = between, save: float = cost) -> float:
                return statistics.mean(kept_share(interval, mtbf, save, seed) for seed in range(SEEDS * repeats))

            auto = mean(loop.Cadence.interval)
            fixed = [10 * 1.25**power for power in range(42) if 10 * 1.25**power < 4 * between]
            best, at = max((mean(lambda _, seconds=seconds: seconds), seconds) for seconds in fixed)
            worst = max(worst, 1 - auto / best)
            rows.append([f"{between:,}", f"{cost}", f"{auto:.4f}", f"{best:.4f} at {at:.0f} s", f"{auto / best:.4f}"])
    print(markdown_table(["MTBF, s", "a save, s", "kept with auto", "with the best fixed interval", "ratio"], rows))
    verdict = "PASS" if worst <= 0.02 else "FAIL"
    return [f"- share kept with auto to the best, at worst {1 - worst:.4f} (>= 0.98): {verdict}"]


def measure_run(repeats: int) -> list[str]:
    """Print which share of its time a training that is killed again and again keeps."""
    rows = []
    for every in RUN_INTERVALS:
        shares = [train("killed_loop", bytes=RUN_BYTES, save_every=every, seed=seed)["done"] for seed in range(repeats)]
        rows.append([every, summary(shares, 3)])
    print(markdown_table(["saves", "share of the time that is kept"], rows))
    return []


def main() -> int:
    """Measure the parts and print tables and targets."""
    if sys.argv[1:2] == ["--child"]:
        _train_here(json.loads(sys.argv[2]))
        return 0
    arguments = parse_arguments(__doc__ or "", PARTS)
    load_before, targets = os.getloadavg()[0], list[str]()
    for part in arguments.only:
        print(f"\n{part}\n", flush=True)
        targets += globals()[f"measure_{part}"](arguments.repeats)
    print(f"\n{machine_lines('benchmarks.loop', load_before)}\n")
    print("\n".join(targets))
    return 0


if __name__ == "__main__":
    sys.exit(main())
