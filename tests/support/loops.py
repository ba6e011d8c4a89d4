"""Train loops of the tests. They are deterministic, and write what they do into a ledger."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any


def ledger_loop(config: dict[str, Any]) -> None:
    """Train a small torch model; every rank writes each step into the ledger.

    Config: ``steps``; ``checkpoint_every``; ``sleep`` (seconds a step); ``ledger`` (file); ``seed``; ``gate``
    (file that must exist before the step ``gate_step`` begins).
    """
    import tempfile

    import ray.train
    import ray.train.torch
    import torch

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(config.get("seed", 0))
    model: Any = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = ray.train.torch.prepare_model(model)
    resumed_from = step
    while step < config["steps"]:
        if config.get("gate") and step == config["gate_step"]:
            while not os.path.exists(config["gate"]):
                time.sleep(0.02)
        # Each rank takes its share of one global batch, so that the world size hardly matters.
        generator = torch.Generator().manual_seed(1000 + step)
        batch = torch.randn(8, 8, generator=generator)[rank::world]
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(config.get("sleep", 0.0))
        write_ledger(
            config["ledger"], rank=rank, world=world, step=step, resumed_from=resumed_from, run=run_known_here()
        )
        saved = None
        if step % config["checkpoint_every"] == 0 or step == config["steps"]:
            folder = tempfile.mkdtemp()
            if rank == 0:
                plain = model.module if hasattr(model, "module") else model
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, os.path.join(folder, "state.pt"))
            saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step, "loss": loss.item()}, checkpoint=saved)


def remotely_failing_loop(config: dict[str, Any]) -> None:
    """Ask Ray for something that raises there."""
    import ray

    write_ledger(config["ledger"], rank=ray.train.get_context().get_world_rank(), world=1, step=1, resumed_from=0)

    @ray.remote(num_cpus=0)
    def parse() -> None:
        raise ValueError("a row without a number")

    ray.get(parse.remote())


def sleeping_loop(config: dict[str, Any]) -> None:
    """Report nothing for a long time."""
    write_ledger(config["ledger"], rank=0, world=1, step=1, resumed_from=0)
    time.sleep(600)


def stalling_loop(config: dict[str, Any]) -> None:
    """Hang once, in the middle of a step, then train on from the checkpoint before."""
    import tempfile

    import ray.train

    resumed = ray.train.get_checkpoint() is not None
    write_ledger(config["ledger"], rank=0, world=1, step=int(resumed), resumed_from=int(resumed))
    if not resumed:
        folder = tempfile.mkdtemp()
        ray.train.report({"step": 1}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        hang_here()
    ray.train.report({"step": 2}, checkpoint=ray.train.Checkpoint.from_directory(tempfile.mkdtemp()))


def hang_here() -> None:
    """Sleep for as long as no test waits."""
    time.sleep(600)


def counting_loop(config: dict[str, Any]) -> None:
    """Count steps without any framework, with a checkpoint at each; the quickest loop there is.

    Config: ``steps``; ``sleep`` (seconds a step); ``ledger`` (file); ``metrics`` (reported beside the step).
    """
    import tempfile

    import ray.train

    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "step.json")) as file:
            step = json.load(file)["step"]
    resumed_from = step
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    while step < config["steps"]:
        step += 1
        time.sleep(config.get("sleep", 0.0))
        if "ledger" in config:
            write_ledger(config["ledger"], rank=rank, world=world, step=step, resumed_from=resumed_from)
        folder = tempfile.mkdtemp()
        if rank == 0:
            with open(os.path.join(folder, "step.json"), "w") as file:
                json.dump({"step": step}, file)
        metrics = {"step": step, **config.get("metrics", {})}
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def hash_after(steps: int) -> str:
    """Give the state of `hashing_loop` after so many steps, each taken exactly once and in order."""
    import hashlib

    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    return state


def hashing_loop(config: dict[str, Any]) -> None:
    """Train a "model" that is the hash of all its steps; every rank writes each step into the ledger.

    Config: ``steps``; ``checkpoint_every``; ``sleep`` (seconds a step); ``ledger`` (file); ``sleep_once`` (seconds
    that the sixth step takes when it is taken first); ``ask`` (whether it saves when a restart is coming); ``until``
    (file whose existence makes the step the last); ``upload_seconds`` (that a checkpoint takes to be stored);
    ``ballast_bytes`` (size of a second file in each checkpoint).
    """
    import hashlib
    import tempfile

    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    from prefect_elastic_train.loop import resize_requested

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    step, state = 0, ""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "state.json")) as file:
            step, state = json.load(file)
    resumed_from, steps = step, config["steps"]
    where = {
        "node": ray.get_runtime_context().get_node_id(),
        "slices": {name: value for name, value in os.environ.items() if name.startswith("MEGASCALE_")},
    }
    options: dict[str, Any] = {}
    if config.get("upload_seconds"):
        options["checkpoint_upload_fn"] = _slow_upload(config["upload_seconds"])
    while step < steps:
        step += 1
        if config.get("until") and broadcast_from_rank_zero(os.path.exists(config["until"])):
            steps = step
        time.sleep(config.get("sleep", 0.0))
        if step == 6 and not resumed_from:
            time.sleep(config.get("sleep_once", 0.0))
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
        write_ledger(
            config["ledger"],
            rank=rank,
            world=world,
            step=step,
            resumed_from=resumed_from,
            run=run_known_here(),
            **where,
        )
        saved = None
        asked = config.get("ask") and resize_requested()
        if asked or step % config["checkpoint_every"] == 0 or step == steps:
            folder = tempfile.mkdtemp()
            if rank == 0:
                with open(os.path.join(folder, "state.json"), "w") as file:
                    json.dump([step, state], file)
                if config.get("ballast_bytes"):
                    with open(os.path.join(folder, "ballast"), "wb") as file:
                        file.write(os.urandom(config["ballast_bytes"]))
            saved = ray.train.Checkpoint.from_directory(folder)
            if config.get("named"):
                options["checkpoint_dir_name"] = f"step-{step}"
        ray.train.report({"step": step}, checkpoint=saved, **(options if saved else {}))


def async_loop(config: dict[str, Any]) -> None:
    """Count and hash steps as `hashing_loop`, and upload in the background; each report has a checkpoint.

    Config as there, and ``staging``: folder of the checkpoints that are not uploaded, counted in the ledger.
    """
    import hashlib

    import ray.train

    context = ray.train.get_context()
    step, state = 0, ""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "state.json")) as file:
            step, state = json.load(file)
    resumed_from = step
    while step < config["steps"]:
        step += 1
        time.sleep(config.get("sleep", 0.0))
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
        waiting = len(os.listdir(config["staging"]))
        write_ledger(config["ledger"], rank=0, world=1, step=step, resumed_from=resumed_from, waiting=waiting)
        if step % config["checkpoint_every"] == 0 or step == config["steps"]:
            folder = os.path.join(config["staging"], f"{context.get_world_rank()}-{os.getpid()}-{step}")
            os.makedirs(folder)
            with open(os.path.join(folder, "state.json"), "w") as file:
                json.dump([step, state], file)
            with open(os.path.join(folder, "ballast"), "wb") as file:
                file.write(os.urandom(config.get("ballast_bytes", 1000)))
            ray.train.report(
                {"step": step},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
                checkpoint_dir_name=f"step-{step}" if config.get("named") else None,
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=True,
            )


def _slow_upload(seconds: float) -> Callable[[Any, str], Any]:
    """Store checkpoints as Ray does, to a storage that takes its time."""
    from ray.train.v2._internal.execution.context import get_train_context

    def upload(checkpoint: Any, name: str) -> Any:
        time.sleep(seconds)
        return get_train_context().storage_context.persist_current_checkpoint(checkpoint, name)

    return upload


def dataset_loop(config: dict[str, Any]) -> None:
    """Read a Ray Data dataset and report how many rows and what sum this rank saw."""
    import ray.train

    shard = ray.train.get_dataset_shard("numbers")
    rows = total = 0
    for batch in shard.iter_batches(batch_size=16):
        rows += len(batch["id"])
        total += int(batch["id"].sum())
    write_ledger(config["ledger"], rank=ray.train.get_context().get_world_rank(), rows=rows, total=total)
    ray.train.report({"rows": rows, "total": total})


def asking_loop(config: dict[str, Any]) -> None:
    """Ask for what a local training without datasets does not have, and report the answers."""
    import ray.train

    try:
        ray.train.get_dataset_shard("missing")
        answer = "found"
    except KeyError as error:
        answer = str(error)
    ray.train.report({"dataset": answer, "preemption": str(ray.train.get_preemption_info())})


def run_known_here() -> dict[str, Any]:
    """Give what this worker knows of its run."""
    from dataclasses import asdict

    from prefect_elastic_train.loop import run_context

    return asdict(run_context())


def write_ledger(path: str, **line: Any) -> None:
    """Append one line to the ledger, whole."""
    data = json.dumps({"at": time.time(), "pid": os.getpid(), **line}) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, data.encode())
    finally:
        os.close(handle)


def habitual_loop(config: dict[str, Any]) -> None:
    """Report steps with a checkpoint at each fourth, die once after the eighth, and go on as the habit is.

    Config: ``habit`` (see the branches); ``died`` (file that tells of the death); ``steps``.
    """
    import tempfile

    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    habit, rank, step = config["habit"], ray.train.get_context().get_world_rank(), 0
    if habit == "lets rank 0 load for all":
        checkpoint = ray.train.get_checkpoint() if rank == 0 else None
        step = broadcast_from_rank_zero(_saved_step(checkpoint.to_directory()) if checkpoint else 0)
    elif habit == "asks and does not load":
        ray.train.get_checkpoint()
    elif habit != "never asks":
        checkpoint = ray.train.get_checkpoint()
        step = _saved_step(checkpoint.path) if checkpoint else 0
    while step < config["steps"]:
        step += 1
        time.sleep(0.05)
        metrics = {
            "lets rank 0 load for all": {"global_step": step},
            "counts steps of an epoch": {"step": (step - 1) % 8},
            "counts nothing": {"loss": 1 / step},
        }.get(habit, {"step": step})
        saved = None
        if step % 4 == 0 and habit != "saves no checkpoint":
            folder = tempfile.mkdtemp()
            with open(os.path.join(folder, "step.json"), "w") as file:
                json.dump(step, file)
            saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=saved)
        if step == 8 and rank == 0 and not os.path.exists(config["died"]):
            time.sleep(1)  # until the checkpoint is committed
            open(config["died"], "w").close()
            os._exit(1)


def _saved_step(folder: str) -> int:
    with open(os.path.join(folder, "step.json")) as file:
        return int(json.load(file))
