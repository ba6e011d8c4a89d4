"""The session of a train loop: orders the samples, saves and reports, and restores the loop after a restart."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from prefect_elastic_train.trackers.tracker import Tracker

from . import context as run
from .batches import length_of, load
from .cadence import Cadence
from .ledger import Ledger
from .metrics import StepMetrics
from .numeric_guard import Guard, GuardedSteps
from .order import MAX_LENGTH, Indices, SampleOrder, StepBatches
from .phases import Phases
from .rank_files import missing_rank_files_message, rank_file
from .recovery_points import RankState, RecoveryPoints, StateReader
from .restart_notice import announced_growth, local_context, poll_restart, train_context
from .scratch_folder import ScratchFolder, remove_abandoned_folders
from .state import State, random_state, restore_random_state, seed_everything

logger = logging.getLogger(__name__)

SESSION_FILE = "loop.json"  # file of a checkpoint, with the session's metadata
#: Shortest and longest time between two reports without a checkpoint, in seconds.
_REPORT_SECONDS = (5.0, 100.0)
#: Within these, the time between two reports as a multiple of a report's duration. It waits for Ray's controller.
_REPORT_TIMES = 200.0
#: Timeout of a save that waits for the upload of the save before, and of trackers that wait for the last commit.
_WRITE_SECONDS = 3600.0

#: Module state, read from outside to show the loop's progress: the session of this worker process.
current: Session | None = None


class LoopError(RuntimeError):
    """A train loop uses its session in a wrong way. The message contains the remedy."""


def read_about(directory: str | Path) -> dict[str, Any]:
    """Return the metadata that a session has written into a checkpoint, such as the number of steps done.

    Args:
        directory: Folder of the checkpoint.

    Returns:
        A dict with ``step`` and ``epoch`` (steps and epochs that are done), ``world_size``, ``order`` (the arguments of
        :class:`SampleOrder`) and ``seen`` (samples seen by the run), among others.

    Raises:
        LoopError: The checkpoint was not written by a session, or is incomplete.

    Example::

        with checkpoint_directory(result.checkpoint_uri) as directory:
            epoch = loop.read_about(directory)["epoch"]
    """
    file = Path(directory, SESSION_FILE)
    if not file.exists():
        raise LoopError(f"the checkpoint {directory} was not written by a session: it has no {SESSION_FILE}")
    if missing := missing_rank_files_message(os.listdir(directory)):
        raise LoopError(
            f"the checkpoint {directory} is incomplete: {missing}. "
            "Start from another one, or train under a new run_name"
        )
    about: dict[str, Any] = json.loads(file.read_text())
    return about


class Session(AbstractContextManager["Session"]):
    """Context manager that makes a train loop resumable. :data:`loop.session` is this class.

    On creation it restores the loop from the newest checkpoint, if there is one. :meth:`batches` yields each rank its
    share of each global batch, :meth:`step` reports and saves. All ranks must create the session and do the same steps.

    A loop saves at the interval ``save_every``. It also saves before each announced restart of the worker group, before
    the training's ``timeout_seconds`` are over, and at its end. Checkpoints are uploaded in the background.

    Args:
        state: State to save and restore, such as ``TorchState(model=model, optimizer=optimizer)``.
        steps: Optimizer steps of this run, at least 1. Steps of another run, from whose checkpoint this run started
            (``resume_from``), are not included.
        global_batch: Samples of an optimizer step, over all workers; at least the number of workers.
        seed: Random seed of the sample order. Also seeds the global random generators of Python, numpy and torch at the
            start, and after a restart with another number of workers, when they cannot be restored.
        save_every: Interval between saves: an int is a number of steps, a string such as ``"90s"`` a number of seconds.
            ``"auto"`` computes the interval from the failures of this run and the measured cost of a save.
        save_within: Shortest and longest interval that ``"auto"`` chooses, in seconds.
        means: Name or names of metrics that are reported as their mean over the steps since the last report. Others,
            such as learning rates and evaluations, are reported by their last value.
        save_scored: Save each step that reports the score (``CheckpointPolicy.score_attribute``), so that the
            checkpoint has the weights that were scored. If the score is reported at every step, only the first two
            steps are saved for it.
        shards: Number of parts of each global batch: a power of two, at least the number of workers. Each part is a
            batch, and the gradients of all parts are added in a fixed order, so the weights are bitwise identical with
            any number of workers. For unwrapped modules in a ``TorchState``; call :meth:`backward`. 0: no shards.
        mesh: The torch ``DeviceMesh`` of the data parallel dimension, such as ``mesh["dp"]``. Ranks that differ only in
            another dimension, such as tensor parallel, get the same samples. Default: each rank has its own share.
        recovery_points: Interval in steps between recovery points: copies of the state in memory that outlives the
            worker. A restarted worker group continues from the newest one if it is newer than the newest checkpoint.
            ``"auto"`` computes the interval from the failures of this run and the measured cost of a point, which
            blocks the loop for at most 1 % of the time. ``"off"``: restarts continue from checkpoints.
        replay_every: Interval in steps between steps with replays: batches that are computed again, to find wrong
            results of damaged hardware. The ranks compare checksums of gradients and weights. With ``shards``, a replay
            is computed by another rank, if there is one. Call the optimizer and :meth:`step` only if
            :attr:`is_last_part`. 0: no replays.
        guard: The :class:`Guard` against losses and weights that are not finite numbers, and loss spikes. None: nothing
            is checked.
        tracker: The trackers to which the metrics of each step are sent, made by :func:`loop.track`. None: no trackers.

    Attributes:
        done: Optimizer steps that are done, by all worker groups of the run.
        end: Value of ``done`` at which the loop ends.
        rank: Rank of this worker.
        world_size: Number of workers.
        most_workers: Largest number of workers with at least one sample, or shard, each in a step.
        weight: Weight of this rank's mean over the current batch. Multiply the mean by it, sum over the batches of a
            step (or of :meth:`once`), and average over the ranks, to get the mean over all samples. With ``shards``,
            sum over the ranks instead of averaging.
        samples: Indices of the current batch's samples, an int64 array.
        is_last_part: True if the current batch is the last of its step.
        is_replay: True if the current batch is a replay: its gradients are only compared. Leave it out of metrics.
        began_at: Start of this worker's first step, in seconds since the epoch; 0.0 before. It is the time of the first
            batch from :meth:`batches`, or, without, the time at which the session was created.
        began_from: Value of ``done`` before this worker's first step.
        cadence: The :class:`Cadence` that decides when to save.
        recovery_points: The :class:`RecoveryPoints` of this rank.
        phases: The :class:`Phases` of this rank's loop.
        tracker: The :class:`Tracker` that was given.

    Raises:
        ValueError: An argument is out of range.
        TypeError: The dataset cannot be read by index, such as a stream, or the state does not support ``shards`` or
            ``replay_every``.
        StateMismatchError: The checkpoint has other parts or shapes than the state.
        LoopError: The ranks are not at the same step, :meth:`step` was not called after a batch, the dataset has
            changed, or the loop had a session before: a checkpoint holds the position of one session.

    Example::

        state = loop.TorchState(model=model, optimizer=optimizer)
        with loop.session(state, steps=1000, global_batch=256, seed=0) as session:
            for inputs, targets in session.batches(dataset):
                loss = loss_of(model(inputs), targets) * session.weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.step({"loss": loss})
    """

    done = 0
    weight = 1.0
    samples: Indices = np.zeros(0, dtype=np.int64)
    is_last_part = True
    is_replay = False
    began_at = 0.0
    held_for = 0  # number of the announced growth for which this rank waits, with its state in memory; 0: none
    _in_batches = False  # the loop is working on a batch of `batches`
    _is_open = False  # the last step is not yet saved or reported
    _must_save = False  # the last step must be saved
    _must_report = False  # the last step must be reported, with a checkpoint or without
    _is_required = False  # the last step must be saved: the loop has requested it, or it has a score
    _required_step = 0  # the last step before it that had to be saved
    committed = 0  # step of the newest commit that this rank knows of

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
        shards: int = 0,
        mesh: Any = None,
        recovery_points: int | str = "off",
        replay_every: int = 0,
        guard: Guard | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        global current
        if steps < 1:
            raise ValueError(f"steps={steps}: must be at least 1")
        self._state = state
        self._global_batch = index(global_batch)
        self._seed = int(seed)
        self._save_scored = save_scored
        train = train_context() or local_context()
        self._can_save = train_context() is not None  # False in Ray Train's local mode and outside of Ray Train
        self._ray = train and import_module("ray.train")
        self.rank = train.get_world_rank() if train else 0
        self.world_size = train.get_world_size() if train else 1
        context = run.of_worker(train)
        self._guard = guard and GuardedSteps(guard, state)
        self._skipped = context.skipped_steps
        # The name is the id in a checkpoint that was written under plain Ray Train.
        self._run_ids = (context.run_id, context.run_name)
        self.cadence = Cadence(save_every, save_within, context.failures, context.trained_seconds, context.ends_at)
        self.recovery_points = RecoveryPoints(recovery_points, self.rank, self.world_size)
        if not _is_whole_in_memory(type(state)):
            self.recovery_points.turn_off(f"{type(state).__name__} must define stage, read, capture and restore itself")
        if self._can_save and current:
            raise LoopError(
                "this loop already had a session, and a checkpoint holds the position of only one: "
                "give one session the steps of all phases, and choose the phase by session.done"
            )
        self._shards = shards
        self._set_share(mesh)
        if (shards or replay_every) and mesh is not None:
            raise ValueError("a mesh supports neither shards nor replay_every")
        if shards and not (self.world_size <= shards <= global_batch and shards.bit_count() == 1):
            raise ValueError(
                f"shards={shards}: must be a power of two between the number of workers ({self.world_size}) and "
                f"global_batch ({global_batch})"
            )
        self._order = SampleOrder(MAX_LENGTH, self._global_batch)  # until `batches` knows the dataset
        self._about: dict[str, Any] = {"run": context.run_id, "began_at": 0, "seen": 0}  # metadata for checkpoints
        self._metrics = StepMetrics(means, context.score_attribute, self.rank == 0)
        self.tracker = tracker or Tracker([], {})
        if run.current and self._can_save:  # else nothing is known of commits
            self.tracker.committed = 0
        self._ledger = Ledger()
        self._step_samples: list[Indices] = []  # samples of the current step
        self._writing = threading.Lock()  # locked until a checkpoint is uploaded
        self.phases = Phases()
        remove_abandoned_folders()
        seed_everything(seed, 0, self._share[0])  # ranks with the same samples get the same random numbers
        checkpoint = self._ray and self._ray.get_checkpoint()
        memory = self.recovery_points.memory
        states = memory.read_restored() if memory else []
        if states:
            self._restore_point(states)
        elif checkpoint:
            self._restore(checkpoint)
            self.committed = self.done
            self.tracker.committed = max(self.done, self.tracker.committed)
        self.began_from = self.done
        self._saved = 0 if states else self.done
        self.end = self._about["began_at"] + index(steps)
        self._entered_at = time.time()
        # Time of the next report. After a restore from memory, the first report and save are due some seconds later.
        self._report_at = time.monotonic() + _REPORT_SECONDS[0] * bool(states)
        self._save_at = self._report_at if states else math.inf
        if state.warning and self.rank == 0:
            logger.warning("%s", state.warning)
        state.prepare()
        if hasattr(state, "watch_gradients") and not shards and self._global_batch % self._share[1] == 0:  # equal work
            self.phases.clock = state.watch_gradients(self.phases.end_work)
        self._gradients = state.shard_gradients(self.rank, self.world_size, shards) if shards else None
        if self._gradients:
            self._record_environment(self._gradients)
        self._replay_every = replay_every
        self._replays: Any = state.replays(self.rank, self.world_size, shards) if replay_every else None
        if self._replays and not self._replays.is_supported:
            logger.warning("No replays: the ranks have different hardware, versions or settings")
            self._replay_every = 0
        current = self
        if states:  # repeat a required save now, if the restored step is one on rank 0
            self._is_open = True
            self._must_save = self._must_report = self._is_required
            self._close_step()

    def _set_share(self, mesh: Any) -> None:
        """Set this rank's share of the samples of each step, from its rank or its position in ``mesh``.

        Raise ValueError if a step has fewer samples than there are shares.
        """
        data_ranks = [*range(self.world_size)] if mesh is None else mesh.mesh.flatten().tolist()
        count = len(data_ranks)
        self._share = (self.rank if mesh is None else data_ranks.index(mesh.get_rank()), count)
        self._is_counted = 0 in data_ranks  # one of the ranks with the same samples records them
        self.most_workers = self._shards or self._global_batch * self.world_size // count
        if self._global_batch < count:
            raise ValueError(
                f"global_batch={self._global_batch} is below the {count} workers, each of which needs a sample"
                f" of every step. Make it larger, or train with max_workers={self._global_batch}"
            )

    def _record_environment(self, gradients: Any) -> None:
        """Record the hardware and settings that affect rounding, and warn if they differ from those of the run."""
        now, first = (environment | {"shards": self._shards} for environment in gradients.environments)
        first = self._about.setdefault("environment", first)
        if differing := [f"{name} {now[name]}, not {first.get(name)}" for name in now if now[name] != first.get(name)]:
            logger.warning(
                "The weights may not be bitwise identical with any number of workers: rank %d has %s as the run began",
                self.rank,
                "; ".join(differing),
            )

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        """Save the steps that are not saved yet, when the loop leaves the session without an error.

        All ranks must leave the session after the same step.
        """
        if error is None:
            self._open_step(None, save=self.done > self._saved)
            self._close_step(at_end=True)
        self.phases.begin("")
        if error is None and self.tracker.runs:
            if self._can_save:
                # In a thread, since the controller warns of a loop that waits in Ray for long. So may an upload take.
                committed = self._ray.CheckpointConsistencyMode.COMMITTED
                waiting = threading.Thread(
                    target=self._ray.get_all_reported_checkpoints, args=(committed,), daemon=True
                )
                waiting.start()
                waiting.join(_WRITE_SECONDS)
            self.tracker.close()

    @property
    def epoch(self) -> int:
        """Number of the epoch that contains the next step, from 0; 0 before :meth:`batches` has begun."""
        return self._order.epoch(self.done)

    def batches(
        self, dataset: Any, *, shuffle: bool = True, drop_last: bool = False, micro_batch: int = 0, **loader: Any
    ) -> Iterator[Any]:
        """Yield the batches of this rank, its share of each step's samples, until all steps are done.

        Call :meth:`step` after the last batch of each step.

        A step is saved and reported when the loop requests the next batch, or when the session ends. So an evaluation
        between :meth:`step` and the next batch belongs to the step: if it is interrupted, both are done again.

        Args:
            dataset: Anything with ``__len__`` and ``__getitem__``: a map-style torch dataset, a random access source of
                grain, arrays, a tuple or dict of arrays of one length, or a :class:`Mixture` of such. Or a Ray Data
                dataset of :func:`read_parquet`, or the shard of one that is not split. All ranks must call this
                together.
            shuffle: If False, each epoch has the order of the dataset. Of a Ray Data dataset, the row groups are
                shuffled, and the rows in each.
            drop_last: Leave out the last step of an epoch if it has fewer samples than ``global_batch``.
            micro_batch: Largest number of samples of a batch, for gradient accumulation. A step then has several
                batches: call ``backward`` for each, and call the optimizer and :meth:`step` if :attr:`is_last_part`.
                0: one batch a step.
            loader: Options of ``torch.utils.data.DataLoader``, such as ``num_workers``. If there are any, or if the
                dataset is one of torch, the samples are loaded with it. For a Ray Data dataset there are none.

        Yields:
            The samples of a batch, collated as the dataset's library does: arrays, tensors, tuples or dicts of these.
            Of a Ray Data dataset, a dict of arrays.

        Raises:
            TypeError: The dataset cannot be read from a position, or an option of the loader is not allowed.
            LoopError: The dataset, ``shuffle`` or ``drop_last`` differ from those of the checkpoint, or :meth:`step`
                was not called after a batch.
        """
        rows: Any = None
        if type(dataset).__module__.startswith("ray.data"):
            rows = import_module(f"{__package__}.ray_data")
            dataset = getattr(dataset, "_base_dataset", dataset)
        length = int(rows.source_of(dataset).rows.sum()) if rows else length_of(dataset)
        order = SampleOrder(length, self._global_batch, self._seed, shuffle, drop_last)
        before = SampleOrder(**self._about.setdefault("order", asdict(order)))
        if before != order:
            raise LoopError(
                f"the checkpoint was written with {before}, and this is {order}, "
                "so it is unknown which samples were seen. Give the same dataset, global_batch, seed, shuffle and "
                "drop_last, or train under a new run_name"
            )
        self._close_step()
        self._order = order
        self._step_samples = []
        if self._shards and micro_batch:
            raise ValueError(f"micro_batch={micro_batch}: not supported with shards; use more shards")
        steps = range(self.done, self.end)
        sampler = StepBatches(order, steps, *self._share, micro_batch, self._shards, self._replay_every)
        if rows:
            loaded = rows.load_rows(dataset, sampler, self.rank, self.world_size, **loader)
        else:
            loaded = load(dataset, sampler, loader)
        self.phases.begin("loading")
        for (step, part, parts, is_last, replay), (samples, batch) in zip(sampler.positions(), loaded, strict=True):
            if self.done != step:
                raise LoopError(
                    f"rank {self.rank} requested the batch of step {step}, but has done {self.done} steps: "
                    "call session.step() once for each batch, after the optimizer's step"
                )
            if step in self._skipped:
                if is_last:
                    self._ledger.add(samples[:0], step)
                    self._about["skipped"] = [*self._about.get("skipped", []), step]
                    self._complete_step(None, False)
                    self._close_step()
                continue
            is_twice = self._replay_every and not (self._shards or part or step % self._replay_every)
            for number in (1, -1) if is_twice else (replay,):
                if number and not self._replays.begin(number):
                    continue
                self.samples = samples
                self.is_replay = number > 0
                self.is_last_part = is_last and not self.is_replay
                self.weight = order.weight(step, *sampler.share, part, parts)
                if self._gradients:
                    if not number:
                        self._gradients.begin(part, self.weight)
                    seed_everything(self._seed, step, part)
                if self.weight and self._is_counted and not self.is_replay:
                    self._step_samples.append(samples)
                self.began_at = self.began_at or time.time()
                self._in_batches = True
                self.phases.begin("step" if self.done > self.began_from else "first step")
                self.phases.begin_work()
                try:
                    yield batch
                finally:
                    self._in_batches = False
                if number:
                    self._replays.end(step, step > self.began_from)
                self._close_step()
                self.phases.begin("loading")
        self.phases.begin("evaluation")

    def once(self, dataset: Any, batch: int, **loader: Any) -> Iterator[Any]:
        """Yield this rank's share of a whole dataset once, in its order, for an evaluation.

        ``sum(mean(batch) * session.weight for batch in session.once(...))``, averaged over the ranks, is the mean over
        the dataset. If the last batch has fewer samples than there are ranks, a rank without a share gets one sample of
        weight 0. :attr:`weight` and :attr:`samples` belong to the evaluation until the iterator ends or is closed, and
        then to the training batch again. Do not use a training batch during an evaluation.

        Args:
            dataset: As in :meth:`batches`.
            batch: Samples of a batch, over all ranks.
            loader: As in :meth:`batches`.
        """
        order = SampleOrder(length_of(dataset), batch, shuffle=False)
        sampler = StepBatches(order, range(order.steps_per_epoch), *self._share)
        of_training = (self.weight, self.samples)
        interrupted = self.phases.begin("evaluation")
        try:
            for step, (self.samples, samples) in enumerate(load(dataset, sampler, loader)):
                self.weight = order.weight(step, *self._share) * order.size(step) / order.length
                yield samples
        finally:
            self.weight, self.samples = of_training
            if self.phases.name == "evaluation":
                self.phases.begin(interrupted)

    def backward(self, loss: Any) -> None:
        """Compute the gradients of the current batch. Without ``shards``, it is ``loss.backward()``.

        With them, call it once for each batch. After the last batch of a step (:attr:`is_last_part`), the parameters
        have the gradients of the global batch, the same on all ranks. Clip them then.

        Args:
            loss: Mean over the batch, multiplied by :attr:`weight`: a tensor.
        """
        if self._gradients is None or self.is_replay:
            loss.backward()
            return
        self._gradients.backward(loss)
        if self.is_last_part:  # for the optimizer, the same random numbers on all ranks
            seed_everything(self._seed, self.done, self._shards)

    def step(self, metrics: dict[str, Any] | None = None, save: bool = False) -> None:
        """Record an optimizer step as done.

        The session saves it if a save is due, and reports at most every few seconds.

        Args:
            metrics: Metrics to report; those of rank 0 are used. Numbers may be tensors or arrays with one element.
                ``step``, ``total_steps``, ``epoch`` and ``samples`` are added. Report the score on all ranks or on
                none, since all ranks save together; ranks other than 0 may report None. Leave it out at steps without
                an evaluation.
            save: Save this step in any case. Must be the same on all ranks.

        Raises:
            LoopError: It was not called once for each batch.
            NumericError: The guard has found a problem.
        """
        if "order" in self._about and self.done >= self.end:
            raise LoopError("session.step() was called after the last batch: call it once for each batch")
        if ((self._gradients or self._replays) and not (self._in_batches and self.is_last_part)) or (
            self._gradients and not self._gradients.has_gradients
        ):
            raise LoopError(
                "with shards or replay_every, use session.batches, and call optimizer.step() and session.step() only "
                "if session.is_last_part. With shards, call session.backward(loss) instead of loss.backward()"
            )
        self.began_at = self.began_at or self._entered_at
        if self._guard:
            self._guard.check(metrics or {}, self.done, self._about.get("skipped", []))
        self._close_step()
        self._about["seen"] += self._order.size(self.done)
        if self._ray:
            self._ledger.add(np.concatenate([self.samples[:0], *self._step_samples]), self.done)
        self._step_samples = []
        self.phases.end_step(self.done)
        self._complete_step(metrics, save)
        if self._in_batches:
            self.phases.begin("evaluation")
        else:
            self._close_step()
            self.phases.begin("step")

    def _complete_step(self, metrics: dict[str, Any] | None, save: bool) -> None:
        """Count the step as done, and open it."""
        if self._is_required:
            self._required_step = self.done
            self._is_required = False
        self.done += 1
        self._open_step(metrics, save)

    def save(self, metrics: dict[str, Any] | None = None) -> None:
        """Save a checkpoint now. Call it on all ranks.

        Args:
            metrics: Further metrics of the last step, such as those of an evaluation.
        """
        self._open_step(metrics, save=True)
        self._close_step()

    def _open_step(self, metrics: dict[str, Any] | None, save: bool) -> None:
        """Add metrics to the last step, and mark the step as not yet saved or reported; ``save``: it must be saved."""
        has_score = self._metrics.add(metrics or {}, self.done)
        self.tracker.log(self.done, metrics or {})
        self._is_open = True
        is_required = save or (has_score and self._save_scored)
        self._is_required |= is_required
        self._must_save |= is_required
        self._must_report |= self._must_save or has_score

    def _close_step(self, at_end: bool = False) -> None:
        """Save or report the last step if rank 0 decides to, or if a restart is announced. Do nothing if it is closed.

        Each save begins with a broadcast of rank 0's step, so that ranks at other steps raise an error and do not hang.

        Args:
            at_end: The loop has ended, so an announced restart is no reason to save.
        """
        if not self._is_open or self._ray is None:
            return
        self._is_open = False
        interrupted = self.phases.begin("save")
        self._save_or_report(at_end)
        self.phases.begin(interrupted)

    def _save_or_report(self, at_end: bool) -> None:
        """Make a recovery point, a checkpoint or a report, whatever is due."""
        points = self.recovery_points
        is_point_due = points.every and (self.done % points.every == 0 or self._is_required)
        # Until a required save is committed, its step stays in memory, so that a restart repeats the save.
        if is_point_due and self._required_step <= self.committed and not at_end:
            points.make(self.done, self._capture)
        is_due = bool(self.cadence.steps and self.done % self.cadence.steps == 0)
        restart, decision = poll_restart(self._decide, at_end or is_due or self._must_report)
        if decision is None:
            return
        save, report, done, points.every, may_hold = decision
        if done != self.done:
            raise LoopError(
                f"rank {self.rank} has done {self.done} steps, and rank 0 {done}: all must call "
                "session.step() and session.save() equally often, report the score on all ranks or none, and leave "
                "the loop after the same step"
            )
        growth = announced_growth() if restart and may_hold and not save else 0
        if growth and not at_end:
            self._hold(growth)
        elif save or (restart and not at_end):
            self._save(restart)
        elif report:
            self._report()
        self._must_save = self._must_report = False

    def _decide(self) -> tuple[bool, bool, int, int, bool]:
        """Return the decisions of rank 0: whether to save, whether to report, the number of steps that are done, the
        interval of recovery points, and whether the state may stay in memory at a growth of the worker group.

        A plain tuple, because the process through which Ray broadcasts may not be able to import this package.
        """
        is_idle = not self._writing.locked()
        is_due = self.cadence.due(self.done) or time.monotonic() >= self._save_at
        is_due = is_due and self.done > self._saved and (is_idle or self.cadence.steps > 0)
        save = self._can_save and (is_due or self._must_save)
        report = (is_idle and time.monotonic() >= self._report_at) or self._must_report
        if self._must_report and not (self._must_save or save):
            logger.warning("The score of step %d has no checkpoint to rank: save_scored=False", self.done)
        points = self.recovery_points
        may_hold = points.step > 0 and self._required_step <= self.committed
        return save, report, self.done, points.plan(self.cadence.between_failures()), may_hold

    def _save(self, announced: bool) -> None:
        """Save a checkpoint and report it. It is uploaded in the background, unless a restart is announced.

        Args:
            announced: True if a restart of the worker group waits for this checkpoint.
        """
        began = time.monotonic()
        if not self._writing.acquire(timeout=_WRITE_SECONDS):  # the copy is overwritten next
            raise LoopError(f"a checkpoint was not uploaded within {_WRITE_SECONDS:.0f} s. Check the storage")
        folder = ScratchFolder()
        write_state = self._state.stage(folder.path)
        random = json.dumps(random_state(), default=lambda array: array.tolist())
        rank_arrays = {"random": np.array(random.encode()), **self._ledger.flush(self.done), **self.tracker.points()}
        about = self._describe()
        staged_at = time.monotonic()
        written = threading.Event()

        def upload(checkpoint: Any, name: str) -> Any:
            if not written.is_set():  # Ray Train may repeat an upload, on this rank alone
                if self.rank == 0:
                    Path(folder.path, SESSION_FILE).write_text(json.dumps(about))
                write_state()
                np.savez(rank_file(folder.path, self.rank, self.world_size), **rank_arrays)
                written.set()
            uploaded = self._ray.get_context().get_storage().persist_current_checkpoint(checkpoint, name)
            folder.remove()
            self.cadence.background = time.monotonic() - staged_at
            self._writing.release()
            return uploaded

        self._saved = self.done
        self._save_at = math.inf
        self._report(
            synchronous=announced,
            checkpoint=self._ray.Checkpoint.from_directory(folder.path),
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,
        )
        # Before a restart, the report waits until the worker is restarted. That time is not a cost of saving.
        self.cadence.saved(self.cadence.blocked if announced else time.monotonic() - began)

    def _describe(self) -> dict[str, Any]:
        """Return the session's metadata for a checkpoint or a recovery point."""
        return {
            **self._about,
            "step": self.done,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "trained": self.cadence.trained(),
            "failures": self.cadence.failures,
            "cost": (self.cadence.blocked, self.cadence.background),
        }

    def _capture(self) -> RankState:
        """Return this rank's state for a recovery point."""
        description, arrays = self._state.capture()
        points = self.tracker.points()
        values = (self._ledger.seen, self._describe(), self._is_required, random_state(), self._metrics, points)
        return (values, description), arrays

    def _restore_point(self, states: list[StateReader]) -> None:
        """Restore state, step, random states, ledger and metrics from the recovery point of the group before."""
        is_same_size = len(states) == self.world_size
        chosen = [states[self.rank]] if is_same_size else states
        read = [(*state.description(), state) for state in chosen]
        index_of_rank = self.rank % len(chosen)
        self._state.restore([state[1:] for state in read], index_of_rank)
        _, about, self._is_required, random, self._metrics, *more = read[index_of_rank][0]
        self.tracker.restore(*more or [{}])  # a version without trackers may have made it
        self._adopt(about)
        if is_same_size:
            restore_random_state(random)
        continued = read if is_same_size else read[self.rank :: self.world_size]
        self._ledger.continue_from(seen for (seen, *_), *_ in continued)

    def _hold(self, growth: int) -> None:
        """Complete a recovery point, and wait for the growth of the worker group, which continues from it."""
        points = self.recovery_points
        points.make(self.done, self._capture)
        self.held_for = growth if points.step == self.done else 0
        self._report()

    def _adopt(self, about: dict[str, Any]) -> None:
        """Continue after the step of a checkpoint or recovery point, with its metadata if it is of this run."""
        self.done = about["step"]
        seed_everything(self._seed, self.done, self._share[0])
        self.cadence.blocked, self.cadence.background = about["cost"]
        if about["run"] not in self._run_ids:  # the checkpoint of another run: this run begins here
            self._about["began_at"] = self.done
            return
        self.cadence.trained_seconds = max(self.cadence.trained_seconds, about["trained"])
        if run.current is None:  # under plain Ray Train, which does not count failures
            self.cadence.failures = about["failures"] + 1
        self._about = about
        if "order" in about:
            self._order = SampleOrder(**about["order"])

    def _report(self, synchronous: bool = False, **upload: Any) -> None:
        """Report the metrics since the last report to Ray Train. ``upload``: checkpoint, if any, and its options."""
        began = time.monotonic()
        modes = self._ray.CheckpointUploadMode
        self._ray.report(
            self._metrics.collect(self.done)
            | {"step": self.done, "total_steps": self.end, "samples": self._about["seen"], "epoch": self.epoch},
            checkpoint_upload_mode=modes.SYNC if synchronous else modes.ASYNC,
            **upload,
        )
        ended = time.monotonic()
        self._report_at = ended + np.clip(_REPORT_TIMES * (ended - began), *_REPORT_SECONDS)

    def _restore(self, checkpoint: Any) -> None:
        """Restore state, step, random states and ledger from a checkpoint of this run or of another run."""
        with checkpoint.as_directory() as directory:
            about = read_about(directory)
            self._state.read(directory)
            self._adopt(about)
            for rank in range(self.rank, about["world_size"], self.world_size):  # each file is read by one rank
                with np.load(rank_file(directory, rank, about["world_size"])) as arrays:
                    if self._about is about:  # a checkpoint of this run
                        self._ledger.continue_from([arrays["total"], *arrays["steps"]])
                        self.tracker.restore(arrays)
                    if about["world_size"] == self.world_size:
                        restore_random_state(json.loads(arrays["random"].item()))


def _is_whole_in_memory(state: type) -> bool:
    """Return True if the most derived class that defines one of the four methods of a state defines all of them.

    Otherwise a subclass could change how a state is saved, but not how it is captured.
    """
    methods = {"stage", "read", "capture", "restore"}
    return methods <= next(vars(base).keys() for base in state.__mro__ if methods & vars(base).keys())


session = Session
