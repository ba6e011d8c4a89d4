"""Profiles: blocks for training on a laptop, on spot GPUs, on TPU slices, and for runs in a bucket.

Change this file to fit your team. Values that differ between installations are read from environment variables, all of
which begin with `ELASTIC_TRAIN_`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from prefect_elastic_train import (
    CheckpointPolicy,
    ConfigurationError,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
)

Environment = Mapping[str, str]
AnyBlock = ElasticScaling | FailureBudget | CheckpointPolicy | RayCluster | LocalStorage | S3Storage | FsspecStorage
Blocks = list[AnyBlock]

#: Failures to tolerate where nodes may be preempted at any time.
SPOT_BUDGET: dict[str, Any] = {
    "max_failures": 10,
    "max_preemption_failures": -1,
    "driver_restarts": 10,
    "driver_restart_delay_seconds": 30,
    "max_attempts_without_progress": 3,
}


class UnsetVariableError(ConfigurationError):
    """A profile needs an environment variable that is not set."""


def laptop(environment: Environment) -> Blocks:
    """Train on this machine: a local cluster for each training, one or two CPU workers.

    `ELASTIC_TRAIN_RUNS` is the directory of the runs. The default is that of `elastic_train` without a storage.
    """
    return [
        LocalStorage(path=_optional(environment, "ELASTIC_TRAIN_RUNS") or "~/elastic_train_runs"),
        ElasticScaling(min_workers=1, max_workers=2),
        FailureBudget(),
        CheckpointPolicy(keep=3),
        RayCluster(),
    ]


def spot_gpu(environment: Environment) -> Blocks:
    """Train on one to eight spot GPUs, which may be preempted at any time.

    `ELASTIC_TRAIN_SPOT_GPU_ADDRESS` (required) is the Ray cluster: `host:port` if the flow runs on one of its nodes,
    `http(s)://host:8265` if it runs elsewhere. `ELASTIC_TRAIN_SPOT_GPU_TOKEN` is its token. Without it, a token that
    was entered in the UI is kept.
    """
    return [
        ElasticScaling(
            min_workers=1,
            max_workers=8,
            accelerator="gpu",
            wait_for_max_seconds=300,  # nodes start one by one; without waiting, each would restart the worker group
            stability_delay_seconds=60,
        ),
        FailureBudget(**SPOT_BUDGET, stall_timeout_seconds=1800),
        CheckpointPolicy(keep=5),
        _cluster(environment, "ELASTIC_TRAIN_SPOT_GPU"),
    ]


def tpu_v6e(environment: Environment) -> Blocks:
    """Train on one to four TPU v6e slices of 4x4 chips. Each has four hosts, with one worker on each host.

    `ELASTIC_TRAIN_TPU_V6E_ADDRESS` (required) and `ELASTIC_TRAIN_TPU_V6E_TOKEN` are the cluster and its token.
    """
    return [
        ElasticScaling(
            min_workers=4,
            max_workers=16,
            accelerator="tpu",
            topology="4x4",
            accelerator_type="TPU-V6E",
            wait_for_max_seconds=600,  # a slice takes minutes to start
            stability_delay_seconds=60,
        ),
        FailureBudget(
            **SPOT_BUDGET,
            stall_timeout_seconds=3600,  # the loop does not report while a large model is compiled
        ),
        CheckpointPolicy(keep=5),
        _cluster(environment, "ELASTIC_TRAIN_TPU_V6E"),
    ]


def s3(environment: Environment) -> Blocks:
    """Keep runs in a bucket, with the credentials of each node.

    `ELASTIC_TRAIN_S3_BUCKET_PATH` (required) is bucket and prefix, `ELASTIC_TRAIN_S3_ENDPOINT_URL` the URL of a store
    other than AWS, `ELASTIC_TRAIN_S3_REGION` the bucket's region. Keys that were entered in the UI are kept.
    """
    return [
        S3Storage(
            bucket_path=_required(environment, "ELASTIC_TRAIN_S3_BUCKET_PATH", "my-bucket/training/runs"),
            endpoint_url=_optional(environment, "ELASTIC_TRAIN_S3_ENDPOINT_URL"),
            region=_optional(environment, "ELASTIC_TRAIN_S3_REGION"),
        )
    ]


PROFILES: dict[str, Callable[[Environment], Blocks]] = {
    "laptop": laptop,
    "spot-gpu": spot_gpu,
    "tpu-v6e": tpu_v6e,
    "s3": s3,
}


def profile_blocks(name: str, environment: Environment) -> Blocks:
    """Create the blocks of a profile.

    Args:
        name: Name of the profile.
        environment: Environment variables.

    Raises:
        UnsetVariableError: A required variable is not set.
        ConfigurationError: A variable has an invalid value.
    """
    try:
        return PROFILES[name](environment)
    except ValidationError as error:
        details = error.errors(include_input=False)
        problems = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
        raise ConfigurationError(f"profile {name} has a bad value: {'; '.join(problems)}") from None


def _cluster(environment: Environment, prefix: str) -> RayCluster:
    return RayCluster(
        address=_required(environment, f"{prefix}_ADDRESS", "http://ray-head.example.com:8265"),
        auth_token=_optional(environment, f"{prefix}_TOKEN"),
    )


def _required(environment: Environment, variable: str, example: str) -> str:
    value = _optional(environment, variable)
    if not value:
        raise UnsetVariableError(f"set {variable}, for example {variable}={example}")
    return value


def _optional(environment: Environment, variable: str) -> str:
    return environment.get(variable, "").strip()
