"""The user's objects of a training, pickled in the flow process for the driver and for workers on other nodes."""

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.machinery import PathFinder
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

    Scripts are pickled by value, also those that Prefect loads under generated names.
    """
    scripts = _scripts()
    with _PICKLING:
        try:
            return _dumps(payload, scripts)
        except Exception:  # noqa: BLE001 - whatever a reducer raises; the second try raises it again
            # A script may contain objects that cannot be pickled, such as a lock. Where it can be imported, its name
            # is enough.
            return _dumps(payload, [script for script in scripts if not _is_importable(script)])


def _dumps(payload: Payload, by_value: list[ModuleType]) -> bytes:
    with ExitStack() as stack:
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return bytes(cloudpickle.dumps(payload))


def _scripts() -> list[ModuleType]:
    """Return the user's loaded modules that are not part of a package. Other machines may not have these modules."""
    folders = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    installed = tuple(form + os.sep for folder in folders for form in (folder, os.path.realpath(folder)))
    scripts = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_script = "." not in name and name != "__main__" and not file.endswith("__init__.py")
        is_module = isinstance(module, ModuleType) and module.__name__ == name
        if file and is_script and is_module and not file.startswith(installed):
            scripts.append(module)
    return scripts


def _is_importable(script: ModuleType) -> bool:
    """Return True if a new Python process could import a script by its module name. The check imports nothing."""
    spec = PathFinder.find_spec(script.__name__)
    return spec is not None and spec.origin == script.__file__
