"""A training with shards or DDP in plain processes, whose final weights are compared."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
from itertools import count
from operator import iadd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from prefect_elastic_train import loop

LENGTH, GLOBAL_BATCH, SHARDS = 102, 32, 16  # the last batch of an epoch has 6 samples, fewer than there are shards
SIDE = 8


class Images:
    """Images that are changed at random when they are read."""

    def __init__(self) -> None:
        generator = np.random.default_rng(7)
        self._images = generator.standard_normal((LENGTH, 1, SIDE, SIDE)).astype(np.float32)
        self._labels = generator.integers(0, 4, LENGTH)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[Any, int]:
        import torch

        image = self._images[number]
        if random.random() < 0.5:
            image = image[:, :, ::-1]
        noise = np.random.standard_normal(image.shape).astype(np.float32)
        return torch.from_numpy(image + 0.1 * noise) + 0.1 * torch.randn(1), int(self._labels[number])


def model_of(kind: str) -> Any:
    """A network with all that depends on the batch or on random numbers."""
    import torch

    class Shift(torch.nn.Module):
        """Adds a running mean, whose values differ between ranks until DDP exchanges them."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1))

        def forward(self, values: Any) -> Any:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * values.mean())
            return values + self.mean

    layers = torch.nn.Sequential(
        Shift(),
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Conv2d(8, 8, 3, padding=1, stride=2),
        torch.nn.BatchNorm2d(8, momentum=None),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * SIDE * SIDE // 4, 4),
    )
    return layers.to(getattr(torch, kind))


def train(config: dict[str, Any]) -> None:
    """Train, and write a hash of the state into the file ``digest`` with the number of the rank.

    Config: ``steps``; ``dtype`` (of the weights; "amp": mixed precision with a gradient scaler); ``num_workers`` (of
    the data loader); ``digest`` (file); ``shards`` (0: DDP with micro batches); ``replay_every``; ``flip``: kind, step,
    rank, number of the parameter and bit of an injected bit flip ("weights": once, after the step; "gradients": in each
    backward pass from the step on, without shards in every second one, so that the replays differ).
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_mixed = config["dtype"] == "amp"
    model = model_of("float32" if is_mixed else config["dtype"])
    scaler = torch.amp.GradScaler("cpu", enabled=is_mixed)
    shards = config["shards"]
    if not shards and torch.distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config["steps"])
    state = loop.TorchState(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    plan = {"shards": shards, "replay_every": config["replay_every"]}
    options = {"num_workers": config["num_workers"], "micro_batch": 0 if shards else 4}
    parameters = [*model.parameters()]
    with loop.session(state, steps=config["steps"], global_batch=GLOBAL_BATCH, seed=3, **plan) as session:
        kind, step, rank, number, bit = config["flip"]
        is_here = rank == session.rank
        calls = count()

        def hook(values: Any) -> Any:
            is_flipped = session.done >= step and (shards or next(calls) % 2)
            return _flip(values.clone(), bit) if is_flipped else values

        if is_here and kind == "gradients":
            parameters[number].register_hook(hook)
        for images, labels in session.batches(Images(), **options):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                scores = model(images.to(parameters[0].dtype))
            loss = torch.nn.functional.cross_entropy(scores.float(), labels) * session.weight
            session.backward(scaler.scale(loss))
            if not session.is_last_part:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            session.step({"loss": loss})
            if is_here and kind == "weights" and session.done == step:
                _flip(parameters[number].data, bit)
    Path(f"{config['digest']}.{session.rank}").write_text(digest(model, optimizer))


def _flip(values: Any, bit: int) -> Any:
    """Flip a bit of the first element."""
    flat = values.view(-1).view(_torch().int32)
    flat[0] ^= 1 << bit
    return values


def digest(*parts: Any) -> str:
    """The SHA-256 of all tensors in the states of modules and optimizers."""
    from torch.utils._pytree import tree_leaves

    values = [value for part in parts for value in tree_leaves(part.state_dict()) if hasattr(value, "detach")]
    data = [value.detach().contiguous().view(-1).view(_torch().uint8).numpy().tobytes() for value in values]
    return hashlib.sha256(b"".join(data)).hexdigest()


def _torch() -> Any:
    import torch

    return torch


def digests(world_size: int, **config: Any) -> tuple[set[str], list[tuple[float, int]]]:
    """Train with so many workers without Ray.

    Returns:
        The hashes of all ranks; and for each half of the exchange of a bucket by the last rank, half of the bytes of
        the bucket and those that it sent.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, world_size, config).check_returncode()
        sent = json.loads(Path(f"{folder}/digest.sent").read_text())
        return {file.read_text() for file in Path(folder).glob("digest.[0-9]")}, sent


def wrong_result_messages(world_size: int, **config: Any) -> list[str]:
    """Train with replays, and return the errors of the ranks with wrong results."""
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, world_size, config)
        return [file.read_text() for file in sorted(Path(folder).glob("digest.*.wrong"))]


def _run(folder: str, world_size: int, config: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    """Train with so many workers in processes of their own."""
    config = {"steps": 12, "dtype": "float32", "num_workers": 0, "bucket_bytes": 2**20, **config}
    limit = config.pop("limit_seconds", 600)
    config = {"shards": SHARDS, "replay_every": 0, "flip": ["", 0, 0, 0, 0], "digest": f"{folder}/digest", **config}
    command = [sys.executable, "-m", __name__, str(world_size), json.dumps(config)]
    return subprocess.run(command, check=False, timeout=limit)


def _run_rank(rank: int, world_size: int, config: dict[str, Any]) -> None:
    """Train as one rank of a group of plain processes."""
    import torch.distributed as dist

    from prefect_elastic_train.loop import shard_gradients, training_session
    from prefect_elastic_train.loop.replays import WrongResultError

    rendezvous = Path(config["digest"]).with_name("rendezvous")
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
    context = SimpleNamespace(
        get_world_rank=lambda: rank, get_world_size=lambda: world_size, get_experiment_name=lambda: "run"
    )
    # Nothing is saved or reported here.
    modes = SimpleNamespace(SYNC=0, ASYNC=0)
    ray = SimpleNamespace(get_checkpoint=lambda: None, report=lambda *_, **__: None, CheckpointUploadMode=modes)
    sys.modules["ray.train"] = ray  # type: ignore[assignment]
    training_session.local_context = lambda: context
    shard_gradients._BUCKET_BYTES = config["bucket_bytes"]
    _mutate(config.get("mutant", ""), rank)
    sent = _count_sent(world_size)
    try:
        train(config)
    except WrongResultError as error:
        Path(f"{config['digest']}.{rank}.wrong").write_text(str(error))
        sys.exit(1)
    if rank == world_size - 1:
        Path(f"{config['digest']}.sent").write_text(json.dumps(sent))
    dist.destroy_process_group()


def _mutate(mutant: str, rank: int) -> None:
    """Break what makes the bits equal: the order of the sums (``order``) or the random numbers (``seed``)."""
    from prefect_elastic_train.loop import batches, shard_gradients, state, training_session

    def add_in_a_row(sums: list[Any], new: Any) -> list[Any]:
        if not sums:
            sums.append(new)
            return []
        first, size, values = sums.pop()
        sums.append(shard_gradients.PartialSum(first, size + new.size, iadd(values, new.values)))
        return [new.values]

    if mutant == "order":
        shard_gradients.add_partial_sum = add_in_a_row
    elif mutant:
        module = {"seed": training_session, "seed of reading": batches}[mutant]
        module.seed_everything = lambda *key: state.seed_everything(*key, rank)


def _count_sent(world_size: int) -> list[tuple[float, int]]:
    """Return a list that gets, for each batch of operations, half of the bucket's bytes, and those that are sent."""
    import torch.distributed as dist

    sent: list[tuple[float, int]] = []
    exchange = dist.batch_isend_irecv

    def count(operations: list[Any]) -> Any:
        sizes = [each.tensor.nbytes for each in operations if each.op is dist.isend]
        sent.append((sizes[0] * world_size / 2, sum(sizes)))  # a bucket is exchanged by two batches of operations
        return exchange(operations)

    dist.batch_isend_irecv = count
    return sent


if __name__ == "__main__":
    _torch()  # imported once, for all ranks
    size = int(sys.argv[1])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_rank, args=(rank, size, json.loads(sys.argv[2]))) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
