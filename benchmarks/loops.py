"""The train loops of the benchmarks: one for everything that runs on Ray Train, its twin for torchrun.

Both train the same tiny DDP model and append one line a step and rank to a ledger file, the only thing that
the benchmarks read, so that all sides are measured alike.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WORKERS = 2
CHECKPOINT_FILE = "state.pt"
RESULT_FILE = "result"


@dataclass(frozen=True)
class LoopSettings:
    """What a loop does.

    Attributes:
        steps: Number of steps; they count from 1.
        step_seconds: Length of the pause in each step, in seconds.
        checkpoint_every: Steps from one checkpoint to the next.
        checkpoint_offset: The checkpoints come so many steps earlier; 0: after each step that `checkpoint_every`
            divides.
        asks: Ask at each step whether the worker group is about to be restarted, and report a checkpoint if so.
            Only in a Ray Train loop under elastic_train.
        work_seconds: Processor time that each step takes besides, in seconds; in Ray Train loops.
        lines_per_second: Lines of output of a run that is only simulated.
        upload_seconds: Time by which each upload of a checkpoint takes longer; in the loop with a session.
        points_every: Steps from one recovery point to the next; in the loop with a session.
        ledger: The file that takes a line for every step of every rank; each run gets its own.
    """

    steps: int
    step_seconds: float
    checkpoint_every: int
    checkpoint_offset: int = 0
    asks: bool = False
    work_seconds: float = 0.0
    lines_per_second: float = 0.0
    upload_seconds: float = 0.0
    points_every: int = 1
    ledger: str = ""

    def steps_after_checkpoint(self, step: int) -> int:
        """How many steps after the last regular checkpoint `step` is; 0 if one is due after it."""
        return (step + self.checkpoint_offset) % self.checkpoint_every

    def to_config(self) -> dict[str, Any]:
        """The settings as a `train_loop_config`."""
        return asdict(self)


@dataclass(frozen=True)
class SideSettings:
    """Everything that one side gets to know.

    Attributes:
        loop: What the loop does.
        storage: The directory for runs and checkpoints.
        run_name: The run's name; the same name resumes the same run.
        temp_dir: Where raw Ray keeps its session directory.
        cluster_address: The cluster to join, whose token is in the environment; "" for one of the side's own.
        failures: How many are survived, of each kind.
    """

    loop: LoopSettings
    storage: str
    run_name: str
    temp_dir: str
    cluster_address: str = ""
    failures: int = 3

    def write_result(self, result: Any) -> None:
        """Write down what the side has measured itself, as JSON beside its ledger."""
        Path(self.loop.ledger).with_name(RESULT_FILE).write_text(json.dumps(result))

    def to_json(self) -> str:
        """The settings as one command line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SideSettings:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(loop=LoopSettings(**values.pop("loop")), **values)


@dataclass(frozen=True)
class LedgerLine:
    """One step of one rank.

    Attributes:
        at: When the step ended, in seconds since the epoch.
        pid: The worker's process.
        rank: Its rank.
        step: The step, from 1.
        resumed_from: The step of the checkpoint that the worker started from; 0 without one.
        world_size: Number of workers in its group.
    """

    at: float
    pid: int
    rank: int
    step: int
    resumed_from: int
    world_size: int

    @classmethod
    def parse(cls, text: str) -> LedgerLine:
        """Read one line of a ledger file."""
        at, *rest = text.split()
        pid, rank, step, resumed_from, world_size = map(int, rest)
        return cls(float(at), pid, rank, step, resumed_from, world_size)


class Ledger:
    """Appends lines to a ledger file; whole lines only, from any number of processes."""

    def __init__(self, path: str, rank: int, world_size: int, resumed_from: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._head = f"{os.getpid()} {rank}"
        self._tail = f"{resumed_from} {world_size}\n"

    def mark(self, step: int) -> None:
        """Append that `step` is done now."""
        os.write(self._descriptor, f"{time.time():.6f} {self._head} {step} {self._tail}".encode())


def ray_loop(config: dict[str, Any]) -> None:
    """The loop as a Ray Train loop: raw Ray Train and elastic_train run it unchanged, unless it asks for restarts.

    Args:
        config: `LoopSettings` as a dictionary.
    """
    import torch
    from ray import train
    from ray.train.torch import prepare_model

    settings = LoopSettings(**config)
    context = train.get_context()
    model, optimizer = _model_and_optimizer()
    resumed_from = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            resumed_from = _load(Path(directory) / CHECKPOINT_FILE, model, optimizer)
    wrapped = prepare_model(model)
    ledger = Ledger(settings.ledger, context.get_world_rank(), context.get_world_size(), resumed_from)
    for step in range(resumed_from + 1, settings.steps + 1):
        loss = _train_step(wrapped, optimizer, settings.step_seconds)
        _work(settings.work_seconds)
        ledger.mark(step)
        restart_comes = settings.asks and _restart_comes()
        if settings.steps_after_checkpoint(step) and not restart_comes:
            continue
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if context.get_world_rank() == 0:
                torch.save(_state(step, model, optimizer), Path(directory) / CHECKPOINT_FILE)
                saved = train.Checkpoint.from_directory(directory)
            train.report({"step": step, "loss": loss}, checkpoint=saved)


def session_loop(config: dict[str, Any]) -> None:
    """The loop with a session, which makes recovery points besides the checkpoints.

    Args:
        config: `LoopSettings` as a dictionary.
    """
    import numpy as np
    import torch
    from ray import train
    from ray.train.torch import prepare_model
    from ray.train.v2._internal.execution.context import get_train_context

    from prefect_elastic_train import loop

    settings = LoopSettings(**config)
    context = train.get_context()
    storage = get_train_context().storage_context
    persist = storage.persist_current_checkpoint

    def persist_slowly(*arguments: Any) -> Any:
        time.sleep(settings.upload_seconds)
        return persist(*arguments)

    storage.persist_current_checkpoint = persist_slowly
    model, optimizer = _model_and_optimizer()
    wrapped = prepare_model(model)
    state = loop.TorchState(model=wrapped, optimizer=optimizer)
    with loop.session(
        state,
        steps=settings.steps,
        global_batch=WORKERS,
        save_every=settings.checkpoint_every,
        recovery_points=settings.points_every,
    ) as session:
        ledger = Ledger(settings.ledger, context.get_world_rank(), context.get_world_size(), session.done)
        for _ in session.batches(np.arange(1000)):
            loss = _train_step(wrapped, optimizer, settings.step_seconds)
            ledger.mark(session.done + 1)
            session.step({"loss": loss})
    if context.get_world_rank() == 0:  # for the check of the weights
        torch.save(_state(settings.steps, model, optimizer), Path(settings.ledger).parent / "storage" / CHECKPOINT_FILE)


def metrics_loop(config: dict[str, Any]) -> None:
    """A Ray Train loop that reports metrics at each step and needs no framework; its model is the number of the step.

    Args:
        config: `LoopSettings` as a dictionary.
    """
    from ray import train

    settings = LoopSettings(**config)
    context = train.get_context()
    is_first = context.get_world_rank() == 0
    ledger = Ledger(settings.ledger, context.get_world_rank(), context.get_world_size(), 0)
    for step in range(1, settings.steps + 1):
        time.sleep(settings.step_seconds)
        _work(settings.work_seconds)
        ledger.mark(step)
        metrics = {"step": step, "total_steps": settings.steps, "loss": 1 / step}
        if not is_first or settings.steps_after_checkpoint(step):
            train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / CHECKPOINT_FILE).write_text(str(step))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))


def _work(seconds: float) -> None:
    """Take so much processor time, however long that takes: whoever else uses the processor makes it longer."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def torchrun_loop(settings: LoopSettings, storage: str) -> None:
    """The same loop as a torchrun worker: gloo, and a checkpoint file of its own.

    Args:
        settings: What the loop does.
        storage: The directory for the checkpoint file.
    """
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    path = Path(storage) / CHECKPOINT_FILE
    model, optimizer = _model_and_optimizer()
    resumed_from = _load(path, model, optimizer) if path.exists() else 0
    wrapped = DistributedDataParallel(model)
    ledger = Ledger(settings.ledger, rank, distributed.get_world_size(), resumed_from)
    for step in range(resumed_from + 1, settings.steps + 1):
        _train_step(wrapped, optimizer, settings.step_seconds)
        ledger.mark(step)
        if settings.steps_after_checkpoint(step) == 0 and rank == 0:
            partial = path.with_suffix(".partial")
            torch.save(_state(step, model, optimizer), partial)
            partial.replace(path)
    distributed.destroy_process_group()


def _restart_comes() -> bool:
    # Raw Ray Train must not pay for this import.
    from prefect_elastic_train.loop import resize_requested

    return resize_requested()


def _model_and_optimizer() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(32, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _train_step(model: Any, optimizer: Any, seconds: float) -> float:
    import torch

    optimizer.zero_grad()
    loss = model(torch.ones(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(seconds)
    return float(loss.detach())


def state_after(steps: int) -> dict[str, Any]:
    """What a checkpoint of a loop holds after so many steps that nobody has disturbed."""
    model, optimizer = _model_and_optimizer()
    for _ in range(steps):
        _train_step(model, optimizer, 0.0)
    return _state(steps, model, optimizer)


def _state(step: int, model: Any, optimizer: Any) -> dict[str, Any]:
    return {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _load(path: Path, model: Any, optimizer: Any) -> int:
    import torch

    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
