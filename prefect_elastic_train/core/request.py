"""The request of a training and the spec of a driver, which goes through a private file to one driver process.

Belongs to all processes.
"""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .records import Fingerprint, Owner
from .settings import CheckpointSettings, ClusterSettings, FailureSettings, ScalingSettings, StorageSettings

#: Module that a driver process runs, by which it is recognized.
DRIVER_MODULE = "prefect_elastic_train.driver"
#: Module that a driver's Ray job runs.
JOB_MODULE = "elastic_train_job"
#: Environment variable with the mark that all processes of one training inherit.
MARK_VARIABLE = "PREFECT_ELASTIC_TRAIN_PROCESS_MARK"
#: Environment variable with the socket path of a local cluster's fork server, for its processes and its drivers.
FORK_SERVER_VARIABLE = "PREFECT_ELASTIC_TRAIN_FORK_SERVER"
#: Ray Train's environment variable: print the workers' output once more, besides Ray's own forwarding of it.
PRINT_PATCH = "RAY_TRAIN_ENABLE_PRINT_PATCH"
STOP_FILE = "stop"  # beside the spec; the supervisor creates it before it stops a driver on purpose


@dataclass(frozen=True)
class RunRequest:
    """The requested training, the same in all its attempts.

    Attributes:
        owner: The flow run of the training; the driver fills in host and process.
        named: True if the user set the run name. A changed configuration is then intended.
        training_name: Name of the training within its flow, the same in each flow run.
        resumed: True if the flow run was executed before. The run may then exist.
        begun: True if an event has shown that the run exists. Its run directory must then be there.
        known_storage: URI of the storage that earlier trainings used through the same saved block, which must not be
            empty now, and the name of the Prefect variable with that URI; both empty if unknown.
        has_datasets: True if Ray Data runs tasks besides the workers.
        extra_cpus: CPUs for Ray Data and a validation, in addition to those of the workers.
        totals: Amounts of work, such as ``max_steps``, from the loop's configuration.
    """

    run_name: str
    owner: Owner
    fingerprint: Fingerprint
    named: bool = False
    resume: bool = False
    resume_from: str = ""
    training_name: str = ""
    resumed: bool = False
    begun: bool = False
    known_storage: tuple[str, str] = ("", "")
    has_datasets: bool = False
    extra_cpus: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    worker_runtime_env: dict[str, Any] = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)

    @property
    def framework(self) -> str:
        """Framework of the train loop, such as ``"torch"``, or ``"none"``."""
        return self.fingerprint.framework


@dataclass(frozen=True)
class DriverSpec:
    """Input of a driver for one attempt: the request, and the current values of the blocks.

    Attributes:
        storage_block: Name of the saved storage block; empty for one that is not saved.
        sys_path: ``sys.path`` of the flow process, for the user's modules.
        local_address: Address of the local cluster, which may still be starting; empty when joining a cluster.
        previous_end: Outcome and message of the attempt before, if this supervisor has seen it.
        ends_at: End of the training's time limit, in seconds since the epoch; infinite or 0: no limit.
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
        """True if only this training's workers use the cluster: the cluster is local, and there are no datasets."""
        return self.cluster.is_local and not self.request.has_datasets

    @property
    def can_fork(self) -> bool:
        """True if a fork server may fork the controllers and workers of the local cluster.

        They share one environment, and use no TPUs. The tasks of datasets are forked, too.
        """
        has_environment = self.cluster.full_runtime_env or self.request.worker_runtime_env
        return self.cluster.is_local and self.scaling.accelerator != "tpu" and not has_environment


def write_spec(spec: DriverSpec, path: Path) -> None:
    """Write the spec of a driver to a file that only this user can read."""
    path.touch(mode=0o600)
    path.write_bytes(pickle.dumps(spec))


def read_spec(path: Path) -> DriverSpec:
    """Return the spec of a driver from a file that :func:`write_spec` wrote. Its payload stays pickled."""
    spec: DriverSpec = pickle.loads(path.read_bytes())
    return spec
