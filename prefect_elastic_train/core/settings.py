"""Settings of a training and of its storage, the fields of the blocks, as validated values without Prefect.

Belongs to all processes.
"""

from __future__ import annotations

import json
import os
import re
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PrivateAttr,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .outcomes import ConfigurationError

#: From the scheme, or from ``user:`` without one, to the last ``@`` of the word. Passwords may contain ``/``, ``@`` and
#: quotes, as AWS's secret keys do, so an ``@`` of the path cannot be recognized and is masked with them.
_CREDENTIALS = re.compile(r"(?:(?<=://)|(?<=:/)(?!/)|(?<![^\s\"'])[^\s\"':/@]+:(?!/))\S*@")


def without_credentials(text: str) -> str:
    """Return a text, such as an error or a URL, in which asterisks replace users and passwords of URLs."""
    return _CREDENTIALS.sub("***@", text)


def _unwrap_ui_json(value: Any) -> Any:
    """Return the value of a dict field, parsed if Prefect's UI sent it as JSON text.

    The UI sends the text itself, or ``{"__prefect_kind": "json", "value": "<text>"}``.
    """
    if isinstance(value, dict) and value.get("__prefect_kind") == "json":
        value = value.get("value")
    if isinstance(value, str):
        try:
            return json.loads(value.strip() or "{}")
        except ValueError as error:
            raise ValueError(f"expected a JSON object such as {{}} ({error})") from None
    return [*map(_unwrap_ui_json, value)] if isinstance(value, list) else value


_AtLeastOne = Annotated[int, Field(ge=1)]
_OrUnlimited = Annotated[int, Field(ge=-1)]
JsonDict = Annotated[dict[str, Any], BeforeValidator(_unwrap_ui_json)]
_Amounts = Annotated[dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]], BeforeValidator(_unwrap_ui_json)]
_Text = Annotated[str, StringConstraints(strip_whitespace=True)]


# A misspelt field is an error, and Prefect's server needs it to accept an all-default block as a parameter.
class SettingsModel(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """Base of the settings."""


class ScalingSettings(SettingsModel):
    """Number of workers, and the resources of each. See :class:`ElasticScaling`."""

    min_workers: _AtLeastOne = 1
    """Training runs only with at least this many workers; below it, it waits for capacity."""
    max_workers: _AtLeastOne = 1
    """The requested number of workers; the group grows up to it when capacity comes back."""
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    """What each worker computes on; by default it gets one CPU or GPU, or the TPUs of a slice's host."""
    resources_per_worker: _Amounts = {}
    """Ray resources of each worker, such as {"CPU": 4}. Empty: the default of the accelerator."""
    resize_check_interval_seconds: PositiveFloat = 60.0
    """How often a healthy worker group checks if it can grow."""
    wait_for_max_seconds: NonNegativeFloat = 0.0
    """How long to wait for the maximum number of workers before starting with fewer."""
    stability_delay_seconds: NonNegativeFloat = 30.0
    """A node counts for the growth of a healthy worker group once it has been alive for this long."""
    resize_patience_seconds: NonNegativeFloat = 1800.0
    """How long a planned growth waits for the next checkpoint before it proceeds without one. 0: no limit."""
    capacity_timeout_seconds: NonNegativeFloat = 0.0
    """How long to wait for the minimum number of workers before the training fails. 0: no limit."""
    standby: Literal["auto", "on", "off"] = "auto"
    """Keep a warm standby worker for each worker, for the next restart. "auto": where there is memory."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray places the workers: packed on few nodes or spread over many."""
    label_selector: Annotated[dict[str, str] | list[dict[str, str]], BeforeValidator(_unwrap_ui_json)] = {}
    """Ray node labels that a worker's node must have, such as {"market-type": "spot"}, or a list: one for each."""
    topology: _Text = ""
    """TPU slice topology, such as 4x4. Needed for several TPU workers, which fill whole slices."""
    accelerator_type: _Text = ""
    """Ray's accelerator type, such as A100 or TPU-V6E. Empty: any. Needed with a topology."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> ScalingSettings:
        resources = self.resources_per_worker
        gpus = resources.get("GPU", 0)
        if (resources and not any(resources.values())) or any(0 < amount < 0.0001 for amount in resources.values()):
            raise ValueError(
                f"resources_per_worker must have a resource of at least 0.0001, got {resources}; or leave it empty"
            )
        if gpus > 1 and not gpus.is_integer():
            raise ValueError(f"resources_per_worker: GPU {gpus:g} must be a fraction of one GPU or a whole number")
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers ({self.min_workers}) must be at most max_workers ({self.max_workers}); "
                "raise max_workers or lower min_workers"
            )
        for resource in ("GPU", "TPU"):
            amount = resources.get(resource)
            # Ray takes 0 as one GPU, and refuses 0 TPUs.
            if amount is not None and (amount > 0) != (self.accelerator == resource.lower()):
                raise ValueError(
                    f"resources_per_worker has {resource} {amount:g}, and accelerator is {self.accelerator!r}; "
                    "correct one of them"
                )
        selectors = self.label_selector
        if isinstance(selectors, list) and len(selectors) not in (0, self.max_workers):
            raise ValueError(
                f"label_selector has {len(selectors)} entries, and max_workers is {self.max_workers}; give a list "
                "with one entry for each worker, or one dict for all"
            )
        if self.accelerator == "tpu":
            _check_tpu(self)
        elif self.topology:
            raise ValueError(
                f"topology ({self.topology!r}) is the shape of a TPU slice, and accelerator is {self.accelerator!r}; "
                "set accelerator to 'tpu', or remove topology"
            )
        return self


def _check_tpu(scaling: ScalingSettings) -> None:
    """Raise a ValueError if Ray cannot reserve the TPUs of these settings, or if workers do not fill whole slices."""
    from . import tpu_slices  # imports ray

    topology = scaling.topology
    accelerator_type = scaling.accelerator_type
    if (topology or scaling.max_workers > 1) and not (topology and accelerator_type):
        raise ValueError(
            "accelerator 'tpu' with a topology, or with more than one worker, needs both topology (such as '4x4') and "
            f"accelerator_type (such as 'TPU-V6E'), got {topology!r} and {accelerator_type!r}"
        )
    if not topology:  # one worker on any host, without its own slice
        if accelerator_type:
            tpu_slices.tpu_accelerator_type(accelerator_type)
        tpu_slices.check_chips(scaling.resources_per_worker.get("TPU", 1))
        return
    if scaling.label_selector or scaling.placement_strategy.startswith("STRICT"):
        raise ValueError(
            f"topology ({topology!r}) cannot be combined with a label_selector ({scaling.label_selector}) or a strict "
            f"placement_strategy ({scaling.placement_strategy}): Ray selects the nodes of a TPU slice by its own "
            "labels, and workers fill them; remove label_selector, and use PACK or SPREAD"
        )
    shape = tpu_slices.slice_shape(topology, accelerator_type, scaling.resources_per_worker)
    if scaling.min_workers % shape.workers or scaling.max_workers % shape.workers:
        raise ValueError(
            f"min_workers ({scaling.min_workers}) and max_workers ({scaling.max_workers}) must be multiples of "
            f"{shape.workers}, the workers with TPU {shape.chips_per_worker} that fill a slice of "
            f"{shape.accelerator_type} {shape.topology}"
        )


#: Limit of the delay before a driver restart, unless the first delay is longer, and its factor at most.
MAX_RESTART_DELAY_SECONDS = 300.0
RESTART_JITTER = 1.2


class FailureSettings(SettingsModel):
    """Failures and preemptions that a training survives. See :class:`FailureBudget`."""

    max_failures: _OrUnlimited = 3
    """Worker-group failures recovered inside the cluster, per driver attempt. -1: unlimited."""
    max_preemption_failures: _OrUnlimited = -1
    """Preemptions recovered inside the cluster, counted apart from failures. -1: unlimited."""
    driver_restarts: int = Field(3, ge=0, le=1000)
    """New drivers after a lost driver, head or cluster: the retries of the Prefect task."""
    driver_restart_delay_seconds: NonNegativeFloat = Field(10.0, le=3600)
    """Delay after an attempt without a new checkpoint, doubled each time up to 300 seconds, with jitter."""
    preemption_grace_seconds: NonNegativeFloat = 0.0
    """How long the surviving workers may go on past a preemption deadline."""
    relax_collectives_on_preemption: bool = False
    """Let the ranks that stay commit a checkpoint without those being preempted. Ignored in a session."""
    max_attempts_without_progress: _AtLeastOne = 2
    """Driver attempts in a row without a new checkpoint after which the training gives up."""
    forgive_after_seconds: NonNegativeFloat = 3600.0
    """Seconds of committed training after which an earlier failure no longer counts. 0: failures always count."""
    stall_timeout_seconds: NonNegativeFloat | Literal["auto"] = "auto"
    """Seconds without a report after which a group has failed. "auto": limits learned from a session. 0: off."""
    on_straggler: Literal["warn", "replace"] = "warn"
    """What happens to a straggler: "replace" restarts without its node at the next checkpoint, if others have room."""
    node_strikes: int = Field(3, ge=0, le=20)
    """Strikes, such as crashes and hangs, after which a node is left out. 0: off; stragglers are not replaced then."""
    shared_strikes: bool = False
    """Share strikes with the other trainings in the storage that have this set."""
    ignored_checkpoint: Literal["warn", "fail"] = "warn"
    """What happens when a restarted loop starts from scratch although there is a checkpoint."""


class CheckpointSettings(SettingsModel):
    """Checkpoints that are kept. See :class:`CheckpointPolicy`."""

    keep: _AtLeastOne | None = None
    """How many checkpoints to keep, the newest ones, or the best ones and besides them the newest. Empty: all."""
    score_attribute: str = ""
    """The reported metric that ranks checkpoints. Empty: the newest are the best."""
    score_order: Literal["max", "min"] = "max"
    """The better score: "max" for the higher one, "min" for the lower one."""
    recovery_memory_fraction: float = Field(0.3, gt=0, lt=1)
    """Largest share of a node's memory that recovery points of a session use."""


_HOST = r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)"
_PORT = r":(?P<port>\d{1,5})"
_JOINED = re.compile(f"{_HOST}{_PORT}")
_DASHBOARD = re.compile(rf"https?://{_HOST}({_PORT})?(/[^?#@]*)?")
#: The prefix that ``address`` must have if a field is set, by field; empty: ``address`` must be empty.
_SCHEMES = {
    "kuberay": "",
    "num_cpus": "",
    "num_gpus": "",
    "driver_resources": "http",
    "verify_tls": "https://",
    "ca_bundle": "https://",
}


def _address(value: str) -> str:
    value = value.strip()
    match = _JOINED.fullmatch(value) or _DASHBOARD.fullmatch(value)
    if value not in ("", "auto") and not (match and 0 < int(match["port"] or 1) < 65536):
        raise ValueError(
            "expected '' (a local cluster), 'auto' or 'host:port' (from a node of the cluster, not the Ray client), or "
            f"'http(s)://host:8265' (a dashboard, without credentials in the URL), got {without_credentials(value)!r}"
        )
    return value.rstrip("/")


_Word = Annotated[str, StringConstraints(pattern=r'^[^\s"$]+$')]


class KubeRaySettings(SettingsModel):
    """The pods of a Ray cluster on Kubernetes. See :class:`RayCluster`."""

    image: _Word
    """Container image of head, workers and flow runs, with this package and what the train loop imports."""
    namespace: Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")] = "default"
    """Namespace of all objects."""
    name: Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,35}[a-z0-9])?$")] = "training"
    """Name of the cluster and of the work pool, and the beginning of other names."""
    spot: Literal["", "gke", "karpenter", "eks", "aks"] = ""
    """Whose spot nodes the workers run on. Empty: any node."""
    node_selector: Annotated[dict[str, str], BeforeValidator(_unwrap_ui_json)] = {}
    """Labels that a worker's Kubernetes node must have, such as {"cloud.google.com/gke-accelerator": "nvidia-l4"}."""
    cpu: int = Field(0, ge=0, title="CPUs")
    """CPUs of a worker's pod. 0: those that its workers reserve."""
    memory: _Word = "8Gi"
    """Memory of a worker's pod."""
    head_memory: _Word = "8Gi"
    """Memory of the head's pod, where drivers run. It has two CPUs."""
    start_timeout_seconds: PositiveFloat = 900.0
    """How long the head of a run's own cluster may take to start, nodes included."""


# A validation error must not show its input: it may be the token, also under a misspelt name.
class ClusterSettings(SettingsModel, hide_input_in_errors=True):
    """The Ray cluster of a training. See :class:`RayCluster`."""

    address: Annotated[str, AfterValidator(_address)] = ""
    """Empty: a local cluster. 'auto' or host:port: join one from a node. http(s)://host:8265: submit a Ray job."""
    kuberay: KubeRaySettings | None = Field(None, title="KubeRay")
    """Make a cluster on Kubernetes for each run, from a pod there, and delete it. Needs the extra kubernetes."""
    auth_token: SecretStr = Field(SecretStr(""), title="Authentication Token")
    """Ray's cluster token. Empty: that of RAY_AUTH_TOKEN or ~/.ray/auth_token."""
    runtime_env: JsonDict = Field({}, title="Runtime Environment")
    """Ray runtime environment of the run, such as {"pip": ["einops"]}. Shown by Ray: no secrets."""
    num_cpus: int = Field(0, ge=0, title="CPUs")
    """CPUs of the local cluster. 0: all that no other training has claimed. If too few are free, it waits."""
    num_gpus: int = Field(-1, ge=-1, title="GPUs")
    """GPUs of the local cluster, reserved for it on this machine. -1: as many as max_workers can use."""
    working_dir: str = Field("", title="Working Directory")
    """Directory with the code of the train loop, sent to every node. Empty: nothing is sent."""
    connect_timeout_seconds: PositiveFloat = 20.0
    """How long an attempt waits for the cluster to answer."""
    unreachable_timeout_seconds: PositiveFloat = 3600.0
    """How long a submitted job is polled while the dashboard does not answer."""
    driver_resources: _Amounts = {}
    """Ray resources of a submitted driver, such as {"CPU": 1, "on_demand": 0.01}. Empty: it runs on the head node."""
    verify_tls: bool = Field(True, title="Verify TLS")
    """Verify the certificate of an https:// address."""
    ca_bundle: str = Field("", title="CA Bundle")
    """File of trusted certificates for https:// addresses. Empty: SSL_CERT_FILE, REQUESTS_CA_BUNDLE, or the default."""

    @field_validator(*_SCHEMES)
    @classmethod
    def _fits_the_address(cls, value: Any, info: ValidationInfo) -> Any:
        # Not a validator of the model: pydantic's error would show all of the input, the token included.
        name = str(info.field_name)
        address = info.data.get("address", "")
        scheme = _SCHEMES[name]
        fits = address.startswith(scheme) if scheme else not address
        if value != cls.model_fields[name].default and not fits:
            target = (
                f"a cluster that runs are submitted to by {scheme}"
                if scheme
                else "a training that starts its own cluster"
            )
            raise ValueError(f"{name} is for {target}, and address is {address!r}: remove or correct one of them")
        return value

    @property
    def full_runtime_env(self) -> dict[str, Any]:
        """The Ray runtime environment of the run: ``runtime_env``, with ``working_dir`` if it is set."""
        folder = os.path.expanduser(self.working_dir)
        return self.runtime_env | ({"working_dir": folder} if folder else {})

    @property
    def is_local(self) -> bool:
        """True if the training starts its own Ray cluster on this machine."""
        return not self.address and not self.kuberay

    @property
    def is_submitted(self) -> bool:
        """True if the driver runs inside the Ray cluster as a Ray job: the address is that of a dashboard."""
        return "://" in self.address


_JSON_OBJECT = TypeAdapter(JsonDict)

DEFAULT_STORAGE = "~/elastic_train_runs"

_BUCKET_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}(/(?!\.{1,2}(/|$))[^/]+)*")
_ENDPOINT = re.compile(r"(https?://[^/\s@]+(/.*)?)?")
#: User and password behind a URL's scheme. A password may contain ``/`` and ``@``; ``container@account`` is not one.
_USER_AND_PASSWORD = re.compile(r"[^/@:]*:.*@", re.DOTALL)


def _directory(value: str) -> str:
    path = value.removeprefix("file://")
    if not path.strip() or "://" in path:
        raise ValueError(f"expected a directory such as /mnt/shared/runs, got {without_credentials(value)!r}")
    return os.path.abspath(os.path.expanduser(path))


def _bucket_path(value: str) -> str:
    text = value.strip().removeprefix("s3://").removeprefix("s3a://").strip("/")
    if not _BUCKET_PATH.fullmatch(text):
        raise ValueError(f"expected bucket/prefix such as my-bucket/runs, got {without_credentials(value)!r}")
    return text


def _endpoint(value: str) -> str:
    value = value.strip().rstrip("/")
    if not _ENDPOINT.fullmatch(value):
        raise ValueError(f"expected http(s)://host[:port] without credentials, got {without_credentials(value)!r}")
    return value


def _store_url(value: str) -> str:
    protocol, _, path = value.strip().partition("://")
    path = path.strip("/")
    if not path or not re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol):
        raise ValueError(f"expected protocol://bucket/prefix, got {without_credentials(value)!r}")
    if protocol in ("s3", "s3a", "file", "local"):
        raise ValueError(f"{protocol}:// is supported better by S3Storage or LocalStorage; use that block")
    if _USER_AND_PASSWORD.match(path):
        raise ValueError(
            "the URL contains a password, which Prefect would store and show with each flow run; put it into the "
            'secret_options of a saved FsspecStorage, such as {"username": "…", "password": "…"}, and remove it here'
        )
    return f"{protocol}://{path}"


class _StorageSettings(SettingsModel):
    """Base class of the settings of a storage."""

    retry_seconds: NonNegativeFloat = 300.0
    """How long an operation is retried while the storage is unreachable or returns transient errors."""
    preflight: bool = True
    """Test the storage from the driver before training starts."""
    #: A file; while it exists, the storage does not answer. For rehearsals.
    _outage: str = PrivateAttr("")

    @property
    @abstractmethod
    def uri(self) -> str:
        """URI of the folder that contains the run directories, for users and other programs."""

    @property
    def root(self) -> str:
        """Path of the folder that contains the run directories, on the storage's filesystem."""
        return self.uri.rpartition("://")[2]


class LocalStorageSettings(_StorageSettings):
    """A directory for runs. See :class:`LocalStorage`."""

    path: Annotated[str, AfterValidator(_directory)]
    """Directory for run directories: local, or a mount shared by all nodes of the cluster."""

    @property
    def uri(self) -> str:
        return self.path


# A validation error must not show its input: it may be a key.
class S3StorageSettings(_StorageSettings, hide_input_in_errors=True):
    """A bucket for runs. See :class:`S3Storage`."""

    bucket_path: Annotated[str, AfterValidator(_bucket_path)]
    """Bucket and prefix of run directories, such as my-bucket/training/runs."""
    endpoint_url: Annotated[str, AfterValidator(_endpoint)] = Field("", title="Endpoint URL")
    """URL of an S3-compatible store, such as https://minio.example.com:9000. Empty: AWS."""
    region: str = ""
    """Region of the bucket. Empty: the default of the environment."""
    access_key_id: SecretStr = SecretStr("")
    """Access key. Empty, together with the secret: the ambient AWS credentials of each node."""
    secret_access_key: SecretStr = SecretStr("")
    """Secret of the access key."""
    session_token: SecretStr = SecretStr("")
    """Token of temporary credentials, which expire."""
    addressing_style: Literal["auto", "path", "virtual"] = Field("auto", validate_default=True)
    """Put the bucket into the path or into the host name. auto: into the path with an endpoint URL."""
    verify_tls: bool = Field(True, title="Verify TLS")
    """Verify the store's certificate. Off only for a self-signed one."""
    ca_bundle: str = Field("", title="CA Bundle")
    """File of trusted certificates, on every node. Empty: the system's."""

    @field_validator("addressing_style")
    @classmethod
    def _keys_are_whole(cls, value: str, info: ValidationInfo) -> str:
        # Not a validator of the model: pydantic's error for a flow's parameter would show all of the input.
        names = ["access_key_id", "secret_access_key", "session_token"]
        if [name for name in names if info.data.get(name)] not in ([], names[:2], names):
            raise ValueError(
                "access_key_id and secret_access_key belong together, and a session_token to both: set all, or none"
            )
        return value

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket_path}"


class FsspecStorageSettings(_StorageSettings, hide_input_in_errors=True):
    """An object store for runs that fsspec supports. See :class:`FsspecStorage`."""

    url: Annotated[str, AfterValidator(_store_url)] = Field(title="URL")
    """URL of the folder for run directories, such as gs://my-bucket/runs or abfs://container/runs."""
    secret_options: SecretStr = SecretStr("")
    """Secret arguments of the fsspec filesystem, as a JSON object. Empty: the ambient credentials."""
    options: JsonDict = Field(default_factory=dict, validate_default=True)
    """Other arguments of the fsspec filesystem, such as {"project": "my-project"}."""

    @field_validator("options")
    @classmethod
    def _secrets_are_json(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # Not a validator of the secret: pydantic's error for a flow's parameter would show it.
        text = (info.data.get("secret_options") or SecretStr("")).get_secret_value()
        if text.strip("*"):  # a masked value is refused where it is used
            try:
                _JSON_OBJECT.validate_python(text)
            except ValueError:
                raise ValueError('secret_options: expected a JSON object such as {"token": "…"}') from None
        return value

    @property
    def uri(self) -> str:
        return self.url

    @property
    def hidden_options(self) -> dict[str, Any]:
        """The secret arguments of the fsspec filesystem as a dict, parsed from ``secret_options``."""
        return _JSON_OBJECT.validate_python(self.secret_options.get_secret_value())


StorageSettings = LocalStorageSettings | S3StorageSettings | FsspecStorageSettings


def storage_at(text: str) -> StorageSettings | None:
    """Return the settings of the storage at a directory or URL, with the ambient credentials.

    A directory is a text such as ``./runs``, ``~/runs`` or ``/mnt/runs``. Return None for a text that is neither a
    directory nor a URL: it may be the name of a saved block.

    Raises:
        ConfigurationError: The directory or URL is not valid.
    """
    try:
        if text.startswith(("s3://", "s3a://")):
            return S3StorageSettings(bucket_path=text)
        if text.startswith(("file://", "/", ".", "~")):
            return LocalStorageSettings(path=text)
        return FsspecStorageSettings(url=text) if "://" in text else None
    except ValueError as error:
        raise ConfigurationError(f"storage {without_credentials(text)!r}: {error}") from error
