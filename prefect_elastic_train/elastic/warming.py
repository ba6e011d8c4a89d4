"""What a process does before it is needed: imports, and a first step; in standbys, spares and the fork server.

Uses ``ray._private.utils``, which knows of the limits of a container.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

#: What is kept ready takes no more of a node's memory than leaves this share of it.
_LEFT_FREE = 0.15
#: What the first steps of a loop import, by framework; with torch, what does not import Ray comes first.
TORCH_MODULES = ("torch._dynamo", "torch.distributed.checkpoint", "torch.nn.parallel.distributed")
TORCH_RAY_MODULES = ("ray.train.torch", "prefect_elastic_train.loop.torch_state")
WORKER_MODULES = {"torch": TORCH_MODULES + TORCH_RAY_MODULES, "jax": ("jax.numpy", "orbax.checkpoint")}


def memory_left() -> float:
    """Return how many bytes what is kept ready on this node may take yet; negative if it has too much."""
    from ray._private.utils import get_system_memory, get_used_memory

    return float((1 - _LEFT_FREE) * get_system_memory() - get_used_memory())


def step_of_torch() -> None:
    """Do a first step, in the main thread: what torch starts with it serves the training, too."""
    import torch

    state = torch.get_rng_state()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())  # others ask for the state of a GPU
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.set_rng_state(state)


def import_ahead(modules: Iterable[str]) -> None:
    """Import what is there of some modules: whoever needs another says so."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            logger.info("%s is not imported ahead", module, exc_info=True)
