"""Where run directories live, as plain validated values: the fields of the storage blocks."""

from __future__ import annotations

import json
import os
import re
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PrivateAttr, SecretStr, ValidationInfo, field_validator

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import JsonDict, SettingsModel, without_credentials

DEFAULT_STORAGE = "~/elastic_train_runs"

_BUCKET_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}(/(?!\.{1,2}(/|$))[^/]+)*")
_ENDPOINT = re.compile(r"(https?://[^/\s@]+(/.*)?)?")
#: What begins a URL behind its scheme. The password may hold ``/`` and ``@``; ``container@account`` is none.
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


def _url_of_a_store(value: str) -> str:
    protocol, _, path = value.strip().partition("://")
    path = path.strip("/")
    if not path or not re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol):
        raise ValueError(f"expected protocol://bucket/prefix, got {without_credentials(value)!r}")
    if other := {"s3": "S3Storage", "s3a": "S3Storage", "file": "LocalStorage", "local": "LocalStorage"}.get(protocol):
        raise ValueError(f"{protocol}:// belongs to {other}, which does more for it; use that block")
    if _USER_AND_PASSWORD.match(path):
        raise ValueError(
            "the URL holds a password, which Prefect would keep and show with each flow run; give it in the "
            'secret_options of a saved FsspecStorage, such as {"username": "…", "password": "…"}, and a URL without'
        )
    return f"{protocol}://{path}"


class _StorageSettings(SettingsModel):
    """What all storages have in common."""

    retry_seconds: NonNegativeFloat = 300.0
    """How long an operation is repeated while the storage is away or answers with passing errors."""
    preflight: bool = True
    """Try the storage from the driver and from each node before training starts."""
    #: A file that, while it is there, makes this a storage that does not answer; for rehearsals.
    _outage: str = PrivateAttr("")

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where runs are, for people and other programs."""

    @property
    def root(self) -> str:
        """The path below which runs are."""
        return self.uri.rpartition("://")[2]


class LocalStorageSettings(_StorageSettings):
    """A directory that holds runs. See :class:`LocalStorage`."""

    path: Annotated[str, AfterValidator(_directory)]
    """Directory for run directories: local, or a mount shared by all nodes of the cluster."""

    @property
    def uri(self) -> str:
        return self.path


# What a validation error shows of its input may be a key.
class S3StorageSettings(_StorageSettings, hide_input_in_errors=True):
    """A bucket that holds runs. See :class:`S3Storage`."""

    bucket_path: Annotated[str, AfterValidator(_bucket_path)]
    """Bucket, and the prefix below which runs are: such as my-bucket/training/runs."""
    endpoint_url: Annotated[str, AfterValidator(_endpoint)] = Field("", title="Endpoint URL")
    """Of an S3-compatible store, such as https://minio.example.com:9000. Empty: AWS."""
    region: str = ""
    """Region of the bucket. Empty: as the environment says."""
    access_key_id: SecretStr = SecretStr("")
    """Empty, together with the secret: the ambient AWS credentials of each node."""
    secret_access_key: SecretStr = SecretStr("")
    """Of the key id."""
    session_token: SecretStr = SecretStr("")
    """Of temporary credentials, which end some time."""
    addressing_style: Literal["auto", "path", "virtual"] = Field("auto", validate_default=True)
    """Whether the bucket is in the path or in the host name. auto: in the path with an endpoint URL."""
    verify_tls: bool = Field(True, title="Verify TLS")
    """Off only for a store with a certificate of its own."""
    ca_bundle: str = Field("", title="CA Bundle")
    """File with the certificates to trust, on every node. Empty: the system's."""

    @field_validator("addressing_style")
    @classmethod
    def _keys_are_whole(cls, value: str, info: ValidationInfo) -> str:
        # Not a check of the whole model: of a flow's parameter pydantic would show all of its input, the keys included.
        keys = ("access_key_id", "secret_access_key", "session_token")
        key, secret, token = (bool(info.data.get(name)) for name in keys)
        if key != secret or (token and not key):
            raise ValueError(
                "access_key_id and secret_access_key belong together, and a session_token to both: give all, or none"
            )
        return value

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket_path}"


class FsspecStorageSettings(_StorageSettings, hide_input_in_errors=True):
    """An object store that fsspec knows and that holds runs. See :class:`FsspecStorage`."""

    url: Annotated[str, AfterValidator(_url_of_a_store)] = Field(title="URL")
    """URL below which runs are, such as gs://my-bucket/runs or abfs://container/runs."""
    secret_options: SecretStr = SecretStr("")
    """Arguments of the fsspec filesystem that nobody shall read, as a JSON object. Empty: the ambient credentials."""
    options: JsonDict = Field(default_factory=dict, validate_default=True)
    """More arguments, which are no secrets, such as {"project": "my-project"}."""

    @field_validator("options")
    @classmethod
    def _secrets_are_json(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # Not a check of the secret itself: of a flow's parameter pydantic would show what it refuses.
        text = (info.data.get("secret_options") or SecretStr("")).get_secret_value().strip()
        if text.strip("*"):  # masked ones are refused where they are used
            try:
                options = json.loads(text)
            except ValueError:
                options = None
            if not isinstance(options, dict):
                raise ValueError('secret_options: expected a JSON object such as {"token": "…"}')
        return value

    @property
    def uri(self) -> str:
        return self.url

    @property
    def hidden_options(self) -> dict[str, Any]:
        """Those arguments of the fsspec filesystem that are secrets."""
        return dict(json.loads(self.secret_options.get_secret_value().strip() or "{}"))


StorageSettings = LocalStorageSettings | S3StorageSettings | FsspecStorageSettings


def storage_at(text: str) -> StorageSettings | None:
    """Return the storage at a directory (``./runs``, ``~/runs``, ``/mnt/runs``) or a URL, with the ambient credentials.

    None if the text is neither, and perhaps the name of a saved block.
    """
    try:
        if text.startswith(("s3://", "s3a://")):
            return S3StorageSettings(bucket_path=text)
        if text.startswith(("file://", "/", ".", "~")):
            return LocalStorageSettings(path=text)
        return FsspecStorageSettings(url=text) if "://" in text else None
    except ValueError as error:
        raise ConfigurationError(f"storage {without_credentials(text)!r}: {error}") from error
