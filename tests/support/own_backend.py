"""A custom backend: it sets a variable in each worker before the loop begins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig

VARIABLE = "TESTS_OWN_BACKEND"


class OwnBackend(Backend):
    """Sets a variable in each worker."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set the variable before the loop begins."""
        worker_group.execute(set_variable, backend_config.value)


@dataclass
class OwnConfig(BackendConfig):
    """A ``backend_config`` for Ray Train."""

    value: str
    backend_cls = OwnBackend


def set_variable(value: str) -> None:
    """Set the variable of this process; a pickled ``os.environ`` would be a copy."""
    os.environ[VARIABLE] = value


def loop() -> None:
    """Report the variable that the backend has set."""
    import ray.train

    ray.train.report({"variable": os.environ.get(VARIABLE, "")})
