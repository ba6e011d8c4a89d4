"""A session in Lightning's ``Trainer``: restores its whole state, also in the middle of an epoch. Tested with 2.6."""

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

#: Names in a checkpoint: Lightning's own file, named as in Ray's integration, and the folder of ``ModelCheckpoint``.
CHECKPOINT_NAME, _MODELS = "checkpoint.ckpt", "models"
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class SessionCallback(Callback, State):  # type: ignore[misc]
    """Train with a session: ``trainer.fit(module, callback.dataloader(dataset), ...)``.

    The gradient of each rank is weighted by the rank's share of the samples. Checkpoints hold everything that is in
    Lightning's own (optimizers, schedules, precision, loops, callbacks), the files of ``ModelCheckpoint``, the means of
    ``self.log``, torchmetrics of the module, ``trainer.should_stop`` and random states. Each step reports the metrics
    that were logged since the step before. The epochs of a checkpoint from another run (``resume_from``) count towards
    ``Trainer(max_epochs=...)``.

    Args:
        global_batch: Samples of an optimizer step, over all workers.
        micro_batch: Largest number of samples of a batch on a worker; sets the trainer's ``accumulate_grad_batches``.
            0: a worker's share of ``global_batch``, divided by the trainer's ``accumulate_grad_batches``.
        session: Further arguments of :func:`loop.session`, such as ``seed`` and ``save_every``.

    Raises:
        ValueError: The strategy does not write its checkpoint as one file on rank 0. FSDP and DeepSpeed do not.
    """

    def __init__(self, *, global_batch: int, micro_batch: int = 0, **session: Any) -> None:
        self._global_batch, self._micro_batch, self._options = global_batch, micro_batch, session
        #: Of a checkpoint: what is this rank's, and the sums of what was logged in the epoch, to be added.
        self._own: dict[str, Any] = {}
        self._known: dict[str, Any] = {}  # metrics that are reported
        self._logged: list[dict[str, Any]] = []

    def dataloader(self, dataset: Any, **options: Any) -> SessionCallback:
        """Return the loader of the samples of each step; the options are those of ``session.batches``."""
        self._dataset, self._loader = dataset, options
        self._batches = self._steps()
        return self

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set how many batches an optimizer step has."""
        if stage != "fit":
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            strategy = type(trainer.strategy).__name__
            raise ValueError(f"SessionCallback with {strategy}, whose checkpoint is not one file: use RayDDPStrategy()")
        share = math.ceil(self._global_batch / trainer.world_size)
        self._trainer, self._part = trainer, self._micro_batch or math.ceil(share / trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = math.ceil(share / self._part)

    @property
    def _order(self) -> SampleOrder:
        drop_last = self._loader.get("drop_last", False)
        return SampleOrder(length_of(self._dataset), self._global_batch, drop_last=drop_last)

    def __len__(self) -> int:
        order = self._order
        return len(StepBatches(order, range(order.steps_per_epoch), 0, self._trainer.world_size, self._part))

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the session, which restores the newest checkpoint."""
        trainer.fit_loop.setup_data()  # asks for the dataset
        limits = [trainer.max_epochs * self._order.steps_per_epoch, trainer.max_steps]
        steps = max(1, min([limit for limit in limits if limit >= 0], default=2**40))
        self.session = Session(self, steps=steps, global_batch=self._global_batch, **self._options)
        if self.session.done + steps == self.session.end:  # a new run; the run of its first checkpoint may have stopped
            trainer.should_stop = False
        self._random = random_state()

    def _steps(self) -> Iterator[Any]:
        self._restore_rank()
        for batch in self.session.batches(self._dataset, micro_batch=self._part, **self._loader):
            yield batch
            self._end_step()  # Lightning asks for the next batch after validation, other callbacks and schedules

    def _end_step(self) -> None:
        if self.session.is_last_part:
            before, self._known = self._known, dict(self._trainer.callback_metrics)
            self.session.step({name: value for name, value in self._known.items() if value is not before.get(name)})

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Weight the gradient, of which Lightning takes the mean over batches and ranks."""
        weight = self.session.weight * trainer.accumulate_grad_batches
        loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Add what was logged in this epoch before a restart."""
        results = trainer.fit_loop.epoch_loop._results
        for logged in self._logged:
            for name in logged.keys() & results.keys():
                reduce = results[name].meta.reduce_fx
                combine = reduce if reduce in (torch.max, torch.min) else torch.add
                for of, value in logged.pop(name).items():
                    setattr(results[name], of, combine(value, getattr(results[name], of)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is not saved yet."""
        self._end_step()
        self.session.__exit__(None)

    def _models(self) -> list[ModelCheckpoint]:
        return [one for one in self._trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]

    def _metrics(self) -> dict[str, Metric]:
        return {name: one for name, one in self._trainer.lightning_module.named_modules() if isinstance(one, Metric)}

    def stage(self, directory: str) -> Callable[[], None]:
        """Write Lightning's checkpoint, the state it lacks and the files of ``ModelCheckpoint``. Call on all ranks."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        trainer.save_checkpoint(Path(directory, CHECKPOINT_NAME), weights_only=False)
        results = trainer.fit_loop.epoch_loop._results.items()
        own = {
            "parts": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
            "connector": {name: getattr(connector, name) for name in _LOGGED},
            "logged": {name: one.metric_state for name, one in results if one.is_tensor and not one.has_reset},
            "metrics": {
                name: {**one.metric_state, "_update_count": one._update_count} for name, one in self._metrics().items()
            },
        }
        torch.save(own, Path(directory, f"lightning-{trainer.global_rank:05}.pt"))
        for number, models in enumerate(self._models() if trainer.is_global_zero else ()):
            for path in {*models.best_k_models, models.best_model_path, models.last_model_path}:
                if path and Path(path).exists():
                    copy = Path(directory, _MODELS, str(number), Path(path).relative_to(str(models.dirpath)))
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)
        return lambda: None

    def read(self, directory: str) -> None:
        """Restore model and callbacks, and hand the rest to Lightning, which restores it next."""
        trainer = self._trainer
        files = sorted(Path(directory).glob("lightning-*.pt"))
        owns = [torch.load(file, trainer.strategy.root_device, weights_only=False) for file in files]
        self._own = owns[trainer.global_rank % len(owns)]
        self._logged = [own["logged"] for own in owns[trainer.global_rank :: trainer.world_size]]
        checkpoint = torch.load(Path(directory, CHECKPOINT_NAME), "cpu", weights_only=False)
        for number, models in enumerate(self._models()):
            saved, there = checkpoint["callbacks"].get(models.state_key), Path(directory, _MODELS, str(number))
            if saved and saved["dirpath"]:
                checkpoint["callbacks"][models.state_key] = _moved(saved, saved["dirpath"], str(models.dirpath))
            if there.exists() and trainer.local_rank == 0:
                shutil.copytree(there, str(models.dirpath), dirs_exist_ok=True)
        _to_batch_end(checkpoint["loops"]["fit_loop"], trainer.accumulate_grad_batches, self._own["parts"])
        trainer._checkpoint_connector._loaded_checkpoint = checkpoint
        for restore in ("datamodule", "model", "callbacks"):
            getattr(trainer._checkpoint_connector, f"restore_{restore}")()
        trainer.should_stop, trainer.num_sanity_val_steps = self._own["should_stop"], 0
        vars(trainer._logger_connector).update(self._own["connector"])

    def _restore_rank(self) -> None:
        """Restore the state that Lightning's checkpoint lacks, directly before the first batch."""
        self._trainer.fit_loop._restarting = False  # or the schedules would not be stepped at the end of this epoch
        for name, state in self._own.get("metrics", {}).items():
            vars(self._metrics()[name]).update(state)
        self._known = dict(self._trainer.callback_metrics)
        restore_random_state(self._random)


def _moved(value: Any, old: str, new: str) -> Any:
    """Return a state with the paths of another folder."""
    if isinstance(value, dict):
        return {_moved(name, old, new): _moved(one, old, new) for name, one in value.items()}
    return value.replace(old, new, 1) if isinstance(value, str) and value.startswith(old) else value


def _to_batch_end(loops: dict[str, Any], parts: int, before: int) -> None:
    """Set the progress to the end of the batch, so that Lightning does not repeat the validation after a restart."""
    progress = loops["epoch_loop.batch_progress"]
    if loops["epoch_progress"]["current"]["ready"] > loops["epoch_progress"]["current"]["processed"]:
        for counts in (progress["total"], progress["current"]):
            counts.update({name: count * parts // before for name, count in counts.items()})
            counts["completed"] -= 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
