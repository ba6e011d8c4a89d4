"""A Lightning module on generated data, without a session: Ray's integration saves it after each epoch.

`python -m flows.lightning_net` runs it in this process. It needs `pip install lightning`.
Importing this module imports neither torch nor ray nor lightning: the heavy imports are in the function that needs
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from prefect_elastic_train import ElasticScaling, FailureBudget, LocalStorage, elastic_train

SAMPLES, INPUTS = 2048, 8


def train_loop(config: dict[str, Any]) -> None:
    """Fit a small network with Lightning (a Ray Train loop).

    The global batch is the same for any number of workers. The order of samples in Lightning's sampler is a function of
    seed and epoch, and a checkpoint contains model, optimizer, epoch and step. So after any failure, and with any
    number of workers, the same samples make the same updates.

    Args:
        config: `max_epochs`, `global_batch` (samples over all workers; default 64), `seed` (default 0).
    """
    import lightning.pytorch as pl
    import ray.train
    import torch
    from ray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(INPUTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.set_num_threads(1)
    pl.seed_everything(config.get("seed", 0), workers=True)
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, INPUTS, generator=random)
    dataset = torch.utils.data.TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))
    batch = config.get("global_batch", 64) // ray.train.get_context().get_world_size()
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=config["max_epochs"],
            devices="auto",
            accelerator="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()],
            enable_checkpointing=False,  # the callback saves to the run's storage
            enable_progress_bar=False,
            logger=False,
        )
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch, shuffle=True)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(Net(), loader)
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(Net(), loader, ckpt_path=str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)))


@flow(name="lightning net")
def lightning_net(epochs: int = 20, workers: int = 2, storage: LocalStorage | None = None) -> float:
    """Train the network, and return its last loss."""
    result = elastic_train(
        train_loop,
        train_loop_config={"max_epochs": epochs},
        scaling=ElasticScaling(min_workers=1, max_workers=workers),
        failures=FailureBudget(),
        storage=storage or LocalStorage(path=".demo/runs"),
    )
    return float(result.metrics["loss"])


if __name__ == "__main__":
    print(f"loss: {lightning_net():.4f}")
