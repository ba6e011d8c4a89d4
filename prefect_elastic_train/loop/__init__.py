"""The public names that a train loop imports.

None of them but ``read_parquet`` imports Ray, and a loop that uses them also runs under plain Ray Train.

Example::

    from prefect_elastic_train import loop

    def train_loop(config):
        ...
        state = loop.TorchState(model=model, optimizer=optimizer)
        with loop.session(state, steps=1000, global_batch=256) as session:
            for inputs, targets in session.batches(dataset):
                loss = loss_of(model(inputs), targets) * session.weight
                ...
                session.step({"loss": loss})
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .context import RunContext, run_context, use_run_context
from .restart_notice import resize_requested

if TYPE_CHECKING:
    from prefect_elastic_train.trackers.tracker import Tracker

    from .batches import Mixture
    from .cadence import Cadence
    from .jax_state import JaxState
    from .numeric_guard import Guard, NumericError
    from .order import SampleOrder, StepBatches, permute
    from .ray_data import read_parquet
    from .state import ArrayState, StateMismatchError
    from .torch_state import TorchState
    from .tracking import track
    from .training_session import LoopError, Session, read_about, session

__all__ = [
    "ArrayState",
    "Cadence",
    "Guard",
    "JaxState",
    "LoopError",
    "Mixture",
    "NumericError",
    "RunContext",
    "SampleOrder",
    "Session",
    "StateMismatchError",
    "StepBatches",
    "TorchState",
    "Tracker",
    "permute",
    "read_about",
    "read_parquet",
    "resize_requested",
    "run_context",
    "session",
    "track",
    "use_run_context",
]

#: Modules of the names that are imported on first use. They import numpy; the last ones torch, JAX or Ray Data.
_MODULES = ("order", "batches", "cadence", "state", "numeric_guard", "training_session", "tracking")
_LIBRARY_MODULES = {"JaxState": ("jax_state",), "TorchState": ("torch_state",), "read_parquet": ("ray_data",)}


def __getattr__(name: str) -> Any:
    for module_name in _LIBRARY_MODULES.get(name, _MODULES) if name in __all__ else ():
        module = import_module(f"{__name__}.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
