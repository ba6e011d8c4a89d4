"""What a call of ``elastic_train`` asks for, and what a driver is told: written to a private file, read once."""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from prefect_elastic_train.core.records import Fingerprint, Owner
from prefect_elastic_train.core.settings import CheckpointSettings, ClusterSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.storage_settings import StorageSettings

#: By which a driver is known among processes and jobs; the second runs as a Ray job.
DRIVER_MODULE, JOB_MODULE = "prefect_elastic_train.driver", "elastic_train_job"
#: Environment variable with the mark that all processes of one training inherit.
MARK_VARIABLE = "PREFECT_ELASTIC_TRAIN_PROCESS_MARK"
#: The path of a local cluster's fork server's socket, in the environment of its processes and its drivers.
FORK_SERVER_VARIABLE = "PREFECT_ELASTIC_TRAIN_FORK_SERVER"
#: Of Ray Train in the workers: whether it shows what they print once more, beside what it shows of all processes.
PRINT_PATCH = "RAY_TRAIN_ENABLE_PRINT_PATCH"
STOP_FILE = "stop"  # beside the spec; the supervisor makes it before it ends a driver on purpose
#: What cloudpickle sends by value is the process's: two trainings in two threads would take it from one another.
_PICKLING = threading.Lock()


@dataclass(frozen=True)
class RunRequest:
    """The training that is wanted, the same in all its attempts.

    Attributes:
        owner: The flow run that it is for; host and process are filled in by the driver.
        named: The user gave the run name, so that a changed configuration is meant.
        part: Which training of its flow run it is, the same in each night's flow run.
        resumed: The flow run ran before, so that the run may have begun.
        begun: An attempt of the run has begun before, as its events have shown: its run directory must be there.
        known_storage: URI of the storage that earlier trainings used through the same saved block, which must not be
            empty now, and the name of the Prefect variable that keeps the URI; both empty if that is not known.
        has_datasets: Ray Data runs tasks besides the workers.
        cpus_beside: CPUs that Ray Data and a validation need besides those of the workers.
        totals: How much there is to do, such as ``max_steps``, as far as the loop's configuration says.
    """

    run_name: str
    owner: Owner
    fingerprint: Fingerprint
    named: bool = False
    resume: bool = False
    resume_from: str = ""
    part: str = ""
    resumed: bool = False
    begun: bool = False
    known_storage: tuple[str, str] = ("", "")
    has_datasets: bool = False
    cpus_beside: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    worker_runtime_env: dict[str, Any] = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)

    @property
    def framework(self) -> str:
        """``"torch"``, ``"jax"`` or ``"none"``."""
        return self.fingerprint.framework


@dataclass(frozen=True)
class DriverSpec:
    """Everything a driver needs to run one attempt: the request, and the blocks as they are now.

    Attributes:
        storage_block: Name of the saved storage block, if it was one.
        sys_path: Where the user's modules are found.
        local_address: Address of the local cluster, which may not be up yet; empty when joining one.
        previous_end: How the attempt before ended, as far as this supervisor has seen it.
        ends_at: When the training's time is over, in seconds since the epoch; 0: never.
    """

    request: RunRequest
    scaling: ScalingSettings
    failures: FailureSettings
    checkpoints: CheckpointSettings
    storage: StorageSettings
    cluster: ClusterSettings
    storage_block: str = ""
    poll_interval_seconds: float = 0.1
    sys_path: list[str] = field(default_factory=list)
    local_address: str = ""
    previous_end: str = ""
    ends_at: float = 0.0

    @property
    def is_alone(self) -> bool:
        """Whether nobody but the run's own workers wants the resources of the cluster."""
        return self.cluster.is_local and not self.request.has_datasets

    @property
    def is_forked(self) -> bool:
        """Whether the cluster's processes may be forked from one: all have the same environment, and no TPUs."""
        has_environment = self.cluster.runtime_env or self.cluster.working_dir or self.request.worker_runtime_env
        return self.is_alone and self.scaling.accelerator != "tpu" and not has_environment


@dataclass(frozen=True)
class Payload:
    """The user's own objects, which only the driver unpickles, after Ray is imported.

    Attributes:
        data_context: Ray's ``DataContext`` of the flow process, in effect while datasets are made; None if it has none.
    """

    train_loop: Callable[..., Any] | str
    train_loop_config: Any = None
    datasets: dict[str, Any] | Callable[[], dict[str, Any]] | None = None
    dataset_config: Any = None
    torch_config: Any = None
    jax_config: Any = None
    validation_config: Any = None
    data_context: Any = None


def write_spec(spec: DriverSpec, path: Path) -> None:
    """Write a spec to a file that only this user can read."""
    with open(path, "wb", opener=partial(os.open, mode=0o600)) as file:
        pickle.dump(spec, file)


def read_spec(path: Path) -> DriverSpec:
    """Read a spec, whose payload stays pickled."""
    spec: DriverSpec = pickle.loads(path.read_bytes())
    return spec


def dump_payload(payload: Payload) -> bytes:
    """Pickle the user's objects so that the driver, and workers on other nodes, can load them.

    What only this process may be able to import goes by value: scripts, and what Prefect loads under made-up names.
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
        return bytes(cloudpickle.dumps(payload))


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
