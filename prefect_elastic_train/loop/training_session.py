"""A train loop that can be interrupted anywhere: it sees every sample once, and saves at the right moment."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from prefect_elastic_train.loop import context as run
from prefect_elastic_train.loop.batches import length_of, load
from prefect_elastic_train.loop.cadence import Cadence
from prefect_elastic_train.loop.ledger import Ledger, combine
from prefect_elastic_train.loop.notice import ask, local_context, train_context
from prefect_elastic_train.loop.order import Indices, SampleOrder, StepBatches
from prefect_elastic_train.loop.parts import rank_file
from prefect_elastic_train.loop.scratch import ScratchFolder, remove_left_folders
from prefect_elastic_train.loop.state import State, random_state, restore_random_state, seed_everything

logger = logging.getLogger(__name__)

SESSION_FILE = "loop.json"
#: The shortest and longest time between two reports without a checkpoint, and as many times what the last one took: it
#: waits for Ray Train's controller. And how long a save may wait for the one before it to be uploaded.
_REPORT_SECONDS, _REPORT_TIMES, _WRITE_SECONDS = (5.0, 100.0), 200.0, 3600.0

_SAVED_IN_A_ROW = 2  # consecutive steps with a score that are saved; with more, the score is one of every step

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
            raise LoopError(
                f"the checkpoint {directory} is incomplete, or of an earlier version of this package: "
                f"it has no {part.name}. Start from another one, or train under a new run_name"
            )
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
        means: Names of the metrics that are reported as their mean over the steps since the last report. All others,
            such as learning rates, counters and evaluations, are reported by their last value.
        save_scored: Whether a step that reports the score (``CheckpointPolicy.score_attribute``) is saved, so that
            the checkpoint has the weights that were scored. A score that is reported at every step causes no saves
            from the third step in a row on.
        mesh: The torch ``DeviceMesh`` of the dimension along which the data is divided, such as ``mesh["dp"]``. Ranks
            that differ only in another dimension, such as tensor parallel, get the same samples. Default: every rank
            has its own share.

    Attributes:
        done, end: Optimizer steps that are done, by all worker groups of the run, and that are when the loop ends.
        rank, world_size: This worker's rank, and how many there are.
        most_workers: Number of workers for which a step has samples; with more, a session is refused.
        weight: The weight of this rank's mean over the current batch. Means that are multiplied by it, summed over the
            batches of a step (or of :meth:`once`) and averaged over the ranks, are the mean over all samples.
        samples: The indices of the current batch's samples.
        is_last_part: Whether the current batch is the last of its step.
        began_at: Start of this worker's first step in the session, in seconds since the epoch; 0.0 until it is known.
            With :meth:`batches` it is the time at which the first batch was yielded. Without, it is the time at which
            the session was created, and becomes known with the first call of :meth:`step`.
        began_from: Optimizer steps that were done before this worker's first step.
        cadence: What decides when to save.

    Raises:
        ValueError: An argument is out of range.
        TypeError: The samples of the dataset cannot be read by position, such as those of a stream.
        StateMismatchError: The checkpoint is of another model.
        LoopError: The ranks are not at the same step, :meth:`step` was not called after a batch, the dataset has
            changed, or the loop has had a session before: a checkpoint holds the position of one session only.
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
        means: Collection[str] = ("loss",),
        save_scored: bool = True,
        mesh: Any = None,
    ) -> None:
        global current
        context, experiment = train_context(), ""
        #: Whether checkpoints can be saved: False in Ray Train's local mode and outside of Ray Train.
        self._can_save = context is not None
        context = context or local_context()
        self._ray: Any = None
        self.rank = 0
        self.world_size = 1
        if context is not None:
            self._ray = import_module("ray.train")
            self.rank = context.get_world_rank()
            self.world_size = context.get_world_size()
            experiment = context.get_experiment_name()
        known = run.current or run.RunContext(experiment, experiment, 1, "", "")  # under plain Ray Train, and outside
        self.cadence = Cadence(save_every, save_within, known.failures, known.trained_seconds, known.ends_at)
        for name, value in (("steps", steps), ("global_batch", global_batch)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number from 1 on")
        if isinstance(means, str):
            raise ValueError(f"means={means!r}: must be a collection of names, such as means=[{means!r}]")
        if self._can_save and current is not None and current._can_save:
            raise LoopError(
                "this loop already had a session, and a checkpoint holds the position of only one: "
                "give one session the steps of all phases, and choose the phase by session.done"
            )
        data_ranks = [*range(self.world_size)] if mesh is None else mesh.mesh.flatten().tolist()
        #: Index of this rank's share and number of shares; whether this rank records the samples of its share.
        self._share = self.rank if mesh is None else data_ranks.index(mesh.get_rank()), len(data_ranks)
        self._counts = 0 in data_ranks
        self.most_workers = int(global_batch) * self.world_size // len(data_ranks)
        if global_batch < len(data_ranks):
            raise ValueError(
                f"global_batch={global_batch} is below the {len(data_ranks)} workers, each of which needs a sample"
                f" of every step. Make it larger, or train with max_workers={global_batch}"
            )
        self._state, self._seed, self._global_batch = state, int(seed), int(global_batch)
        self._order: SampleOrder | None = None
        self._about: dict[str, Any] = {"run": known.run_id, "began_at": 0, "seen": 0}  # said in checkpoints
        self.done, self.weight, self.samples, self.is_last_part = 0, 1.0, np.zeros(0, dtype=np.int64), True
        self._ledger, self._taken, self._writing = Ledger(), list[Indices](), threading.Lock()
        #: Sum of each metric since the last report and number of its values (0: not a number); metrics of that report.
        self._metrics, self._reported = dict[str, tuple[Any, int]](), dict[str, Any]()
        self._run = known.run_id, known.run_name  # the name, in a checkpoint that plain Ray Train has written
        self._score = known.score_attribute
        self._means, self._save_scored = frozenset(means) - {self._score}, save_scored
        #: Steps of the last score and of the last report; number of consecutive steps with a score, up to the last one.
        self._scored_at = self._reported_at = self._scores_in_a_row = 0
        #: The last step is not yet saved or reported; it must be saved; it has a score, and not every step has one. The
        #: loop is working on a batch of `batches`.
        self._is_open = self._must_save = self._has_score = self._in_batches = False
        remove_left_folders()
        seed_everything(seed, 0, self._share[0])  # alike where the data is
        if self._ray is not None and (checkpoint := self._ray.get_checkpoint()) is not None:
            self._restore(checkpoint)
        self.began_at, self.began_from, self._entered_at = 0.0, self.done, time.time()
        self._saved, self.end, self._report_at = self.done, self._about["began_at"] + int(steps), time.monotonic()
        if state.warning and self.rank == 0:
            logger.warning("%s", state.warning)
        state.prepare()
        current = self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        """Save what is not saved yet; all ranks must come here after the same step."""
        if error is None and self._ray is not None:
            self._must_save = self._must_save or self.done > self._saved
            self._act(together=True, at_end=True)

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._order.epoch(self.done) if self._order is not None else 0

    def batches(
        self, dataset: Any, *, shuffle: bool = True, drop_last: bool = False, micro_batch: int = 0, **loader: Any
    ) -> Iterator[Any]:
        """Yield this rank's share of each step's samples, until the loop ends; call :meth:`step` after each.

        A step is saved and reported when the loop requests the next batch, or when the session ends. So an evaluation
        between :meth:`step` and the next batch belongs to the step: after a kill in it, both are done again.

        Args:
            dataset: Anything with ``__len__`` and ``__getitem__``: a map-style torch dataset, a random access source of
                grain, arrays, a tuple or dict of arrays of one length, or a :class:`Mixture` of such.
            shuffle, drop_last: As those of :class:`SampleOrder`.
            micro_batch: Most samples of a batch. A step has several then: call ``backward`` for each, and the
                optimizer and :meth:`step` where :attr:`is_last_part` is true. 0: no bound.
            loader: Options of ``torch.utils.data.DataLoader``, such as ``num_workers``. With any of them the samples
                are loaded by it, as those of a torch dataset always are.
        """
        order = SampleOrder(length_of(dataset), self._global_batch, self._seed, shuffle, drop_last)
        before = SampleOrder(**self._about.setdefault("order", asdict(order)))
        if before != order:
            raise LoopError(
                f"the checkpoint was written with {before}, and this is {order}: "
                "it is unknown which samples were seen. Give the same dataset, global_batch, seed, shuffle and "
                "drop_last, or train under a new run_name"
            )
        self._close_step()
        self._order, self._taken = order, []
        sampler = StepBatches(order, range(self.done, self.end), *self._share, micro_batch)
        for (step, part, parts), (samples, batch) in zip(sampler.places(), load(dataset, sampler, loader), strict=True):
            if self.done != step:
                raise LoopError(
                    f"rank {self.rank} asks for the batch of step {step}, and has done {self.done} steps: "
                    "call session.step() once for each batch, after the optimizer's step"
                )
            self.samples, self.is_last_part = samples, part == parts - 1
            self.weight = order.weight(step, *self._share, part, parts)
            self._taken.append(samples if self.weight and self._counts else samples[:0])
            self.began_at = self.began_at or time.time()
            self._in_batches = True
            try:
                yield batch
            finally:
                self._in_batches = False
            self._close_step()

    def once(self, dataset: Any, batch: int, **loader: Any) -> Iterator[Any]:
        """Yield this rank's share of a whole dataset, for an evaluation; ``batch`` counts the samples over all ranks.

        ``sum(mean(batch) * session.weight for batch in session.once(...))``, averaged over the ranks, is the mean over
        the dataset. If the last batch has fewer samples than there are ranks, a rank without a share gets one sample of
        weight 0. ``weight`` and ``samples`` are those of the evaluation until the iterator has ended or is closed, and
        then those of the training batch again: so do not use a training batch while an evaluation goes on.
        """
        order = SampleOrder(length_of(dataset), batch, shuffle=False)
        sampler = StepBatches(order, range(order.steps_per_epoch), *self._share)
        of_training = self.weight, self.samples
        try:
            for step, (self.samples, found) in enumerate(load(dataset, sampler, loader)):
                begin, end = order.bounds(step, *self._share)
                self.weight = (end - begin) * self._share[1] / order.length
                yield found
        finally:
            self.weight, self.samples = of_training

    def step(self, metrics: dict[str, Any] | None = None, save: bool = False) -> None:
        """Count an optimizer step as done; save it if it is time, and report it now and then.

        Args:
            metrics: Values to report; those of rank 0 count. ``step``, ``total_steps``, ``epoch`` and ``samples`` are
                added. Report the score on all ranks or on none, since all ranks save together.
            save: Whether to save this step in any case; the same on all ranks.
        """
        if self._order is not None and self.done >= self.end:
            raise LoopError("session.step() was called after the last batch: call it once for each batch")
        self._close_step()
        self._about["seen"] += self._order.size(self.done) if self._order is not None else self._global_batch
        taken, self._taken = self._taken, []
        self.began_at = self.began_at or self._entered_at
        self.done += 1
        if self._ray is not None:
            self._ledger.add(np.concatenate([self.samples[:0], *taken]), self.done - 1)
        self._note(metrics, save)
        if not self._in_batches:
            self._close_step()

    def save(self, metrics: dict[str, Any] | None = None) -> None:
        """Save now, with more metrics of the step just done, such as an evaluation's; all ranks must call this."""
        self._note(metrics, save=True)
        self._close_step()

    def _note(self, metrics: dict[str, Any] | None, save: bool) -> None:
        for name, value in (metrics or {}).items():
            if self._is_score(name, value) and self._scored_at < self.done:
                self._scores_in_a_row = self._scores_in_a_row + 1 if self._scored_at == self.done - 1 else 1
                self._has_score, self._scored_at = self._scores_in_a_row <= _SAVED_IN_A_ROW, self.done
                if self._scores_in_a_row == _SAVED_IN_A_ROW + 1 and value is None and self.rank == 0:
                    logger.warning("%s is None at each step: leave it out where nothing is evaluated", name)
            with suppress(Exception):  # not an array with a single number
                value = value.reshape(()) + 0  # a copy, since the loop may overwrite its own
            if hasattr(value, "__float__") and not getattr(value, "ndim", 0) and not isinstance(value, bool):
                wide = value.detach() if hasattr(value, "detach") else value
                if getattr(value, "itemsize", 8) < 4:  # half precision would not hold the sum of many
                    wide = wide.float() if hasattr(wide, "float") else wide.astype("float32")
                total, count = self._metrics.get(name, (0.0, 0)) if name in self._means else (0.0, 0)
                self._metrics[name] = total + wide if count else wide, count + 1
            else:
                self._metrics[name] = value, 0
        self._is_open, self._must_save = True, self._must_save or save

    def _is_score(self, name: str, value: Any) -> bool:
        """True for the score, and for a mapping that contains it: Ray names that score ``outer/inner``."""
        is_outer = name == self._score.partition("/")[0] and isinstance(value, Mapping | None)
        return name == self._score or is_outer

    def _close_step(self) -> None:
        """Save or report the step just done, unless that has happened."""
        if self._is_open and self._ray is not None:
            is_due = bool(self.cadence.steps and self.done % self.cadence.steps == 0)
            self._must_save = self._must_save or (self._has_score and self._save_scored)
            self._act(together=is_due or self._must_save or self._has_score)
        self._is_open = False

    def _act(self, together: bool, at_end: bool = False) -> None:
        """Save or report if rank 0 decides so.

        Each save begins with a broadcast of rank 0's step, so that ranks at other steps raise instead of hanging.
        """
        restart, decided = ask(self._decide, together)
        saves, reports, at = decided or (False, False, self.done)
        if at != self.done:
            raise LoopError(
                f"rank {self.rank} has done {self.done} steps, and rank 0 {at}: all must call session.step() and "
                "session.save() equally often, report the score on all ranks or none, and leave the loop after the "
                "same step"
            )
        if saves or (restart and not at_end):
            self._save(restart)
        elif reports:
            self._report()
        self._is_open = self._must_save = self._has_score = False

    def _decide(self) -> tuple[bool, bool, int]:
        """Return, on rank 0, whether it is time to save and to report, and the steps that it has done."""
        idle, late = not self._writing.locked(), time.monotonic() >= self._report_at
        is_due = self.cadence.due(self.done) and self.done > self._saved and (idle or self.cadence.steps > 0)
        saves = self._can_save and (is_due or self._must_save)
        if self._has_score and not (saves or self._save_scored):
            logger.warning("%s of step %d has no checkpoint to rank: save_scored=False", self._score, self.done)
        return saves, (idle and late) or self._has_score or self._must_save, self.done

    def _save(self, announced: bool = False) -> None:
        began = time.monotonic()
        if not self._writing.acquire(timeout=_WRITE_SECONDS):  # the copy is overwritten next
            raise LoopError(f"a checkpoint was not uploaded within {_WRITE_SECONDS:.0f} s; is the storage in order?")
        folder = ScratchFolder()
        write_state = self._state.stage(folder.path)
        own = {"random": np.array(random_state().encode()), **self._ledger.close(self.done)}
        about = {
            **self._about,
            "step": self.done,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "trained": self.cadence.trained(),
            "failures": self.cadence.failures,
            "announced": announced,
            "scored": (self._scored_at, self._scores_in_a_row),
            "cost": (self.cadence.blocked, self.cadence.background),
        }
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
        if self._reported_at == self.done:  # a second report of the same step repeats the metrics of the first
            metrics = self._reported | metrics
        if self._scored_at != self.done:  # the score is that of other weights
            metrics = {name: value for name, value in metrics.items() if not self._is_score(name, value)}
        self._reported, self._reported_at = metrics, self.done
        counts = {"step": self.done, "total_steps": self.end, "samples": self._about["seen"], "epoch": self.epoch}
        began, self._metrics = time.monotonic(), {}
        # Until a restart that waits for this checkpoint there is nothing to do beside its upload.
        mode = self._ray.CheckpointUploadMode.SYNC if now else self._ray.CheckpointUploadMode.ASYNC
        self._ray.report(
            metrics | counts,
            checkpoint,
            checkpoint_upload_mode=mode,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,
        )
        self._report_at = (ended := time.monotonic()) + np.clip(_REPORT_TIMES * (ended - began), *_REPORT_SECONDS)

    def _restore(self, checkpoint: Any) -> None:
        with checkpoint.as_directory() as directory:
            about = read_about(directory)
            self._state.read(directory)
            self.done = about["step"]
            self._scored_at, self._scores_in_a_row = about["scored"]
            self.cadence.blocked, self.cadence.background = about["cost"]
            if about["world_size"] == self.world_size:
                with np.load(rank_file(directory, self.rank, self.world_size), allow_pickle=False) as own:
                    restore_random_state(own["random"].item())
            else:
                seed_everything(self._seed, self.done, self._share[0])
            self._ledger = Ledger(self.done)
            if about["run"] not in self._run:  # of another run: this one begins here
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
