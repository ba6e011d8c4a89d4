"""Hugging Face's Trainer on generated data, with a session: the best model is loaded on all ranks, whatever dies.

`python -m flows.transformers_lm` runs it here and now; it needs the extra `transformers`.
Importing this module imports neither torch nor ray nor transformers: the heavy imports are in the function that needs
them.
"""

from __future__ import annotations

import tempfile
from typing import Any

from prefect import flow

from prefect_elastic_train import ElasticScaling, FailureBudget, LocalStorage, elastic_train

SEQUENCES, EVALUATED, LENGTH, WORDS = 2048, 128, 16, 32


def train_loop(config: dict[str, Any]) -> None:
    """Teach a tiny language model to count, with `SessionTrainer` (a Ray Train loop).

    The global batch, and with it what is learnt, is the same at any number of workers.

    Args:
        config: `max_steps`, `eval_steps` (default 50), `global_batch` (sequences over all workers; default 32), `seed`
            (default 0), `save_every` (steps, or the default "auto").
    """
    import torch
    import transformers

    from prefect_elastic_train.trainers.transformers import SessionTrainer

    torch.set_num_threads(1)
    transformers.set_seed(config.get("seed", 0))
    first = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(7))
    words = (first + torch.arange(LENGTH) * (1 + first % 3)) % WORDS
    dataset = [{"input_ids": row, "labels": row} for row in words]
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    # Dropout draws other random numbers at another number of workers.
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    eval_steps = config.get("eval_steps", 50)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=config["max_steps"],
            eval_strategy="steps",
            eval_steps=eval_steps,
            save_strategy="steps",  # of what the best model is chosen from
            save_steps=eval_steps,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            logging_steps=eval_steps,
            per_device_train_batch_size=config.get("global_batch", 32),
            learning_rate=3e-3,
            seed=config.get("seed", 0),
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        SessionTrainer(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **without)),
            arguments,
            train_dataset=dataset[:-EVALUATED],
            eval_dataset=dataset[-EVALUATED:],
            global_batch=config.get("global_batch", 32),
            session={"save_every": config.get("save_every", "auto")},
        ).train()


@flow(name="transformers lm")
def transformers_lm(steps: int = 400, workers: int = 2, storage: LocalStorage | None = None) -> float:
    """Train the model; return its last loss in an evaluation."""
    result = elastic_train(
        train_loop,
        train_loop_config={"max_steps": steps},
        scaling=ElasticScaling(min_workers=1, max_workers=workers),
        failures=FailureBudget(),
        storage=storage or LocalStorage(path=".demo/runs"),
    )
    return float(result.metrics["eval_loss"])


if __name__ == "__main__":
    print(f"loss: {transformers_lm():.4f}")
