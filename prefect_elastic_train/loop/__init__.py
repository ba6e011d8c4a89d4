"""What a train loop imports. Nothing of it imports Ray, and a loop that imports it runs under plain Ray Train, too."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefect_elastic_train.loop.context import RunContext, run_context, use_run_context
from prefect_elastic_train.loop.notice import resize_requested

if TYPE_CHECKING:
    from prefect_elastic_train.loop.batches import Mixture
    from prefect_elastic_train.loop.cadence import Cadence
    from prefect_elastic_train.loop.jax_state import JaxState
    from prefect_elastic_train.loop.order import SampleOrder, StepBatches, permute
    from prefect_elastic_train.loop.state import ArrayState, StateMismatchError
    from prefect_elastic_train.loop.torch_state import TorchState
    from prefect_elastic_train.loop.training_session import LoopError, Session, read_about, session

__all__ = [
    "ArrayState",
    "Cadence",
    "JaxState",
    "LoopError",
    "Mixture",
    "RunContext",
    "SampleOrder",
    "Session",
    "StateMismatchError",
    "StepBatches",
    "TorchState",
    "permute",
    "read_about",
    "resize_requested",
    "run_context",
    "session",
    "use_run_context",
]

#: Where the others are; torch and JAX are imported for their states only, numpy when one of the others is used.
_MODULES = ("order", "batches", "cadence", "state", "training_session")


def __getattr__(name: str) -> Any:
    own = {"JaxState": ["jax_state"], "TorchState": ["torch_state"]}
    for module in own.get(name, _MODULES) if name in __all__ else ():
        found = getattr(import_module(f"{__name__}.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
