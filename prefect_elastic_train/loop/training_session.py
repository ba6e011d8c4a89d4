"""A train loop that can be interrupted anywhere: it sees every sample once, and saves at the right moment."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from prefect_elastic_train.loop import context as run
from prefect_elastic_train.loop.batches import length_of, load
from prefect_elastic_train.loop.cadence import Cadence
from prefect_elastic_train.loop.ledger import Ledger, combine
from prefect_elastic_train.loop.notice import ask, train_context
from prefect_elastic_train.loop.order import Indices, SampleOrder, StepBatches
from prefect_elastic_train.loop.parts import rank_file
from prefect_elastic_train.loop.scratch import ScratchFolder, remove_left_folders
from prefect_elastic_train.loop.state import State, random_state, restore_random_state, seed_everything

logger = logging.getLogger(__name__)

SESSION_FILE = "loop.json"
#: The shortest and longest time between two reports without a checkpoint, and as many times what the last one took: it
#: waits for Ray Train's controller. And how long a save may wait for the one before it to be uploaded.
_REPORT_SECONDS, _REPORT_TIMES, _WRITE_SECONDS = (5.0, 100.0), 200.0, 3600.0

current: Session | None = None  # of this process, for those who look on from outside


class LoopError(RuntimeError):
    """A loop does not use its session as it must be used; says what to change."""


def read_about(directory: str | Path) -> dict[str, Any]:
    """Return what a session has noted in a checkpoint: ``step`` and ``epoch`` (those that are done), and more."""
    if not (file := Path(directory, SESSION_FILE)).exists():
        raise LoopError(f"the checkpoint {directory} is no session's: it has no {SESSION_FILE}")
    about: dict[str, Any] = json.loads(file.read_text())
    for rank in range(about["world_size"]):
        if not (part := rank_file(directory, rank, about["world_size"])).exists():
            found = f"the checkpoint {directory} is incomplete, or of an earlier version of this package"
            raise LoopError(f"{found}: it has no {part.name}. Start from another one, or train under a new run_name")
    return about


class Session(AbstractContextManager["Session"]):
    """Restores a loop from its checkpoint, if there is one, and saves it at the right moments.

    All ranks must enter its ``with``, and go through the same steps.

    Args:
        state: What is saved and restored, such as ``TorchState(model=model, optimizer=optimizer)``.
        steps: Optimizer steps that this run does, from 1; those before another run's checkpoint that it started from
            (``resume_from``) come on top.
        global_batch: Samples of an optimizer step, over all workers: at least as many as there are workers.
        seed: Seed of the order of samples, and of the random state where that cannot be restored.
        save_every: A number of steps, seconds such as ``"90s"``, or ``"auto"``: as often as the failures of this run
            and the cost of a save make worthwhile. Besides, a loop saves before each restart that is announced, before
            the training's ``timeout_seconds`` are over, and at its end.
        save_within: The shortest and the longest interval that ``"auto"`` may choose, in seconds.

    Attributes:
        done, end: Optimizer steps that are done, by all worker groups of the run, and that are when the loop ends.
        rank, world_size: This worker's rank, and how many there are.
        weight: What this rank's mean over the current batch counts: multiply the loss by it.
        samples: The indices of the current batch's samples.
        is_last_part: Whether the current batch is the last of its step.
        cadence: What decides when to save.

    Raises:
        ValueError: An argument is out of range.
        TypeError: The dataset is a stream, in which no position is found again.
        StateMismatchError: The checkpoint is of another model.
        LoopError: The ranks are not at the same step, a batch had no step, or the dataset has changed.
    """

    def __init__(
        self,
        state: State,
        *,
        steps: int,
        global_batch: int,
        seed: int = 0,
        save_every: int | str = "auto",
        save_within: tuple[float, float] = (10.0, 3600.0),
    ) -> None:
        global current
        context, known = train_context(), run.current
        of_run = (known.failures, known.trained_seconds, known.ends_at) if known is not None else ()
        self.cadence = Cadence(save_every, save_within, *of_run)
        self._ray: Any = import_module("ray.train") if context is not None else None
        self.rank = context.get_world_rank() if context is not None else 0
        self.world_size = context.get_world_size() if context is not None else 1
        for name, value in (("steps", steps), ("global_batch", global_batch)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number from 1 on")
        if global_batch < self.world_size:
            what = f"global_batch={global_batch} is below the {self.world_size} workers, each of which needs a sample"
            raise ValueError(f"{what} of every step. Make it larger, or train with max_workers={global_batch}")
        self._state, self._seed, self._global_batch = state, int(seed), int(global_batch)
        self._order: SampleOrder | None = None
        of = known.run_id if known is not None else context.get_experiment_name() if context is not None else ""
        self._about: dict[str, Any] = {"run": of, "began_at": 0, "seen": 0}  # said in checkpoints
        self.done, self.weight, self.samples, self.is_last_part = 0, 1.0, np.zeros(0, dtype=np.int64), True
        self._ledger, self._taken, self._writing = Ledger(), list[Indices](), threading.Lock()
        #: Since the last report: sum and number of each metric, 0 for what is no number; and what was reported then.
        self._metrics, self._told = dict[str, tuple[Any, int]](), dict[str, Any]()
        remove_left_folders()
        seed_everything(seed, 0, self.rank)
        if self._ray is not None and (checkpoint := self._ray.get_checkpoint()) is not None:
            self._restore(checkpoint)
        self._saved, self.end, self._report_at = self.done, self._about["began_at"] + int(steps), time.monotonic()
        if state.warning and self.rank == 0:
            logger.warning("%s", state.warning)
        state.prepare()
        current = self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        """Save what is not saved yet; all ranks must come here after the same step."""
        if error is None and self._ray is not None:
            self._act(together=True, at_end=True)

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._order.epoch(self.done) if self._order is not None else 0

    def batches(
        self, dataset: Any, *, shuffle: bool = True, drop_last: bool = False, micro_batch: int = 0, **loader: Any
    ) -> Iterator[Any]:
        """Yield this rank's share of each step's samples, until the loop ends; call :meth:`step` after each.

        Args:
            dataset: Anything with ``__len__`` and ``__getitem__``: a map-style torch dataset, a random access source of
                grain, arrays, a tuple or dict of arrays of one length, or a :class:`Mixture` of such.
            shuffle, drop_last: As those of :class:`SampleOrder`.
            micro_batch: Most samples of a batch. A step has several then: call ``backward`` for each, and the
                optimizer and :meth:`step` where :attr:`is_last_part` is true. 0: no bound.
            loader: Options of ``torch.utils.data.DataLoader``, such as ``num_workers``, for a torch dataset.
        """
        order = SampleOrder(length_of(dataset), self._global_batch, self._seed, shuffle, drop_last)
        before = SampleOrder(**self._about.get("order", asdict(order)))
        if before != order:
            changed = f"the checkpoint was written with {before}, and this is {order}"
            raise LoopError(f"{changed}: which samples were seen cannot be told. Give the same, or begin another run")
        self._order, self._about["order"], self._taken = order, asdict(order), []
        sampler = StepBatches(order, range(self.done, self.end), self.rank, self.world_size, micro_batch)
        for (step, part, parts), (samples, batch) in zip(sampler.places(), load(dataset, sampler, loader), strict=True):
            if self.done != step:
                found = f"rank {self.rank} asks for the batch of step {step}, and has done {self.done} steps"
                raise LoopError(f"{found}: call session.step() once for each batch, after the optimizer's step")
            self.samples, self.is_last_part = samples, part == parts - 1
            self.weight = order.weight(step, self.rank, self.world_size, part, parts)
            self._taken.append(samples if self.weight else samples[:0])
            yield batch

    def once(self, dataset: Any, batch: int, **loader: Any) -> Iterator[Any]:
        """Yield this rank's share of a whole dataset, for an evaluation; :attr:`weight` may be 0 in the last batch."""
        order = SampleOrder(length_of(dataset), batch, shuffle=False)
        sampler = StepBatches(order, range(order.steps_per_epoch), self.rank, self.world_size)
        for step, (self.samples, found) in enumerate(load(dataset, sampler, loader)):
            self.weight = order.weight(step, self.rank, self.world_size)
            yield found

    def step(self, metrics: dict[str, Any] | None = None) -> None:
        """Note that an optimizer step is done: report, and save if it is time.

        Args:
            metrics: What is reported besides; rank 0's counts. Numbers, of tensors too, are reported as their mean over
                the steps since the last report; ``step``, ``total_steps``, ``epoch`` and ``samples`` are added.
        """
        self._about["seen"] += self._order.size(self.done) if self._order is not None else self._global_batch
        for name, value in (metrics or {}).items():
            if hasattr(value, "__float__") and not getattr(value, "ndim", 0) and not isinstance(value, bool):
                wide = value.detach() if hasattr(value, "detach") else value
                if getattr(value, "itemsize", 8) < 4:  # half precision would not hold the sum of many
                    wide = wide.float() if hasattr(wide, "float") else wide.astype("float32")
                total, count = self._metrics.get(name, (0.0, 0))
                self._metrics[name] = total + wide if count else wide, count + 1
            else:
                self._metrics[name] = value, 0
        taken, self._taken = self._taken, []
        self.done += 1
        if self._ray is not None:
            self._ledger.add(np.concatenate([self.samples[:0], *taken]), self.done - 1)
            self._act(together=bool(self.cadence.steps and self.done % self.cadence.steps == 0))

    def _act(self, together: bool, at_end: bool = False) -> None:
        """Save or report, if rank 0 says so; that it is asked before each save keeps a rank from waiting in one."""
        restart, decided = ask(self._decide, together)
        saves, reports, where = decided or (False, False, self.done)
        if where != self.done:
            found = f"rank {self.rank} has done {self.done} steps, and rank 0 {where}"
            raise LoopError(f"{found}: all must call session.step() equally often, and leave the loop after the same")
        if self.done > self._saved if at_end else saves or restart:
            self._save(restart)
        elif reports:
            self._report()

    def _decide(self) -> tuple[bool, bool, int]:
        """Return, on rank 0, whether it is time to save and to report, and where it is."""
        idle, late = not self._writing.locked(), time.monotonic() >= self._report_at
        is_due = self.cadence.due(self.done) and self.done > self._saved
        return is_due and (idle or self.cadence.steps > 0), idle and late, self.done

    def _save(self, announced: bool = False) -> None:
        began = time.monotonic()
        if not self._writing.acquire(timeout=_WRITE_SECONDS):  # the copy is overwritten next
            raise LoopError(f"a checkpoint was not uploaded within {_WRITE_SECONDS:.0f} s; is the storage in order?")
        folder = ScratchFolder()
        write_state = self._state.stage(folder.path)
        own = {"random": np.array(random_state().encode()), **self._ledger.close(self.done)}
        about = {**self._about, "step": self.done, "epoch": self.epoch, "world_size": self.world_size}
        about |= {"trained": self.cadence.trained(), "failures": self.cadence.failures, "announced": announced}
        about["cost"] = self.cadence.blocked, self.cadence.background

        context, staged_at, written = self._ray.get_context(), time.monotonic(), threading.Event()

        def upload(checkpoint: Any, name: str) -> Any:
            if not written.is_set():  # Ray Train may repeat an upload, on this rank alone
                if self.rank == 0:
                    Path(folder.path, SESSION_FILE).write_text(json.dumps(about))
                write_state()
                np.savez(rank_file(folder.path, self.rank, self.world_size), **own)
                written.set()
            uploaded = context.get_storage().persist_current_checkpoint(checkpoint, name)
            folder.remove()
            self.cadence.background = time.monotonic() - staged_at
            self._writing.release()
            return uploaded

        self._saved = self.done
        self._report(self._ray.Checkpoint.from_directory(folder.path), upload, now=announced)
        # A loop that was asked to save stands still until it is restarted, which is no cost of saving.
        self.cadence.saved(self.cadence.blocked if announced else time.monotonic() - began)

    def _report(self, checkpoint: Any = None, upload: Callable[..., Any] | None = None, now: bool = False) -> None:
        metrics = {name: float(total / count) if count else total for name, (total, count) in self._metrics.items()}
        self._told = metrics = metrics or self._told  # a save right after a report has its metrics, too
        counts = {"step": self.done, "total_steps": self.end, "samples": self._about["seen"], "epoch": self.epoch}
        began, self._metrics = time.monotonic(), {}
        # Until a restart that waits for this checkpoint there is nothing to do beside its upload.
        mode = self._ray.CheckpointUploadMode.SYNC if now else self._ray.CheckpointUploadMode.ASYNC
        how = {"checkpoint_upload_mode": mode, "checkpoint_upload_fn": upload}
        self._ray.report(metrics | counts, checkpoint, delete_local_checkpoint_after_upload=False, **how)
        self._report_at = (ended := time.monotonic()) + np.clip(_REPORT_TIMES * (ended - began), *_REPORT_SECONDS)

    def _restore(self, checkpoint: Any) -> None:
        with checkpoint.as_directory() as directory:
            about = read_about(directory)
            self._state.read(directory)
            self.done = about["step"]
            self.cadence.blocked, self.cadence.background = about["cost"]
            if about["world_size"] == self.world_size:
                with np.load(rank_file(directory, self.rank, self.world_size), allow_pickle=False) as own:
                    restore_random_state(own["random"].item())
            else:
                seed_everything(self._seed, self.done, self.rank)
            self._ledger = Ledger(self.done)
            if about["run"] != self._about["run"]:  # this one begins here
                self._about["began_at"] = self.done
                return
            self.cadence.trained_seconds = max(self.cadence.trained_seconds, about["trained"])
            if run.current is None:  # which would know it better
                self.cadence.failures = about["failures"] + (not about["announced"])
            self._about = {name: about[name] for name in ("run", "began_at", "seen", "order") if name in about}
            for rank in range(about["world_size"]) if self.rank == 0 else ():
                with np.load(rank_file(directory, rank, about["world_size"]), allow_pickle=False) as own:
                    self._ledger.total = combine([self._ledger.total, own["total"], *own["steps"]])


session = Session
