"""A typical train loop for rehearsals, correct or with one flaw."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

INPUTS, SAMPLES = 8, 256

#: Flaws of the loop, and the problem that a rehearsal has to find.
FLAWS = {
    "no checkpoint": "never saves",
    "ignores": "ignores its checkpoint",
    "optimizer": "does not restore all state",
    "world": "depends on the world size",
    "unseeded": "not deterministic",
    "unequal": "reports unequally",
}


def train(config: dict[str, Any]) -> None:
    """Fit a small network with Adam and noise on its inputs, the same at any number of workers.

    Config: ``steps`` (default 400), ``flaw`` (one of `FLAWS`).
    """
    import ray.train
    import torch
    import torch.distributed as dist

    flaw, steps = config.get("flaw", ""), config.get("steps", 400)
    torch.set_num_threads(1)
    if flaw != "unseeded":
        torch.manual_seed(0)
    noise = torch.Generator().manual_seed(1)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(7))
    targets = torch.sin(inputs.sum(1, keepdim=True))
    whole: Any = torch.nn.Sequential(torch.nn.Linear(INPUTS, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = torch.nn.parallel.DistributedDataParallel(whole) if world > 1 else whole
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None and flaw != "ignores":
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        whole.load_state_dict(saved["model"])
        if flaw != "optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        noise.set_state(saved["noise"])
        first = saved["step"]
    batch = 32 if flaw != "world" else 16 * world
    for step in range(first, steps):
        time.sleep(0.05)
        order = torch.randperm(SAMPLES, generator=noise)[:batch]
        chosen = order[rank::world]
        loss = ((model(inputs[chosen]) - targets[chosen]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach().clone()
        if world > 1:
            dist.all_reduce(loss)
        metrics = {"step": step + 1, "loss": loss.item() / world}
        if flaw == "unequal" and rank and step == 1:
            continue
        if flaw == "no checkpoint" or ((step + 1) % 20 and step + 1 < steps):
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "noise": noise.get_state(), "step": step + 1}, Path(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
