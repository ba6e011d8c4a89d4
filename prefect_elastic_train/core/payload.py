"""The user's objects of a training, pickled in the flow process for the driver and for workers on other nodes."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle

#: cloudpickle's list of modules to pickle by value belongs to the process, so trainings in two threads take turns.
_PICKLING = threading.Lock()


@dataclass(frozen=True)
class Payload:
    """The user's objects, which only the driver unpickles, after it has imported Ray.

    Attributes:
        data_context: Ray's ``DataContext`` of the flow process, in effect while datasets are created; None if unset.
    """

    train_loop: Callable[..., Any] | str
    train_loop_config: Any = None
    datasets: dict[str, Any] | Callable[[], dict[str, Any]] | None = None
    dataset_config: Any = None
    torch_config: Any = None
    jax_config: Any = None
    validation_config: Any = None
    data_context: Any = None


def dump_payload(payload: Payload) -> bytes:
    """Return the user's objects of a training, pickled so that the driver and workers on other nodes can load them.

    Modules that only this process can import are pickled by value: scripts, and those that Prefect loads under
    generated names.
    """
    hidden, scripts = _user_modules()
    with _PICKLING:
        try:
            return _dumps(payload, [*hidden, *scripts])
        except Exception:  # noqa: BLE001 - whatever a reducer raises; the second try raises it again
            # A script may contain objects that cannot be pickled, such as a lock. Where it can be imported, its name
            # is enough.
            return _dumps(payload, hidden)


def _dumps(payload: Payload, by_value: list[ModuleType]) -> bytes:
    with ExitStack() as stack:
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return bytes(cloudpickle.dumps(payload))


def _user_modules() -> tuple[list[ModuleType], list[ModuleType]]:
    """Return two lists of the user's loaded modules: modules that another process cannot import, and scripts.

    A script can be imported by another process on this machine, and belongs to no package.
    """
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    installed = tuple({form + os.sep for folder in folders for form in (folder, os.path.realpath(folder))})
    hidden = []
    scripts = []
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
    """Return True if a new Python process would find the module ``name`` in ``file``. The check imports nothing."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    for finder in sys.meta_path if path is not None or not parent else ():
        with suppress(ImportError, ValueError, AttributeError):
            if spec := finder.find_spec(name, path):
                return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    return False
