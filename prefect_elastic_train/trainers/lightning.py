"""A session for Lightning's ``Trainer``, which restores its whole state at any step. Tested with Lightning 2.6."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import Metric

from prefect_elastic_train.loop.batches import length_of
from prefect_elastic_train.loop.order import SampleOrder, StepBatches
from prefect_elastic_train.loop.state import State, random_state, restore_random_state
from prefect_elastic_train.loop.training_session import Session

CHECKPOINT_NAME = "checkpoint.ckpt"  # Lightning's file in a checkpoint, named as in Ray's integration
_MODELS = "models"  # folder of a checkpoint, with the files of ``ModelCheckpoint``
#: Attributes of Lightning's logger connector that are saved.
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class SessionCallback(Callback, State):  # type: ignore[misc]
    """Lightning callback that trains with a session.

    The gradient of each rank is weighted by the rank's share of the samples. A checkpoint contains Lightning's own
    (optimizers, schedules, precision, loops, callbacks), the files of ``ModelCheckpoint``, the means of ``self.log``,
    torchmetrics of the module, ``trainer.should_stop`` and random states. Each step reports the metrics that were
    logged since the step before. The epochs of a checkpoint from another run (``resume_from``) count towards
    ``Trainer(max_epochs=...)``.

    Args:
        global_batch: Samples of an optimizer step, over all workers.
        micro_batch: Largest number of samples of a batch on a worker. Sets the trainer's ``accumulate_grad_batches``.
            0: a worker's share of ``global_batch``, divided by the trainer's ``accumulate_grad_batches``.
        session: Further arguments of :func:`loop.session`, such as ``seed`` and ``save_every``.

    Raises:
        ValueError: The strategy does not write its checkpoint as one file on rank 0, such as FSDP and DeepSpeed.

    Example::

        session = SessionCallback(global_batch=256, save_every="auto")
        trainer = pl.Trainer(callbacks=[session], strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()])
        prepare_trainer(trainer).fit(module, session.dataloader(dataset), validation_loader)
    """

    def __init__(self, *, global_batch: int, micro_batch: int = 0, **session: Any) -> None:
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._options = session
        self._restored: dict[str, Any] = {}  # this rank's state from the checkpoint
        self._restored_sums: list[dict[str, Any]] = []  # sums of the metrics that were logged before the checkpoint
        self._reported: dict[str, Any] = {}  # metrics of the last step

    def dataloader(self, dataset: Any, **options: Any) -> SessionCallback:
        """Return the data loader for ``trainer.fit``, which yields this rank's batches of each step.

        Args:
            dataset: Dataset to train on, as in :meth:`Session.batches`.
            options: Options of :meth:`Session.batches`, such as ``drop_last`` and ``num_workers``.
        """
        self._dataset = dataset
        self._loader = options
        self._batches = self._steps()
        return self

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set how many batches Lightning's trainer accumulates for an optimizer step.

        Lightning calls it before the training. Raise ValueError if the strategy does not write its checkpoint as one
        file.
        """
        if stage != "fit":
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            strategy = type(trainer.strategy).__name__
            raise ValueError(f"SessionCallback does not support the checkpoints of {strategy}; use RayDDPStrategy()")
        share = math.ceil(self._global_batch / trainer.world_size)
        self._trainer = trainer
        self._batch_size = self._micro_batch or math.ceil(share / trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = math.ceil(share / self._batch_size)

    def __len__(self) -> int:
        order = SampleOrder(
            length_of(self._dataset), self._global_batch, drop_last=self._loader.get("drop_last", False)
        )
        return len(StepBatches(order, range(order.steps_per_epoch), 0, self._trainer.world_size, self._batch_size))

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the session (``loop.session``), which restores the newest checkpoint. Lightning calls it."""
        steps = int(max(1, min(trainer.estimated_stepping_batches, 2**40)))  # it may be infinite
        self.session = Session(self, steps=steps, global_batch=self._global_batch, **self._options)
        if self.session.done + steps == self.session.end:  # a new run, from a checkpoint of one that may have stopped
            trainer.should_stop = False
        self._random = random_state()

    def _steps(self) -> Iterator[Any]:
        """Yield this rank's batches from the session, and record each step as done when Lightning requests more."""
        # Lightning's own checkpoint lacks this rank's torchmetrics and random states.
        self._trainer.fit_loop._restarting = False  # else Lightning does not step the schedules after this epoch
        for name, state in self._restored.get("metrics", {}).items():
            vars(self._metrics()[name]).update(state)
        self._reported = dict(self._trainer.callback_metrics)
        restore_random_state(self._random)
        for batch in self.session.batches(self._dataset, micro_batch=self._batch_size, **self._loader):
            yield batch
            self._end_step()  # Lightning requests the next batch after validation, other callbacks and schedules

    def _end_step(self) -> None:
        """Record the step in the session, with its metrics, if the current batch is the last one of the step."""
        if self.session.is_last_part:
            before = self._reported
            self._reported = dict(self._trainer.callback_metrics)
            self.session.step({name: value for name, value in self._reported.items() if value is not before.get(name)})

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Multiply the gradient by the weight of this rank's batch, since Lightning averages over batches and ranks."""
        weight = self.session.weight * trainer.accumulate_grad_batches
        loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Add the metrics that were logged in this epoch before a restart to the results that Lightning collects."""
        results = trainer.fit_loop.epoch_loop._results
        for sums in self._restored_sums:
            for name in sums.keys() & results.keys():
                result = results[name]
                reduce = result.meta.reduce_fx
                combine = reduce if reduce in (torch.max, torch.min) else torch.add
                for key, value in sums.pop(name).items():
                    setattr(result, key, combine(value, getattr(result, key)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the last step in the session, and save the steps that are not saved yet. Lightning calls it."""
        self._end_step()
        self.session.__exit__(None)

    def _models(self) -> list[ModelCheckpoint]:
        """Return the ``ModelCheckpoint`` callbacks of Lightning's trainer."""
        return [call for call in self._trainer.checkpoint_callbacks if isinstance(call, ModelCheckpoint)]

    def _metrics(self) -> dict[str, Metric]:
        """Return the torchmetrics objects of the Lightning module, by name."""
        return {
            name: module
            for name, module in self._trainer.lightning_module.named_modules()
            if isinstance(module, Metric)
        }

    def stage(self, directory: str) -> Callable[[], None]:
        """Write Lightning's checkpoint, the state that it lacks, and the files of ``ModelCheckpoint`` to ``directory``.

        The session calls it on all ranks. The function that it returns does nothing, since all files are written.
        """
        trainer = self._trainer
        trainer.save_checkpoint(Path(directory, CHECKPOINT_NAME), weights_only=False)
        results = trainer.fit_loop.epoch_loop._results.items()
        rank_state = {
            "parts": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
            "connector": {name: getattr(trainer._logger_connector, name) for name in _LOGGED},
            "logged": {name: item.metric_state for name, item in results if item.is_tensor and not item.has_reset},
            "metrics": {
                name: {**metric.metric_state, "_update_count": metric._update_count}
                for name, metric in self._metrics().items()
            },
        }
        torch.save(rank_state, Path(directory, f"lightning-{trainer.global_rank:05}.pt"))
        for number, models in enumerate(self._models() if trainer.is_global_zero else ()):
            for path in {*models.best_k_models, models.best_model_path, models.last_model_path}:
                if Path(path).is_file():
                    copy = Path(directory, _MODELS, str(number), Path(path).relative_to(str(models.dirpath)))
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)
        return lambda: None

    def read(self, directory: str) -> None:
        """Restore the model, the callbacks and the logged metrics from the checkpoint in ``directory``.

        The checkpoint is also passed to Lightning, which later restores the rest, such as optimizers and loops, from
        it.
        """
        trainer = self._trainer
        files = sorted(Path(directory).glob("lightning-*.pt"))
        rank_states = [torch.load(file, trainer.strategy.root_device, weights_only=False) for file in files]
        self._restored = rank_states[trainer.global_rank % len(files)]
        self._restored_sums = [state["logged"] for state in rank_states[trainer.global_rank :: trainer.world_size]]
        checkpoint = torch.load(Path(directory, CHECKPOINT_NAME), "cpu", weights_only=False)
        for number, models in enumerate(self._models()):
            saved = checkpoint["callbacks"].get(models.state_key)
            if saved and saved["dirpath"]:
                checkpoint["callbacks"][models.state_key] = _move_paths(saved, saved["dirpath"], str(models.dirpath))
            folder = Path(directory, _MODELS, str(number))
            if folder.exists() and trainer.local_rank == 0:
                shutil.copytree(folder, str(models.dirpath), dirs_exist_ok=True)
        loops = checkpoint["loops"]["fit_loop"]
        epoch = loops["epoch_progress"]["current"]
        if epoch["ready"] > epoch["processed"]:  # in an epoch: the batch has ended, so that no validation is repeated
            progress = loops["epoch_loop.batch_progress"]
            for counts in (progress["total"], progress["current"]):
                for name in counts:  # a step may have another number of batches now
                    counts[name] = counts[name] * trainer.accumulate_grad_batches // self._restored["parts"]
                counts["completed"] -= 1
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        trainer.should_stop = self._restored["should_stop"]
        trainer.num_sanity_val_steps = 0
        vars(trainer._logger_connector).update(self._restored["connector"])


def _move_paths(value: Any, old: str, new: str) -> Any:
    """Return the state of a Lightning callback with its paths in the folder ``old`` moved to the folder ``new``."""
    if isinstance(value, dict):
        return {_move_paths(key, old, new): _move_paths(item, old, new) for key, item in value.items()}
    return value.replace(old, new, 1) if isinstance(value, str) else value
