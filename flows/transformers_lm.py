"""Hugging Face's Trainer on generated data, with a session, which restores its whole state and the best model.

`python -m flows.transformers_lm` runs it in this process. It needs the extra `transformers`.
Importing this module imports neither torch nor ray nor transformers: the heavy imports are in the function that needs
them.
"""

from __future__ import annotations

import tempfile
from typing import Any

from prefect import flow

from prefect_elastic_train import ElasticScaling, FailureBudget, LocalStorage, elastic_train

SEQUENCES = 2048  # sequences in the dataset
EVALUATED = 128  # sequences that are held out
LENGTH = 16  # tokens of a sequence
TOKENS = 32  # size of the vocabulary


def train_loop(config: dict[str, Any]) -> None:
    """Train a tiny language model to count, with `SessionTrainer` (a Ray Train loop).

    The global batch, and so the result, is the same for any number of workers.

    Args:
        config: `max_steps`, `eval_steps` (default 50), `global_batch` (sequences over all workers; default 32), `seed`
            (default 0), `save_every` (steps, or the default "auto").
    """
    import torch
    import transformers

    from prefect_elastic_train.trainers.transformers import SessionTrainer

    torch.set_num_threads(1)
    transformers.set_seed(config.get("seed", 0))
    first = torch.randint(TOKENS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(7))
    sequences = (first + torch.arange(LENGTH) * (1 + first % 3)) % TOKENS
    dataset = [{"input_ids": row, "labels": row} for row in sequences]
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": TOKENS, "n_positions": LENGTH}
    # The random numbers of dropout would depend on the number of workers.
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    eval_steps = config.get("eval_steps", 50)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=config["max_steps"],
            eval_strategy="steps",
            eval_steps=eval_steps,
            save_strategy="steps",  # the best model is chosen from these steps
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
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **no_dropout)),
            arguments,
            train_dataset=dataset[:-EVALUATED],
            eval_dataset=dataset[-EVALUATED:],
            global_batch=config.get("global_batch", 32),
            session={"save_every": config.get("save_every", "auto")},
        ).train()


@flow(name="transformers lm")
def transformers_lm(steps: int = 400, workers: int = 2, storage: LocalStorage | None = None) -> float:
    """Train the model, and return its last evaluation loss."""
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
