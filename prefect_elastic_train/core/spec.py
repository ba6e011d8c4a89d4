"""What a driver is told: written by the supervisor to a private file, read once by the driver."""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from prefect_elastic_train.core.records import Fingerprint, Owner
from prefect_elastic_train.core.settings import (
    CheckpointSettings,
    ClusterSettings,
    FailureSettings,
    ScalingSettings,
)
from prefect_elastic_train.core.storage_settings import StorageSettings

__all__ = ["MARK_VARIABLE", "STOP_FILE", "DriverSpec", "Payload", "dump_payload", "read_spec", "write_spec"]

#: Environment variable with the mark that all processes of one training inherit.
MARK_VARIABLE = "PREFECT_ELASTIC_TRAIN_PROCESS_MARK"
#: Beside the spec; the supervisor makes it before it ends a driver on purpose.
STOP_FILE = "stop"


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


@dataclass(frozen=True)
class DriverSpec:
    """Everything a driver needs to run one attempt.

    Attributes:
        run_name: Name of the run.
        framework: ``"torch"``, ``"jax"`` or ``"none"``.
        named: The user gave the run name.
        resume: Take over a run of another flow run.
        resume_from: Run whose checkpoint a new run starts from, empty for none.
        part: Which training of its flow run it is, the same in each night's flow run.
        owner: The flow run; host and process are filled in by the driver.
        fingerprint: What makes it the same training as before.
        poll_interval_seconds: How often the controller polls its workers.
        address_file: File that will hold the address of the local cluster, empty when joining one.
        resumed: The flow run ran before, so that the run may have begun.
        sys_path: Where the user's modules are found.
        loop_label: The loop's name for messages.
        storage_block: Name of the saved storage block, if it was one.
        previous_end: How the attempt before ended, as far as this supervisor has seen it.
        payload: The pickled :class:`Payload`.
    """

    run_name: str
    framework: str
    owner: Owner
    fingerprint: Fingerprint
    scaling: ScalingSettings
    failures: FailureSettings
    checkpoints: CheckpointSettings
    storage: StorageSettings
    cluster: ClusterSettings
    named: bool = False
    resume: bool = False
    resume_from: str = ""
    part: str = ""
    poll_interval_seconds: float = 0.1
    address_file: str = ""
    resumed: bool = False
    sys_path: list[str] = field(default_factory=list)
    worker_runtime_env: dict[str, Any] = field(default_factory=dict)
    loop_label: str = ""
    storage_block: str = ""
    previous_end: str = ""
    payload: bytes = b""


def write_spec(spec: DriverSpec, path: Path) -> None:
    """Write a spec to a file that only this user can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(spec, file)


def read_spec(path: Path) -> DriverSpec:
    """Read a spec, whose payload stays pickled."""
    spec = pickle.loads(path.read_bytes())
    if not isinstance(spec, DriverSpec):
        raise TypeError(f"{path} holds a {type(spec).__name__}, not a DriverSpec")
    return spec


def dump_payload(payload: Payload) -> bytes:
    """Pickle the user's objects so that the driver, and workers on other nodes, can load them.

    A function of a script goes by value, since only this process may be able to import the script; so does
    one whose module no other process would find, as Prefect loads flow scripts under made-up names.

    Raises:
        Exception: Something that the loop refers to cannot be pickled.
    """
    hidden, scripts = _user_modules()
    data: bytes
    try:
        with _by_value([*hidden, *scripts]):
            data = cloudpickle.dumps(payload)
    except Exception:  # noqa: BLE001 - whatever a reducer raises; the second try tells it
        # A script may use what cannot be sent, such as a lock; where it can be imported, its name will do.
        with _by_value(hidden):
            data = cloudpickle.dumps(payload)
    return data


def _user_modules() -> tuple[list[ModuleType], list[ModuleType]]:
    """Find the loaded modules that another process cannot import, and the others that are no package's."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    installed = tuple({form + os.sep for folder in folders for form in (folder, os.path.realpath(folder))})
    hidden, scripts = [], []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not file or name == "__main__" or file.startswith(installed):
            continue
        if module.__name__ != name:
            continue
        if not _is_importable(name, file):
            hidden.append(module)
        elif "." not in name and not file.endswith("__init__.py"):
            scripts.append(module)
    return hidden, scripts


def _is_importable(name: str, file: str) -> bool:
    """Tell whether a fresh interpreter would find the module, without disturbing this one's."""
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None:
            return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    return False


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    registered = []
    try:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
