"""Imports and a first step ahead of time, in standby workers, in pre-started drivers and in the fork server.

Uses ``ray._private.utils``, which respects the memory limit of a container.
"""

import importlib
import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

#: Share of a node's memory that pre-started processes leave free.
_FREE_SHARE = 0.15
#: Modules that the first steps of a loop import, by framework; for torch, those that do not import Ray first.
TORCH_MODULES = ("torch._dynamo", "torch.distributed.checkpoint", "torch.nn.parallel.distributed")
TORCH_RAY_MODULES = ("ray.train.torch", "prefect_elastic_train.loop.torch_state")
WORKER_MODULES = {"torch": TORCH_MODULES + TORCH_RAY_MODULES, "jax": ("jax.numpy", "orbax.checkpoint")}


def memory_left() -> float:
    """Return the number of bytes that pre-started processes may still use on this node; negative if it is too full."""
    from ray._private.utils import get_system_memory, get_used_memory

    return float((1 - _FREE_SHARE) * get_system_memory() - get_used_memory())


def run_torch_step() -> None:
    """Train a tiny model for a step in the main thread, so that torch starts its thread pools and loads kernels."""
    import torch

    state = torch.get_rng_state()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())  # others query a GPU
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.set_rng_state(state)


def import_ahead(modules: Iterable[str]) -> None:
    """Import modules, and log those that cannot be imported: a loop that needs one of them raises its own error."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            logger.info("Cannot import %s ahead of time", module, exc_info=True)
