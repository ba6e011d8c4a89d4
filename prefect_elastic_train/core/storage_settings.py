"""Settings of storages as plain validated values: the fields of the storage blocks. Belongs to all processes."""

import os
import re
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PrivateAttr,
    SecretStr,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import JsonDict, SettingsModel, without_credentials

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
