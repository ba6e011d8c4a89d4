"""What a process does before it is needed: imports at the lowest priority, and a first step; in standbys and spares.

Uses ``ray._private.utils``, which knows of the limits of a container.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

logger = logging.getLogger(__name__)

#: What is kept ready takes no more of a node's memory than leaves this share of it.
_LEFT_FREE = 0.15
_IDLE_SECONDS = 60.0
_BOOT_SECONDS = 240.0  # for which imports are waited for, first at the lowest priority
#: What the first steps of a loop import, by framework; with torch, what does not import Ray comes first.
TORCH_MODULES = ("torch._dynamo", "torch.distributed.checkpoint", "torch.nn.parallel.distributed")
TORCH_RAY_MODULES = ("ray.train.torch", "prefect_elastic_train.loop.torch_state")
WORKER_MODULES = {"torch": TORCH_MODULES + TORCH_RAY_MODULES, "jax": ("jax.numpy", "orbax.checkpoint")}


def begin_imports(modules: Iterable[str]) -> threading.Thread:
    """Import what is there of some modules, with what processor time nobody else wants.

    Where a process may not leave the lowest priority by itself, for which it needs a capability, the kernel is told
    that others are to be preferred.
    """
    importing = threading.Thread(target=import_ahead, args=(modules,), daemon=True)
    trial = threading.Thread(target=lambda: may_leave.append(_may_leave_idling()))
    may_leave = list[bool]()
    trial.start()
    trial.join()
    importing.start()
    with suppress(OSError):
        if importing.native_id is not None:
            policy = os.SCHED_IDLE if may_leave == [True] else os.SCHED_BATCH
            os.sched_setscheduler(importing.native_id, policy, os.sched_param(0))
    return importing


def hurry() -> None:
    """Take the usual priority back, for all threads that were begun meanwhile: they serve the training, too."""
    for _ in range(3):  # one may have begun another before it was its turn
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def finish_imports(importing: threading.Thread) -> None:
    """Wait for the imports, and take the usual priority back; after a minute so that they get on beside busy others.

    Raises:
        TimeoutError: They take too long.
    """
    importing.join(_IDLE_SECONDS)
    hurry()
    importing.join(_BOOT_SECONDS)
    if importing.is_alive():
        raise TimeoutError(f"imports were not done after {_IDLE_SECONDS + _BOOT_SECONDS:g} s")
    hurry()


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


def _may_leave_idling() -> bool:
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return True
    return False
