"""Profiles: the blocks to train with on a laptop, on spot GPUs, on TPU slices, and a bucket to keep runs in.

This file is meant to be changed. What differs from one installation to the next is read from environment variables, all
of which begin with `ELASTIC_TRAIN_`; what a team decides for all its trainings is written here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


class UnsetVariableError(ConfigurationError):
    """A profile needs an environment variable that is not set."""


@dataclass(frozen=True)
class Profile:
    """Blocks that belong together, saved under one name.

    Attributes:
        name: Name of the block documents.
        description: What the profile is for.
        build: Makes the blocks from the environment variables.
    """

    name: str
    description: str
    build: Callable[[Environment], Blocks]

    def blocks(self, environment: Environment) -> Blocks:
        """Make the blocks.

        Args:
            environment: Environment variables.

        Raises:
            UnsetVariableError: A required one is not set.
            ConfigurationError: One has a value that is not allowed.
        """
        try:
            return self.build(environment)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)]
            raise ConfigurationError(f"profile {self.name} has a bad value: {'; '.join(problems)}") from None


def laptop(environment: Environment) -> Blocks:
    """Train on this machine: a local cluster for each training, one or two CPU workers.

    `ELASTIC_TRAIN_RUNS` names the directory for runs; by default it is the one that `elastic_train` uses without a
    storage.
    """
    return [
        LocalStorage(path=_optional(environment, "ELASTIC_TRAIN_RUNS") or "~/elastic_train_runs"),
        ElasticScaling(min_workers=1, max_workers=2),
        FailureBudget(),
        CheckpointPolicy(keep=3),
        RayCluster(),
    ]


def spot_gpu(environment: Environment) -> Blocks:
    """Train on one to eight GPUs that may be taken away at any time.

    `ELASTIC_TRAIN_SPOT_GPU_ADDRESS` (required) is the Ray cluster: `host:port` for workers on one of its nodes,
    `http(s)://host:8265` for workers elsewhere. `ELASTIC_TRAIN_SPOT_GPU_TOKEN` is its token; without it, one that was
    typed in the UI stays.
    """
    return [
        ElasticScaling(
            min_workers=1,
            max_workers=8,
            accelerator="gpu",
            wait_for_max_seconds=300,  # nodes come one by one; starting at once would mean a restart for each
            stability_delay_seconds=60,
        ),
        FailureBudget(
            max_failures=10,
            max_preemption_failures=-1,
            driver_restarts=10,
            driver_restart_delay_seconds=30,
            max_attempts_without_progress=3,
            stall_timeout_seconds=1800,
        ),
        CheckpointPolicy(keep=5),
        _cluster(environment, "ELASTIC_TRAIN_SPOT_GPU"),
    ]


def tpu_v6e(environment: Environment) -> Blocks:
    """Train on one to four TPU v6e slices of 4x4 chips: four hosts each, a worker on each host.

    `ELASTIC_TRAIN_TPU_V6E_ADDRESS` (required) and `ELASTIC_TRAIN_TPU_V6E_TOKEN` are the cluster and its token.
    """
    return [
        ElasticScaling(
            min_workers=4,
            max_workers=16,
            accelerator="tpu",
            topology="4x4",
            accelerator_type="TPU-V6E",
            wait_for_max_seconds=600,  # a slice takes minutes to come, all its hosts at once
            stability_delay_seconds=60,
        ),
        FailureBudget(
            max_failures=10,
            max_preemption_failures=-1,
            driver_restarts=10,
            driver_restart_delay_seconds=30,
            max_attempts_without_progress=3,
            stall_timeout_seconds=3600,  # the first compilation of a large model is a long time without a report
        ),
        CheckpointPolicy(keep=5),
        _cluster(environment, "ELASTIC_TRAIN_TPU_V6E"),
    ]


def s3(environment: Environment) -> Blocks:
    """Keep runs in a bucket, with the credentials that each node has.

    `ELASTIC_TRAIN_S3_BUCKET_PATH` (required) is bucket and prefix, `ELASTIC_TRAIN_S3_ENDPOINT_URL` a store other than
    AWS, `ELASTIC_TRAIN_S3_REGION` the bucket's region. Keys are not taken from here: those typed in the UI stay.
    """
    return [
        S3Storage(
            bucket_path=_required(environment, "ELASTIC_TRAIN_S3_BUCKET_PATH", "my-bucket/training/runs"),
            endpoint_url=_optional(environment, "ELASTIC_TRAIN_S3_ENDPOINT_URL"),
            region=_optional(environment, "ELASTIC_TRAIN_S3_REGION"),
        )
    ]


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("laptop", "this machine, one or two CPU workers", laptop),
        Profile("spot-gpu", "one to eight spot GPUs of a Ray cluster", spot_gpu),
        Profile("tpu-v6e", "one to four TPU v6e slices of a Ray cluster", tpu_v6e),
        Profile("s3", "runs in a bucket", s3),
    )
}


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
