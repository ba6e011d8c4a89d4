"""A session for ``transformers.Trainer``, which restores its whole state at any step. Tested with transformers 5.24."""

import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast
from transformers.trainer_callback import ExportableState, TrainerState

from prefect_elastic_train.loop.batches import length_of
from prefect_elastic_train.loop.order import SampleOrder, StepBatches
from prefect_elastic_train.loop.scratch_folder import ScratchFolder
from prefect_elastic_train.loop.state import State, random_state, restore_random_state
from prefect_elastic_train.loop.training_session import Session

_STATE = "trainer_state.json"  # file of a checkpoint, with the ``TrainerState``
_BEST = "best"  # folder of a checkpoint, with the best model so far
#: Attributes of the trainer with the running sums of its next log entry.
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


class SessionTrainer(transformers.Trainer, transformers.TrainerCallback, State):  # type: ignore[misc]
    """``transformers.Trainer`` with a session.

    A checkpoint contains that of ``transformers.Trainer`` (model, optimizer, schedule, scaler, ``TrainerState``), the
    best model in the folder ``best``, the running sums of the next log entry, random states, and the state of callbacks
    that are ``ExportableState``. ``load_best_model_at_end`` loads the best model on all ranks. All logged and evaluated
    metrics are reported. ``output_dir`` contains only the best model, in the folder ``best``.

    A subclass that overrides ``compute_loss`` must call this one, or multiply the mean loss of a batch by
    :attr:`weight`.

    Args:
        model: As in ``transformers.Trainer``.
        args: As in ``transformers.Trainer``. ``gradient_accumulation_steps`` is computed from ``global_batch`` and
            ``per_device_train_batch_size``, the largest number of samples of a batch. The seed of the order of samples
            is ``data_seed``, or ``seed`` without it.
        more: Further arguments of ``transformers.Trainer``, by position.
        global_batch: Samples of an optimizer step, over all workers.
        session: Further arguments of :func:`loop.session`, such as ``{"save_every": 100}``.
        options: Further arguments of ``transformers.Trainer``, by keyword.

    Raises:
        ValueError: The last step of an epoch has fewer samples than there are workers, or the trainer has its own
            sampler, another ``train_sampling_strategy`` than "random", ``auto_find_batch_size``, FSDP or DeepSpeed.

    Example::

        SessionTrainer(model, arguments, train_dataset=dataset, global_batch=256).train()
    """

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *more: Any,
        global_batch: int,
        session: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        args = args or transformers.TrainingArguments("tmp_trainer")
        share = math.ceil(global_batch / args.world_size)
        args.gradient_accumulation_steps = math.ceil(share / args.per_device_train_batch_size)
        args.average_tokens_across_devices = True
        super().__init__(model, args, *more, **options)
        self._global_batch = global_batch
        self._session_options = session or {}
        self._weights = deque[float]()  # weights of batches that are loaded and not yet trained on
        self._logged: dict[str, Any] = {}  # metrics since the last step
        self._restored: dict[str, Any] = {"stopped": False}  # from this rank's file, with "sums" and "callbacks"
        self._resumed: ScratchFolder | None = None  # copy of the checkpoint that the trainer resumes from
        self._best = Path(self.args.output_dir, _BEST)
        self.add_callback(self)

    def get_train_dataloader(self) -> Any:
        """Return a data loader that only has the number of batches of an epoch: the session loads the batches."""
        epoch = range(self._order.steps_per_epoch)
        batches = StepBatches(self._order, epoch, 0, self.args.world_size, self.args.per_device_train_batch_size)
        return torch.utils.data.DataLoader(range(len(batches)), generator=torch.Generator())

    def get_batch_samples(self, epoch_iterator: Any, *more: Any) -> Any:
        """Return the batches of the next optimizer step, and their number of items, from the session.

        ``transformers.Trainer`` calls it; ``epoch_iterator`` is not used.
        """
        return super().get_batch_samples(self._batches, *more)

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the current batch, with which batches count by their number of samples."""
        return float(self._weights[0] * self.current_gradient_accumulation_steps)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train with a session from the newest checkpoint of the run. Otherwise as ``transformers.Trainer.train``."""
        length = length_of(self.train_dataset)
        drop_last = self.args.dataloader_drop_last
        if (
            self.args.auto_find_batch_size
            or self.args.train_sampling_strategy != "random"
            or type(self)._get_train_sampler is not transformers.Trainer._get_train_sampler
            or self.is_fsdp_enabled
            or self.is_deepspeed_enabled
        ):
            raise ValueError(
                "SessionTrainer does not support FSDP, DeepSpeed, auto_find_batch_size, a train_sampling_strategy "
                'other than "random", and _get_train_sampler: the session sets the sample order and saves the state'
            )
        left = length % self._global_batch
        if not drop_last and 0 < left < self.args.world_size:
            raise ValueError(f"The last step of an epoch has {left} samples: set dataloader_drop_last=True")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._order = SampleOrder(length, self._global_batch, seed, drop_last=drop_last)
        *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        self.session = Session(self, steps=steps, global_batch=self._global_batch, seed=seed, **self._session_options)
        if self.session.end - steps == self.session.done:  # a new run, from a checkpoint of one that may have stopped
            self._restored["stopped"] = False
        self._random = random_state()
        self._batches = self._steps()
        return super().train(*args, resume_from_checkpoint=self._resumed.path if self._resumed else None, **options)

    def _steps(self) -> Iterator[Any]:
        """Yield this rank's batches from the session, and record each step as done when the trainer requests more."""
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        restore_random_state(self._random)  # the trainer has used random numbers until here
        for batch in self.session.batches(
            self.train_dataset,
            drop_last=self._order.drop_last,
            micro_batch=self.args.per_device_train_batch_size,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        ):
            self._weights.append(self.session.weight)
            yield batch
            if self.session.is_last_part:  # the trainer requests the next batches after evaluation and callbacks
                self._end_step()

    def on_log(self, *_: Any, logs: dict[str, float], **more: Any) -> None:
        """Store the metrics that the trainer has logged, until the session reports the step. The trainer calls it."""
        self._logged.update(logs)

    def _end_step(self) -> None:
        """Record the step in the session as done, with the metrics that were logged since the step before."""
        self.session.step(self._logged)
        self._logged = {}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        """Return the loss of a batch, which in training is multiplied by :attr:`weight`.

        It is not multiplied if it is already divided by the number of tokens of all ranks.
        """
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        if model.training and more.get("num_items_in_batch") is None:
            loss = loss * self.weight
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **more: Any) -> Any:
        """Train on a batch as ``transformers.Trainer`` does, and remove its weight from the queue. Return the loss."""
        loss = super().training_step(*args, **more)
        self._weights.popleft()
        return loss

    @property
    def _has_ended(self) -> bool:
        return bool(self._restored["stopped"]) or self.session.done >= self.session.end

    def _run_epoch(self, **more: Any) -> None:
        if not self._has_ended:  # the training may have ended before a restart
            super()._run_epoch(**more)

    def _finalize_training(self, *args: Any) -> Any:
        if not self._has_ended:
            self._end_step()
            self.session.__exit__(None)
        return super()._finalize_training(*args)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the model to the folder ``best`` of ``output_dir`` if it is the best one so far.

        ``transformers.Trainer`` calls it to save a checkpoint, but the session saves the checkpoints.
        """
        if self.state.best_global_step == self.state.global_step:
            self.save_model(str(self._best), _internal_call=True)
            self._best.mkdir(parents=True, exist_ok=True)  # ranks other than 0 save nothing, but record the path
            self.state.best_model_checkpoint = str(self._best)

    def _load_best_model(self) -> None:
        """Load the best model on rank 0, and broadcast its weights to the other ranks, which may be on other nodes."""
        if self.args.process_index == 0:
            super()._load_best_model()
        broadcast(self.model.state_dict())

    def _exportable(self) -> list[Any]:
        """Return the trainer's callbacks with a state that checkpoints contain (``ExportableState``)."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, ExportableState)]

    def stage(self, directory: str) -> Callable[[], None]:
        """Write the trainer's checkpoint, the state that it lacks, and the best model to ``directory``.

        The session calls it on all ranks. The function that it returns does nothing, since all files are written.
        """
        self.store_flos()
        self.save_model(directory, _internal_call=True)
        self._save_optimizer_and_scheduler(directory)
        self._save_scaler(directory)
        if self.args.process_index == 0:
            self.state.save_to_json(str(Path(directory, _STATE)))
            if best := self.state.best_model_checkpoint:
                shutil.copytree(best, Path(directory, _BEST))
        rank_state = {
            "stopped": self.control.should_training_stop and self.state.global_step < self.state.max_steps,
            "callbacks": [callback.state()["attributes"] for callback in self._exportable()],
            "sums": {name: getattr(self, name) for name in _SUMS},
        }
        torch.save(rank_state, Path(directory, f"trainer-{self.args.process_index:05}.pt"))
        return lambda: None

    def read(self, directory: str) -> None:
        """Read this rank's state from the checkpoint in ``directory``, and copy the checkpoint to a temporary folder.

        ``transformers.Trainer`` then restores itself from that folder. The best model is copied to ``output_dir``.
        """
        self._resumed = ScratchFolder()
        rank = self.args.process_index
        files = sorted(Path(directory).glob("trainer-*.pt"))
        self._restored = torch.load(files[rank % len(files)], "cpu", weights_only=False)
        sums = self._restored["sums"]
        sums["_tr_loss"] = sums["_tr_loss"].to(self.args.device) * (rank < len(files))
        shutil.copytree(directory, self._resumed.path, dirs_exist_ok=True)
        state = TrainerState.load_from_json(str(Path(directory, _STATE)))
        if state.best_model_checkpoint:
            self._best.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                shutil.copytree(Path(directory, _BEST), self._best, dirs_exist_ok=True)
            state.best_model_checkpoint = str(self._best)
            state.save_to_json(str(Path(self._resumed.path, _STATE)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Restore the state that ``transformers.Trainer`` does not restore itself, before the first step.

        These are the running sums of the next log entry, the states of callbacks, and the decision to stop. The trainer
        calls it. It also deletes the temporary copy of the checkpoint.
        """
        control.should_training_stop = self._restored["stopped"]
        if self._resumed:
            self.__dict__.update(self._restored["sums"])
            for callback, attributes in zip(self._exportable(), self._restored["callbacks"], strict=False):
                vars(callback).update(attributes)
            self._resumed.remove()
