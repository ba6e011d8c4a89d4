"""What a call of ``elastic_train`` asks for: made once from its arguments, and carried whole to the run directory."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cloudpickle

from prefect_elastic_train.core.records import Fingerprint, Owner

#: What cloudpickle sends by value is the process's: two trainings in two threads would take it from one another.
_PICKLING = threading.Lock()


@dataclass(frozen=True)
class RunRequest:
    """The training that is wanted, the same in all its attempts.

    Attributes:
        run_name: Name of the run.
        owner: The flow run that it is for; host and process are filled in by the driver.
        fingerprint: What makes it the same training as before.
        named: The user gave the run name, so that a changed configuration is meant.
        resume: Take over a run of another flow run.
        resume_from: Run whose checkpoint a new run starts from, empty for none.
        part: Which training of its flow run it is, the same in each night's flow run.
        resumed: The flow run ran before, so that the run may have begun.
        has_datasets: Ray Data needs a CPU beside those that the workers hold.
        worker_runtime_env: Ray runtime environment of the workers.
        payload: The pickled :class:`Payload`.
    """

    run_name: str
    owner: Owner
    fingerprint: Fingerprint
    named: bool = False
    resume: bool = False
    resume_from: str = ""
    part: str = ""
    resumed: bool = False
    has_datasets: bool = False
    worker_runtime_env: dict[str, Any] = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)

    @property
    def framework(self) -> str:
        """``"torch"``, ``"jax"`` or ``"none"``."""
        return self.fingerprint.framework


@dataclass(frozen=True)
class Payload:
    """The user's own objects, which only the driver unpickles, after Ray is imported."""

    train_loop: Callable[..., Any] | str
    train_loop_config: dict[str, Any] | None = None
    datasets: dict[str, Any] | Callable[[], dict[str, Any]] | None = None
    dataset_config: Any = None
    torch_config: Any = None
    jax_config: Any = None
    validation_config: Any = None


def dump_payload(payload: Payload) -> bytes:
    """Pickle the user's objects so that the driver, and workers on other nodes, can load them.

    A function of a script goes by value, since only this process may be able to import the script; so does
    one whose module no other process would find, as Prefect loads flow scripts under made-up names.
    """
    hidden, scripts = _user_modules()
    with _PICKLING:
        try:
            return _dumps(payload, [*hidden, *scripts])
        except Exception:  # noqa: BLE001 - whatever a reducer raises; the second try tells it
            # A script may use what cannot be sent, such as a lock; where it can be imported, its name will do.
            return _dumps(payload, hidden)


def _dumps(payload: Payload, by_value: list[ModuleType]) -> bytes:
    with ExitStack() as stack:
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        data: bytes = cloudpickle.dumps(payload)
        return data


def _user_modules() -> tuple[list[ModuleType], list[ModuleType]]:
    """Find the loaded modules that another process cannot import, and the others that are no package's."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    installed = tuple({form + os.sep for folder in folders for form in (folder, os.path.realpath(folder))})
    hidden, scripts = [], []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not isinstance(module, ModuleType) or not file or file.startswith(installed):
            continue
        if name == "__main__" or module.__name__ != name:
            continue
        if not _is_importable(name, file):
            hidden.append(module)
        elif "." not in name and not file.endswith("__init__.py"):
            scripts.append(module)
    return hidden, scripts


def _is_importable(name: str, file: str) -> bool:
    """Return whether a fresh interpreter would find the module, without disturbing this one's."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    for finder in sys.meta_path if path is not None or not parent else ():
        with suppress(ImportError, ValueError, AttributeError):
            if spec := finder.find_spec(name, path):
                return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    return False
