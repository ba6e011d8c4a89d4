"""Loops that show what Ray Train does: `python -m tests.support.ray_trainings FOLDER` runs them with it alone.

A loop writes down what it sees, as *facts*: `{name: [value of rank 0, value of rank 1]}`, the last one of each rank.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.loops import write_ledger

if TYPE_CHECKING:
    from ray.train import Checkpoint

WORKERS = 2


@dataclass(frozen=True)
class Training:
    """What both are asked for."""

    loop: Callable[[dict[str, Any]], Any]
    max_failures: int = 0
    keep: int | None = None
    score: str | None = None


class _Notes:
    """Writes the facts of a worker."""

    def __init__(self, config: dict[str, Any]) -> None:
        import ray.train

        self.path, self.rank = config["facts"], ray.train.get_context().get_world_rank()
        self("starts", time.time())

    def __call__(self, fact: str, value: Any) -> None:
        write_ledger(self.path, fact=fact, rank=self.rank, value=value)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that the workers have written."""
    facts: dict[str, Any] = {}
    starts = [0] * WORKERS
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        facts.setdefault(line["fact"], [None] * WORKERS)[line["rank"]] = line["value"]
        starts[line["rank"]] += line["fact"] == "starts"
    return {**facts, "starts": starts}


def own_name(path: str) -> str:
    """Return the name that a loop has given to the checkpoint of a path."""
    return re.sub(r"\.a\d+\.g\d+\.r\d+$", "", Path(path).name)


def files_of(run: Path) -> dict[str, list[str]]:
    """Return the files of each checkpoint in a run directory."""
    return {
        own_name(folder.name): sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        for folder in run.glob("[!.]*")
        if folder.is_dir()
    }


def _failure(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def _folder(*files: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    for name in files:
        (folder / name).touch()
    return folder


def _copied(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Upload as the example in Ray's documentation does."""
    import shutil

    import ray.train

    path = ray.train.get_context().get_storage().build_checkpoint_path_from_name(name)
    shutil.copytree(checkpoint.path, path)
    return ray.train.Checkpoint.from_directory(path)


def validate(checkpoint: Checkpoint, weight: int = 1, fail: bool = False) -> dict[str, Any]:
    """Score a checkpoint by the number of its files."""
    if fail:
        raise ValueError("cannot be validated")
    with checkpoint.as_directory() as directory:
        return {"validated": weight * sum(path.is_file() for path in Path(directory).rglob("*"))}


def reporting_loop(config: dict[str, Any]) -> dict[str, int]:
    """Report in all ways that end no training."""
    import ray
    import ray.train.collective
    import torch  # Ray refuses tensors only where torch is imported
    from ray import train
    from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode, ValidationTaskConfig

    note, context = _Notes(config), train.get_context()
    rank, storage = note.rank, train.get_context().get_storage()
    sizes = [context.get_world_size(), context.get_local_world_size()]
    note("ranks", [*sizes, context.get_world_rank(), context.get_local_rank(), context.get_node_rank()])
    note("name", context.get_experiment_name())

    def report(name: str | None, folder: Path | None, **options: Any) -> bool:
        metrics = {"report": name, "rank": rank, **options.pop("metrics", {})}
        train.report(metrics, Checkpoint(folder) if folder else None, checkpoint_dir_name=name, **options)
        return folder is not None and folder.exists()

    def newest() -> str | None:
        checkpoint = train.get_checkpoint()
        return checkpoint and own_name(checkpoint.path)

    def reported() -> dict[str, Any]:
        found = train.get_all_reported_checkpoints()
        return {one.metrics["report"]: [one.status.value, one.metrics] for one in found}

    def mine() -> Path:
        return _folder(f"rank-{rank}", "shared")

    report("metrics", None)
    note("checkpoint after metrics", newest())
    report("by-0", mine() if rank == 0 else None)
    note("checkpoint after by-0", newest())
    note("folder of by-0", Path(train.get_checkpoint().path).name if rank == 0 else "")
    report("by-1", mine() if rank == 1 else None)
    note("local directory is kept", report("by-both", mine()))
    note("checkpoint after by-both", newest())
    note("local directory is deleted", report("deleted", mine(), delete_local_checkpoint_after_upload=True))
    report(None, mine())
    note("default name", newest().rpartition("_")[0][:13])
    for step in range(2):
        report("twice", _folder(f"file-{step}"))

    background = mine()
    report("background", background, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    def slow(checkpoint: Checkpoint, name: str) -> Checkpoint:
        time.sleep(1)
        return _copied(checkpoint, name)

    slowly = {"checkpoint_upload_fn": slow, "checkpoint_upload_mode": CheckpointUploadMode.ASYNC}
    report("slow", mine() if rank == 0 else None, **slowly)
    report("after-slow", mine(), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    note("order of uploads", list(reported())[-2:])
    note("deleted in the background", background.exists())
    report("own-upload", mine() if rank == 0 else None, checkpoint_upload_fn=_copied)
    mode = CheckpointUploadMode.ASYNC if rank else CheckpointUploadMode.SYNC
    report("two-modes", mine(), checkpoint_upload_mode=mode)

    placed = Path(storage.build_checkpoint_path_from_name("placed"))
    placed.mkdir(parents=True, exist_ok=True)
    (placed / f"rank-{rank}").touch()
    report("placed", placed, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    note("checkpoint after placed", newest())

    described = Checkpoint(mine())
    described.set_metadata({"made by": "rank 0"})
    train.report(
        {"report": "described", "rank": rank}, described if rank == 0 else None, checkpoint_dir_name="described"
    )
    ray.train.collective.barrier()
    note("metadata", train.get_all_reported_checkpoints()[-1].checkpoint.get_metadata())

    note("tensor", _failure(lambda: report("tensor", None, metrics={"loss": torch.ones(1)})))
    note("validation without a checkpoint", _failure(lambda: report("nothing", None, validation=True)))
    report("validated", mine(), validation=True)
    task = ValidationTaskConfig(fn_kwargs={"weight": 10})
    report("validated-with", mine(), validation=task)
    report("not-valid", mine(), validation=ValidationTaskConfig(fn_kwargs={"fail": True}))
    train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    found = reported()
    note("status", {name: status for name, (status, _) in found.items()})
    note("metrics of by-1", found["by-1"][1])
    note("validations", [found[name][1].get("validated") for name in ("validated", "validated-with", "not-valid")])
    return {"returned": rank}


def kept_loop(config: dict[str, Any]) -> None:
    """Lose a worker after the third of four checkpoints."""
    import ray.train.collective
    from ray import train

    note, checkpoint = _Notes(config), train.get_checkpoint()
    first = int(own_name(checkpoint.path).removeprefix("step-")) + 1 if checkpoint else 0
    note(f"starts at {first}", [one.metrics["score"] for one in train.get_all_reported_checkpoints()])
    for step, score in list(enumerate((1, 5, 3, 4)))[first:]:
        folder = _folder("step") if note.rank == 0 else None
        name = f"step-{step}"
        train.report({"score": score, "step": step}, folder and train.Checkpoint(folder), checkpoint_dir_name=name)
        note(f"kept at {step}", [one.metrics["score"] for one in train.get_all_reported_checkpoints()])
        ray.train.collective.barrier()
        if step == 2 and first == 0 and note.rank == 1:
            os._exit(3)


class TwoArguments(Exception):
    """Cannot be unpickled, as many errors of libraries."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")


def unpicklable_loop(config: dict[str, Any]) -> None:
    """Raise what cannot be unpickled."""
    _Notes(config)
    raise TwoArguments(404, "the words of the loop")


def failing_upload_loop(config: dict[str, Any]) -> None:
    """Upload in the background what cannot be uploaded."""
    from ray import train

    _Notes(config)

    def refuse(*_: Any) -> Any:
        raise OSError("no such bucket")

    mode = train.CheckpointUploadMode.ASYNC
    train.report({}, train.Checkpoint(_folder()), checkpoint_upload_mode=mode, checkpoint_upload_fn=refuse)
    train.report({}, train.Checkpoint(_folder()))


def numpy_loop(config: dict[str, Any]) -> None:
    """Report a number of numpy with a checkpoint."""
    import numpy as np
    from ray import train

    _Notes(config)
    train.report({"loss": np.float32(0.5)}, train.Checkpoint(_folder("file")), checkpoint_dir_name="numpy")


TRAININGS = {
    "reports": Training(reporting_loop),
    "kept": Training(kept_loop, max_failures=1, keep=2, score="score"),
    "unpicklable": Training(unpicklable_loop),
    "failing upload": Training(failing_upload_loop),
    "numpy": Training(numpy_loop),
}


def _run(name: str, training: Training, folder: Path) -> dict[str, Any]:
    """Run a training with Ray Train alone, and return its facts."""
    from ray import train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    facts = folder / f"{name}.jsonl"
    trainer = DataParallelTrainer(
        training.loop,
        train_loop_config={"facts": str(facts)},
        scaling_config=train.ScalingConfig(num_workers=WORKERS),
        run_config=train.RunConfig(
            name=name,
            storage_path=str(folder),
            failure_config=train.FailureConfig(max_failures=training.max_failures),
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=training.keep, checkpoint_score_attribute=training.score
            ),
        ),
        validation_config=train.ValidationConfig(validate, ray_remote_kwargs={"num_cpus": 0}),
    )
    try:
        result = trainer.fit()
    except train.TrainingFailedError as error:
        end = {"error": type(error).__name__, "text": str(error)}
    else:
        end = {
            "metrics": {name: repr(value) for name, value in (result.metrics or {}).items()},
            "checkpoint": result.checkpoint and own_name(result.checkpoint.path),
            "best": [own_name(checkpoint.path) for checkpoint, _ in result.best_checkpoints or []],
            "returned": result.return_value,
        }
    return {**read_facts(facts), **end}


def main() -> None:
    """Run the trainings on the cluster at `RAY_ADDRESS`; write their facts to `FOLDER/facts.json`."""
    import ray

    folder = Path(sys.argv[1])
    ray.init(log_to_driver=False)
    found = {name: _run(name, training, folder) for name, training in TRAININGS.items()}
    (folder / "facts.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
