"""Hugging Face's Trainer on generated data, as it is: Ray's integration reports what it saves.

`python -m flows.transformers_lm` runs it here and now; it needs `pip install transformers[torch]`.
Importing this module imports neither torch nor ray nor transformers: the heavy imports are in the function that needs
them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from prefect import flow

from prefect_elastic_train import ElasticScaling, FailureBudget, LocalStorage, elastic_train

SEQUENCES, LENGTH, WORDS = 2048, 16, 32


def train_loop(config: dict[str, Any]) -> None:
    """Teach a tiny language model to count, with `transformers.Trainer` (a Ray Train loop).

    `per_device_train_batch_size` is what one worker takes: divided here, the global batch, and with it what is learnt,
    is the same at any number of workers.

    Args:
        config: `max_steps`, `save_steps` (default 50), `global_batch` (sequences over all workers; default 32), `seed`
            (default 0).
    """
    import ray.train
    import torch
    import transformers
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    torch.set_num_threads(1)
    transformers.set_seed(config.get("seed", 0))
    first = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(7))
    words = (first + torch.arange(LENGTH) * (1 + first % 3)) % WORDS
    dataset = [{"input_ids": row, "labels": row} for row in words]
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **without))
    checkpoint = ray.train.get_checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=config["max_steps"],
            save_steps=config.get("save_steps", 50),
            save_total_limit=1,  # of these copies; the run keeps its own
            logging_steps=config.get("save_steps", 50),
            per_device_train_batch_size=config.get("global_batch", 32) // ray.train.get_context().get_world_size(),
            learning_rate=3e-3,
            seed=config.get("seed", 0),
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[RayTrainReportCallback()])
        trainer = prepare_trainer(trainer)
        if checkpoint is None:
            trainer.train()
            return
        with checkpoint.as_directory() as saved:
            trainer.train(resume_from_checkpoint=str(Path(saved, RayTrainReportCallback.CHECKPOINT_NAME)))


@flow(name="transformers lm")
def transformers_lm(steps: int = 400, workers: int = 2, storage: LocalStorage | None = None) -> float:
    """Train the model; return its last loss."""
    result = elastic_train(
        train_loop,
        train_loop_config={"max_steps": steps},
        scaling=ElasticScaling(min_workers=1, max_workers=workers),
        failures=FailureBudget(),
        storage=storage or LocalStorage(path=".demo/runs"),
    )
    return float(result.metrics["loss"])


if __name__ == "__main__":
    print(f"loss: {transformers_lm():.4f}")
