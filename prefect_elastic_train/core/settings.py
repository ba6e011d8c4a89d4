"""What a training asks for, as plain validated values.

The Prefect blocks in :mod:`prefect_elastic_train.blocks` are these models with a form in the UI. The driver
process reads the same models without importing Prefect, which saves it two seconds at every restart.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from prefect_elastic_train.core.fields import Count, JsonDict, Labels, Resources, SettingsModel

Settings = TypeVar("Settings", bound=BaseModel)


#: Ray counts resources in ten-thousandths.
_SMALLEST_AMOUNT = 0.0001


class ScalingSettings(SettingsModel):
    """How many workers to run and what each of them gets. See :class:`ElasticScaling`."""

    min_workers: Count = Field(
        default=1,
        ge=1,
        title="Minimum workers",
        description="Training runs only with at least this many workers; below it, it waits for capacity.",
    )
    max_workers: Count = Field(
        default=1,
        ge=1,
        title="Maximum workers",
        description="The number of workers asked for; the group grows up to it when capacity comes back.",
    )
    accelerator: Literal["cpu", "gpu", "tpu"] = Field(
        default="cpu",
        description="What each worker computes on; by default it gets one CPU or GPU, or the TPUs of a slice's host.",
    )
    resources_per_worker: Resources = Field(
        default_factory=dict,
        title="Resources per worker",
        description='Ray resources of each worker, such as {"CPU": 4}. Empty: the default of the accelerator.',
    )
    resize_check_interval_seconds: float = Field(
        default=60.0,
        gt=0,
        title="Resize check interval (seconds)",
        description="How often a healthy worker group looks whether it could grow.",
    )
    wait_for_max_seconds: float = Field(
        default=0.0,
        ge=0,
        title="Wait for the maximum (seconds)",
        description="How long to wait for the maximum number of workers before starting with fewer.",
    )
    stability_delay_seconds: float = Field(
        default=30.0,
        ge=0,
        title="Stability delay (seconds)",
        description="A node counts for the growth of a healthy worker group once it has been there for so long.",
    )
    resize_patience_seconds: float = Field(
        default=1800.0,
        ge=0,
        title="Resize patience (seconds)",
        description=(
            "How long a decided growth waits for the next checkpoint before it is carried out without one. "
            "0: however long it takes."
        ),
    )
    capacity_timeout_seconds: float = Field(
        default=0.0,
        ge=0,
        title="Capacity timeout (seconds)",
        description=(
            "How long to wait for the minimum number of workers before the training fails. 0: as long as it takes."
        ),
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        title="Placement strategy",
        description="How Ray places the workers: packed on few nodes or spread over many.",
    )
    label_selector: Labels = Field(
        default_factory=dict,
        title="Label selector",
        description='Ray node labels that a worker\'s node must have, such as {"market-type": "spot"}.',
    )
    topology: str = Field(
        default="",
        description="TPU slice topology, such as 4x4. Needed for several TPU workers, which fill whole slices.",
    )
    accelerator_type: str = Field(
        default="",
        title="Accelerator type",
        description="Ray's accelerator type, such as A100 or TPU-V6E. Empty: any. Needed with a topology.",
    )

    @field_validator("topology", "accelerator_type")
    @classmethod
    def _without_blanks(cls, value: str) -> str:
        return value.strip()

    @field_validator("resources_per_worker")
    @classmethod
    def _resources_can_be_held(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"resource {name!r} must be a finite number, 0 or more, got {amount:g}")
            if 0 < amount < _SMALLEST_AMOUNT:
                raise ValueError(
                    f"resource {name!r} must be 0 or at least {_SMALLEST_AMOUNT:g}, Ray's smallest amount, "
                    f"got {amount:g}"
                )
        if value and not any(value.values()):
            raise ValueError(f"a worker must hold some resource, got {value}; leave the field empty for the default")
        gpus = value.get("GPU", 0)
        if gpus > 1 and not gpus.is_integer():
            raise ValueError(
                f"GPU {gpus:g} is neither a share of one GPU nor a whole number of them; "
                f"ask for at most 1, or for {math.floor(gpus)} or {math.ceil(gpus)}"
            )
        return value

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> ScalingSettings:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers ({self.min_workers}) must be at most max_workers ({self.max_workers}); "
                "raise max_workers or lower min_workers"
            )
        return self

    @model_validator(mode="after")
    def _resources_are_the_accelerators(self) -> ScalingSettings:
        for resource in ("GPU", "TPU"):
            accelerator, amount = resource.lower(), self.resources_per_worker.get(resource)
            if amount and self.accelerator != accelerator:
                raise ValueError(
                    f"resources_per_worker asks for {resource} {amount:g}, and accelerator is {self.accelerator!r}; "
                    f"set accelerator to {accelerator!r}, or remove {resource} from resources_per_worker"
                )
            if amount == 0 and self.accelerator == accelerator:
                # Ray would take one GPU all the same, and refuses the like for TPUs.
                raise ValueError(
                    f"resources_per_worker says {resource} 0, and accelerator is {accelerator!r}; ask for more than 0, "
                    f"remove {resource} from resources_per_worker for the default, or set accelerator to 'cpu'"
                )
        return self

    @model_validator(mode="after")
    def _tpu_slices_are_whole(self) -> ScalingSettings:
        if self.accelerator == "tpu":
            _check_tpu(self)
        elif self.topology:
            raise ValueError(
                f"topology ({self.topology!r}) is the shape of a TPU slice, and accelerator is {self.accelerator!r}; "
                "set accelerator to 'tpu', or remove topology"
            )
        return self


def _check_tpu(scaling: ScalingSettings) -> None:
    """Check what Ray reserves TPUs by; it knows the slices, and is loaded for TPUs only."""
    from prefect_elastic_train.core import slices

    topology, accelerator_type = scaling.topology, scaling.accelerator_type
    if scaling.max_workers > 1 and not (topology and accelerator_type):
        raise ValueError(
            f"accelerator 'tpu' with more than one worker (max_workers {scaling.max_workers}) needs topology (such as "
            f"'4x4') and accelerator_type (such as 'TPU-V6E'), got {topology!r} and {accelerator_type!r}; give both"
        )
    if topology and not accelerator_type:
        raise ValueError(
            f"topology ({topology!r}) says nothing without the type of TPU, got an empty accelerator_type; "
            "give accelerator_type too (such as 'TPU-V6E'), or remove topology for one worker anywhere"
        )
    if not topology:  # one worker on any host, without a slice of its own
        if accelerator_type:
            slices.tpu_accelerator_type(accelerator_type)
        slices.check_chips(scaling.resources_per_worker.get("TPU", 1))
        return
    if scaling.label_selector:
        raise ValueError(
            f"label_selector ({scaling.label_selector}) cannot be combined with topology ({topology!r}), since Ray "
            "chooses the nodes of a TPU slice by labels of its own; remove label_selector"
        )
    shape = slices.slice_shape(topology, accelerator_type, scaling.resources_per_worker)
    slices.check_worker_counts(shape, scaling.min_workers, scaling.max_workers)
    slices.check_placement(shape, scaling.max_workers, scaling.placement_strategy)


class FailureSettings(SettingsModel):
    """How much may fail before the training does. See :class:`FailureBudget`."""

    max_failures: Count = Field(
        default=3,
        ge=-1,
        title="Maximum worker failures",
        description="Worker-group failures recovered inside the cluster, per driver attempt. -1: unlimited.",
    )
    max_preemption_failures: Count = Field(
        default=-1,
        ge=-1,
        title="Maximum preemptions",
        description="Preemptions recovered inside the cluster, counted apart from failures. -1: unlimited.",
    )
    driver_restarts: Count = Field(
        default=3,
        ge=0,
        le=1000,
        title="Driver restarts",
        description="New drivers after a lost driver, head or cluster: the retries of the Prefect task.",
    )
    driver_restart_delay_seconds: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        title="Driver restart delay (seconds)",
        description="Delay before the first driver restart, doubled each time up to 300 seconds, with jitter.",
    )
    preemption_grace_seconds: float = Field(
        default=0.0,
        ge=0,
        title="Preemption grace (seconds)",
        description="How long the surviving workers may go on past a preemption deadline.",
    )
    relax_collectives_on_preemption: bool = Field(
        default=False,
        title="Relax collectives on preemption",
        description="Let healthy ranks commit a just-in-time checkpoint without the ranks being preempted.",
    )
    max_attempts_without_progress: Count = Field(
        default=2,
        ge=1,
        title="Maximum attempts without progress",
        description="Driver attempts in a row without a new checkpoint after which the training gives up.",
    )
    stall_timeout_seconds: float = Field(
        default=0.0,
        ge=0,
        title="Stall timeout (seconds)",
        description="No report for so long is a failure of the worker group. 0: off.",
    )
    ignored_checkpoint: Literal["warn", "fail"] = Field(
        default="warn",
        title="Ignored checkpoint",
        description="What happens when a restarted loop begins again although a checkpoint is there.",
    )


class CheckpointSettings(SettingsModel):
    """Which checkpoints are kept. See :class:`CheckpointPolicy`."""

    keep: Count | None = Field(
        default=None,
        ge=1,
        title="Checkpoints to keep",
        description="How many checkpoints to keep, the best or the newest ones. Empty: all.",
    )
    score_attribute: str = Field(
        default="",
        title="Score attribute",
        description="The reported metric that ranks checkpoints. Empty: the newest are the best.",
    )
    score_order: Literal["max", "min"] = Field(
        default="max", title="Score order", description="Whether a higher or a lower score is better."
    )


_ADDRESS = re.compile(r"^(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})$")


class ClusterSettings(SettingsModel):
    """Which Ray cluster trains. See :class:`RayCluster`."""

    # What a validation error shows of its input may be the token, also under a misspelt name.
    model_config = ConfigDict(hide_input_in_errors=True)

    address: str = Field(
        default="",
        description="Empty: a local cluster for this run. 'auto' or host:port: join a cluster from one of its nodes. "
        "http(s)://host:8265: submit the run to a cluster as a Ray job.",
    )
    auth_token: SecretStr = Field(
        default=SecretStr(""),
        title="Authentication token",
        description="Ray's cluster token. Empty: whatever RAY_AUTH_TOKEN or ~/.ray/auth_token gives.",
    )
    runtime_env: JsonDict = Field(
        default_factory=dict,
        title="Runtime environment",
        description='Ray runtime environment of the run, such as {"pip": ["einops"]}. Shown by Ray: no secrets.',
    )
    num_cpus: Count = Field(
        default=0, ge=0, title="CPUs", description="CPUs of the local cluster. 0: all of this machine."
    )
    num_gpus: Count = Field(
        default=-1, ge=-1, title="GPUs", description="GPUs of the local cluster. -1: all of this machine."
    )
    working_dir: str = Field(
        default="",
        title="Working directory",
        description="Directory with the code of the train loop, sent to every node. Empty: nothing is sent.",
    )
    connect_timeout_seconds: float = Field(
        default=20.0,
        gt=0,
        title="Connect timeout (seconds)",
        description="How long an attempt waits for the cluster to answer.",
    )
    unreachable_timeout_seconds: float = Field(
        default=3600.0,
        gt=0,
        title="Unreachable timeout (seconds)",
        description="How long a submitted job is asked after while the dashboard does not answer.",
    )
    driver_resources: JsonDict = Field(
        default_factory=dict,
        title="Driver resources",
        description='What the driver of a submitted job reserves, such as {"CPU": 1, "on_demand": 0.01}, which also '
        "says on which nodes it may run. Empty: nothing, and it runs on the head node.",
    )
    verify_tls: bool = Field(
        default=True, title="Verify TLS", description="Whether the certificate of an https:// address is verified."
    )
    ca_bundle: str = Field(
        default="",
        title="CA bundle",
        description="Path of the certificates that vouch for an https:// address. Empty: what SSL_CERT_FILE or "
        "REQUESTS_CA_BUNDLE names, else the usual ones.",
    )

    @field_validator("address")
    @classmethod
    def _address_is_joinable(cls, value: str) -> str:
        value = value.strip()
        if value in ("", "auto"):
            return value
        if value.startswith(("http://", "https://")):
            return _dashboard_url(value)
        if value.startswith("ray://"):
            raise ValueError(
                f"cannot use {value!r}: the Ray client is not supported; use '' (a local cluster), 'auto' or "
                "'host:port' from a node of the cluster, or 'http(s)://host:8265' to submit the run as a Ray job"
            )
        match = _ADDRESS.match(value)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(
                f"expected '', 'auto', 'host:port' (port 1 to 65535) or 'http(s)://host:port', got {value!r}"
            )
        return value

    @field_validator("num_cpus", "num_gpus", "connect_timeout_seconds", "unreachable_timeout_seconds", mode="before")
    @classmethod
    def _name_the_value(cls, value: Any, info: ValidationInfo) -> Any:
        # Since this model hides its input in errors, what is no secret is named here.
        if isinstance(value, int | float) and not isinstance(value, bool):
            if str(info.field_name).endswith("_seconds") and not value > 0:
                raise ValueError(f"Input should be greater than 0, got {value}")
            least = -1 if info.field_name == "num_gpus" else 0
            if value < least:
                raise ValueError(f"Input should be greater than or equal to {least}, got {value}")
        return value

    @field_validator("num_cpus", "num_gpus")
    @classmethod
    def _sizes_are_for_local_clusters(cls, value: int, info: ValidationInfo) -> int:
        # Not a check of the whole model: pydantic would show all of its input, the token included.
        address = info.data.get("address", "")
        if address and value != cls.model_fields[str(info.field_name)].default:
            raise ValueError(
                f"{info.field_name}={value} sizes a local cluster and address ({address!r}) names another one: "
                "remove either"
            )
        return value

    @field_validator("driver_resources")
    @classmethod
    def _resources_are_amounts(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, amount in value.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
                raise ValueError(f"driver_resources says {name} {amount!r}; give an amount of 0 or more")
        return value

    @field_validator("driver_resources", "verify_tls", "ca_bundle")
    @classmethod
    def _submitting_fields_go_with_a_url(cls, value: Any, info: ValidationInfo) -> Any:
        address = info.data.get("address", "")
        scheme = "http" if info.field_name == "driver_resources" else "https://"
        if value not in ({}, True, "") and not address.startswith(scheme):
            raise ValueError(
                f"{info.field_name} is for clusters that runs are submitted to by {scheme.rstrip(':/')} and address is "
                f"{address!r}: remove it, or give the URL of the cluster's dashboard"
            )
        return value

    @property
    def is_local(self) -> bool:
        """Whether the run gets a cluster of its own on this machine."""
        return not self.address

    @property
    def is_submitted(self) -> bool:
        """Whether the driver runs inside the cluster, as a Ray job."""
        return self.address.startswith(("http://", "https://"))


def _dashboard_url(value: str) -> str:
    parts = urlsplit(value)
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if "@" in parts.netloc:  # not shown: it may be a password
        raise ValueError("the address holds credentials; give them as auth_token, and a URL without them")
    if not parts.hostname or not port_is_valid or parts.query or parts.fragment:
        raise ValueError(
            f"expected the URL of a Ray dashboard, such as 'http://head:8265' or 'https://host/prefix', got {value!r}"
        )
    return value.rstrip("/")


def plain(settings_type: type[Settings], block: BaseModel) -> Settings:
    """Give a block's values as the plain settings that the driver reads, secrets included."""
    return settings_type(**{name: getattr(block, name) for name in settings_type.model_fields})
