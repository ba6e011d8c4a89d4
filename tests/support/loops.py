"""Train loops of the tests. They are deterministic, and write what they do into a ledger."""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import reduce
from pathlib import Path
from typing import Any


def write_ledger(path: str, **line: Any) -> None:
    """Append one line to the ledger, whole."""
    with open(path, "ab", buffering=0) as ledger:
        ledger.write(json.dumps({"at": time.time(), "pid": os.getpid(), **line}).encode() + b"\n")


def _run_known_here() -> dict[str, Any]:
    from dataclasses import asdict

    from prefect_elastic_train.loop import run_context

    return asdict(run_context())


def _saved_state(folder: str) -> Any:
    return json.loads(Path(folder, "state.json").read_text())


def _resume(first: Any) -> Any:
    """Return the state in the newest checkpoint, or the first one."""
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return first
    with checkpoint.as_directory() as folder:
        return _saved_state(folder)


def _checkpoint(state: Any) -> Any:
    """Return a checkpoint with this state."""
    import ray.train

    folder = tempfile.mkdtemp()
    Path(folder, "state.json").write_text(json.dumps(state))
    return ray.train.Checkpoint.from_directory(folder)


def next_hash(state: str, step: int) -> str:
    """The state after a step of the hashing loop."""
    import hashlib

    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()


def hash_after(steps: int) -> str:
    """The state of the hashing loop after so many steps."""
    return reduce(next_hash, range(1, steps + 1), "")


#: The training that most tests disturb.
STEPS, CHECKPOINT_EVERY = 40, 5


def train_config(ledger: str, **more: Any) -> dict[str, Any]:
    """The configuration of the training that most tests disturb."""
    return {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "sleep": 0.05, "ledger": ledger, **more}


def is_right(checkpoint_uri: str, steps: int = STEPS) -> bool:
    """Whether a checkpoint of the hashing loop is that of an undisturbed run of so many steps."""
    return bool(_saved_state(checkpoint_uri) == [steps, hash_after(steps)])


def hashing_loop(config: dict[str, Any]) -> None:
    """Train a "model" that is the hash of all its steps; every rank writes each step into the ledger.

    Config: ``steps``; ``checkpoint_every`` (default: 1); ``sleep`` (seconds a step); ``ledger`` (file); ``metrics``
    (reported beside the step); ``sleep_once`` (seconds that the sixth step takes when it is taken first); ``fail_once``
    (step that raises, once); ``ask`` (whether it saves when a restart is coming); ``until`` (file whose existence makes
    the step the last); ``named`` (whether its checkpoints are named); ``staging`` (folder of checkpoints that are
    uploaded in the background, counted in the ledger); ``ballast_bytes`` (size of a second file in each checkpoint).
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    from prefect_elastic_train.loop import resize_requested

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    steps, staging = config["steps"], config.get("staging")
    step, state = _resume([0, ""])
    resumed_from = step
    options: dict[str, Any] = {}
    if staging:
        options["checkpoint_upload_mode"] = ray.train.CheckpointUploadMode.ASYNC
        options["delete_local_checkpoint_after_upload"] = True
    where = {"rank": rank, "world": world, "run": _run_known_here(), "node": ray.get_runtime_context().get_node_id()}
    where["slices"] = {name: value for name, value in os.environ.items() if name.startswith("MEGASCALE_")}
    while step < steps:
        step += 1
        if config.get("until") and broadcast_from_rank_zero(os.path.exists(config["until"])):
            steps = step
        time.sleep(config.get("sleep", 0.0))
        if step == 6 and not resumed_from:
            sleep_once(config.get("sleep_once", 0.0))
        if step == config.get("fail_once") and not os.path.exists(config["ledger"] + ".failed"):
            open(config["ledger"] + ".failed", "w").close()
            raise RuntimeError(f"rank {rank} fails once")
        state = next_hash(state, step)
        waiting = len(os.listdir(staging)) if staging else 0
        if "ledger" in config:
            write_ledger(config["ledger"], step=step, resumed_from=resumed_from, waiting=waiting, **where)
        metrics = {"step": step, **config.get("metrics", {})}
        asked = config.get("ask") and resize_requested()
        if not (asked or step % config.get("checkpoint_every", 1) == 0 or step == steps):
            ray.train.report(metrics)
            continue
        folder = tempfile.mkdtemp(dir=staging)
        if rank == 0:
            Path(folder, "state.json").write_text(json.dumps([step, state]))
            Path(folder, "ballast").write_bytes(os.urandom(config.get("ballast_bytes", 1)))
        if config.get("named"):
            options["checkpoint_dir_name"] = f"step-{step}"
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder), **options)


def sleep_once(seconds: float) -> None:
    """Sleep; the name is to be found in a stack."""
    time.sleep(seconds)


def remotely_failing_loop(config: dict[str, Any]) -> None:
    """Log, and ask Ray for something that raises there."""
    import logging

    import ray

    logging.getLogger(__name__).warning("a row is to be read")
    write_ledger(config["ledger"], rank=0, step=1)

    @ray.remote(num_cpus=0)
    def parse() -> None:
        raise ValueError("a row without a number")

    ray.get(parse.remote())


def validated_loop(config: dict[str, Any]) -> None:
    """Report three checkpoints, and write into the ledger how many are validated within a minute."""
    import ray.train
    from ray.train.v2.api.report_config import CheckpointConsistencyMode

    for step in range(3):
        ray.train.report({"step": step}, _checkpoint(step), validation=True)
    mode = CheckpointConsistencyMode.VALIDATED
    reported = ray.train.get_all_reported_checkpoints(consistency_mode=mode, timeout_s=60)
    write_ledger(config["ledger"], validated=sum(one.status.name == "VALIDATED" for one in reported))


def habitual_loop(config: dict[str, Any]) -> None:
    """Report steps with a checkpoint at each fourth, die once after the eighth, and go on as the habit is.

    Config: ``habit`` (see the branches); ``died`` (file that tells of the death); ``steps``.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    habit, rank, step = config["habit"], ray.train.get_context().get_world_rank(), 0
    checkpoint = ray.train.get_checkpoint() if habit not in ("never asks", "lets rank 0 load for all") else None
    if habit == "lets rank 0 load for all":
        checkpoint = ray.train.get_checkpoint() if rank == 0 else None
        step = broadcast_from_rank_zero(_saved_state(checkpoint.to_directory()) if checkpoint else 0)
    elif checkpoint and habit != "asks and does not load":
        step = _saved_state(checkpoint.path)
    while step < config["steps"]:
        step += 1
        time.sleep(0.05)
        is_saved = step % 4 == 0 and habit != "saves no checkpoint"
        ray.train.report({"step": step}, _checkpoint(step) if is_saved else None)
        if step == 8 and rank == 0 and not os.path.exists(config["died"]):
            time.sleep(1)  # until the checkpoint is committed
            open(config["died"], "w").close()
            os._exit(1)


def leaving_loop(config: dict[str, Any]) -> None:
    """Exit the worker process in the first line."""
    os._exit(3)


def waiting_loop(config: dict[str, Any]) -> None:
    """Have only rank 0 report, so that it waits for the others."""
    import ray.train

    if ray.train.get_context().get_world_rank() == 0:
        ray.train.report({"step": 1})
    time.sleep(600)


def gloo_loop(config: dict[str, Any]) -> None:
    """All-reduce, report and write each step into the ledger, as a loop in DistributedDataParallel; saves each ten.

    Config: ``steps``; ``sleep`` (seconds a step); ``ledger`` (file); ``raises`` (step and rank that raises after it).
    """
    import ray.train
    import torch

    context, step = ray.train.get_context(), _resume(0)
    rank, world = context.get_world_rank(), context.get_world_size()
    node = ray.get_runtime_context().get_node_id()
    while step < config["steps"]:
        time.sleep(config["sleep"])
        torch.distributed.all_reduce(torch.ones(1000))
        step += 1
        write_ledger(config["ledger"], step=step, rank=rank, world=world, node=node)
        if [step, rank] == config.get("raises"):
            torch.distributed.destroy_process_group()  # the peers fail before this rank has raised
            time.sleep(1)
            raise ValueError(f"step {step} has no gradient")
        ray.train.report({"step": step}, _checkpoint(step) if step % 10 == 0 else None)
