"""What a driver is told: written by the supervisor to a private file, read once by the driver."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.settings import CheckpointSettings, ClusterSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.storage_settings import StorageSettings

#: Environment variable with the mark that all processes of one training inherit.
MARK_VARIABLE = "PREFECT_ELASTIC_TRAIN_PROCESS_MARK"
#: Beside the spec; the supervisor makes it before it ends a driver on purpose.
STOP_FILE = "stop"


@dataclass(frozen=True)
class DriverSpec:
    """Everything a driver needs to run one attempt: the request, and the blocks as they are now.

    Attributes:
        request: What was asked for.
        storage_block: Name of the saved storage block, if it was one.
        poll_interval_seconds: How often the controller polls its workers.
        sys_path: Where the user's modules are found.
        local_address: Address of the local cluster, which may not be up yet; empty when joining one.
        previous_end: How the attempt before ended, as far as this supervisor has seen it.
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


def write_spec(spec: DriverSpec, path: Path) -> None:
    """Write a spec to a file that only this user can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(spec, file)


def read_spec(path: Path) -> DriverSpec:
    """Read a spec, whose payload stays pickled."""
    spec: DriverSpec = pickle.loads(path.read_bytes())
    return spec
