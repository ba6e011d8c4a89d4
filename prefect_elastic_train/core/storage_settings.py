"""Where run directories live, as plain validated values: see the storage blocks.

Like :mod:`prefect_elastic_train.core.settings`, read by the driver without importing Prefect.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from prefect_elastic_train.core.fields import JsonDict, SettingsModel
from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.outcomes import ConfigurationError

#: Where runs go when no storage is given.
DEFAULT_STORAGE = "~/elastic_train_runs"

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
#: What begins a URL behind its scheme. The password may hold ``/`` and ``@``; ``container@account`` is none.
_USER_AND_PASSWORD = re.compile(r"[^/@:]*:.*@", re.DOTALL)


class _StorageSettings(SettingsModel):
    """What all storages have in common."""

    retry_seconds: float = Field(
        default=300.0,
        ge=0,
        title="Retry bound (seconds)",
        description="How long an operation is repeated while the storage is away or answers with passing errors.",
    )
    preflight: bool = Field(
        default=True,
        description="Try the storage from the driver and from each node before training starts.",
    )


class LocalStorageSettings(_StorageSettings):
    """A directory that holds runs. See :class:`LocalStorage`."""

    path: str = Field(
        description="Directory for run directories: local, or a mount shared by all nodes of the cluster."
    )

    @field_validator("path")
    @classmethod
    def _path_is_a_directory_path(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a directory, got an empty string")
        if "://" in value and not value.startswith("file://"):
            raise ValueError(
                f"{without_credentials(value)!r} is a URL; LocalStorage takes a directory such as /mnt/shared/runs"
            )
        path = value.removeprefix("file://")
        if "\0" in path:
            raise ValueError("must not contain a NUL character")
        return os.path.abspath(os.path.expanduser(path))

    @property
    def root(self) -> str:
        """The path below which runs are."""
        return self.path

    @property
    def uri(self) -> str:
        """The same for people and other programs."""
        return self.path


class S3StorageSettings(_StorageSettings):
    """A bucket that holds runs. See :class:`S3Storage`."""

    # What a validation error shows of its input may be a key.
    model_config = ConfigDict(hide_input_in_errors=True)

    bucket_path: str = Field(
        title="Bucket and prefix",
        description="Bucket, and the prefix below which runs are: such as my-bucket/training/runs.",
    )
    endpoint_url: str = Field(
        default="",
        title="Endpoint URL",
        description="Of an S3-compatible store, such as https://minio.example.com:9000. Empty: AWS.",
    )
    region: str = Field(default="", description="Region of the bucket. Empty: as the environment says.")
    access_key_id: SecretStr = Field(
        default=SecretStr(""),
        title="Access key id",
        description="Empty, together with the secret: the ambient AWS credentials of each node.",
    )
    secret_access_key: SecretStr = Field(default=SecretStr(""), title="Secret access key", description="Of the key id.")
    session_token: SecretStr = Field(
        default=SecretStr(""), title="Session token", description="Of temporary credentials, which end some time."
    )
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        title="Addressing style",
        description="Whether the bucket is in the path or in the host name. auto: in the path with an endpoint URL.",
    )
    verify_tls: bool = Field(
        default=True, title="Verify TLS certificates", description="Off only for a store with a certificate of its own."
    )
    ca_bundle: str = Field(
        default="",
        title="CA bundle",
        description="File with the certificates to trust, on every node. Empty: the system's.",
    )

    @field_validator("bucket_path")
    @classmethod
    def _bucket_path_is_one(cls, value: str) -> str:
        text = value.strip().removeprefix("s3://").removeprefix("s3a://").strip("/")
        if "://" in text:
            raise ValueError(
                f"{without_credentials(value)!r} is a URL of another store; S3Storage takes bucket/prefix or s3://bucket/prefix"
            )
        parts = text.split("/")
        if not _BUCKET.fullmatch(parts[0]):
            raise ValueError(f"expected bucket/prefix such as my-bucket/runs, got {without_credentials(value)!r}")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the prefix must not have empty parts, '.' or '..', got {without_credentials(value)!r}")
        return text

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_is_a_url(cls, value: str) -> str:
        value = value.strip().rstrip("/")
        if value and not re.match(r"https?://[^/\s@]+(/|$)", value):
            raise ValueError(
                f"expected http(s)://host[:port] without credentials in it, got {without_credentials(value)!r}"
            )
        return value

    @field_validator("session_token")
    @classmethod
    def _keys_are_whole(cls, value: SecretStr, info: Any) -> SecretStr:
        # Fields are validated in order, so the keys are known here; a check of the model would show its input.
        key, secret = (info.data.get(name) for name in ("access_key_id", "secret_access_key"))
        if key is None or secret is None:
            return value
        if bool(key.get_secret_value()) != bool(secret.get_secret_value()):
            raise ValueError("access_key_id and secret_access_key belong together: give both, or neither")
        if value.get_secret_value() and not key.get_secret_value():
            raise ValueError("a session_token belongs to an access_key_id and its secret_access_key: give all three")
        return value

    @model_validator(mode="before")
    @classmethod
    def _token_is_checked(cls, values: Any) -> Any:
        """Have the check of the keys run without a token too."""
        return {**values, "session_token": values.get("session_token") or ""} if isinstance(values, dict) else values

    @property
    def root(self) -> str:
        """The path below which runs are."""
        return self.bucket_path

    @property
    def uri(self) -> str:
        """The same for people and other programs."""
        return f"s3://{self.bucket_path}"

    @property
    def is_ambient(self) -> bool:
        """Whether the credentials are those of the environment, which may renew them."""
        return not self.access_key_id.get_secret_value()


class FsspecStorageSettings(_StorageSettings):
    """An object store that fsspec knows and that holds runs. See :class:`FsspecStorage`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(description="URL below which runs are, such as gs://my-bucket/runs or abfs://container/runs.")
    options: JsonDict = Field(
        default_factory=dict,
        description='Arguments of the fsspec filesystem that are no secrets, such as {"project": "my-project"}.',
    )
    secret_options: SecretStr = Field(
        default=SecretStr(""),
        title="Secret options",
        description="More arguments, as a JSON object, that nobody shall read. Empty: the ambient credentials.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_of_a_store(cls, value: str) -> str:
        value = value.strip().rstrip("/")
        protocol, separator, path = value.partition("://")
        if not separator or not path.strip("/") or not re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol):
            raise ValueError(f"expected protocol://bucket/prefix, got {without_credentials(value)!r}")
        other = {"s3": "S3Storage", "s3a": "S3Storage", "file": "LocalStorage", "local": "LocalStorage"}.get(protocol)
        if other:
            raise ValueError(f"{protocol}:// belongs to {other}, which does more for it; use that block")
        if _USER_AND_PASSWORD.match(path):
            raise ValueError(
                "the URL holds a password, which Prefect would keep and show with each flow run; give it in the "
                'secret_options of a saved FsspecStorage, such as {"username": "…", "password": "…"}, and a URL without'
            )
        return value

    @field_validator("secret_options")
    @classmethod
    def _secret_options_are_json(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value().strip()
        if text and text.strip("*"):  # masked ones are refused where they are used
            try:
                options = json.loads(text)
            except ValueError:
                options = None
            if not isinstance(options, dict):
                raise ValueError('expected a JSON object such as {"token": "…"}')
        return value

    @property
    def root(self) -> str:
        """The path below which runs are."""
        return self.url.partition("://")[2].strip("/")

    @property
    def uri(self) -> str:
        """The same for people and other programs."""
        return self.url

    @property
    def hidden_options(self) -> dict[str, Any]:
        """Those arguments of the fsspec filesystem that are secrets."""
        options: dict[str, Any] = json.loads(self.secret_options.get_secret_value().strip() or "{}")
        return options

    @property
    def all_options(self) -> dict[str, Any]:
        """Arguments of the fsspec filesystem, secrets included."""
        return {**self.options, **self.hidden_options}


StorageSettings = LocalStorageSettings | S3StorageSettings | FsspecStorageSettings


def storage_at(text: str) -> StorageSettings | None:
    """Return the storage at a directory or a URL, with the ambient credentials.

    Args:
        text: A directory (``./runs``, ``~/runs``, ``/mnt/runs``) or a URL (``s3://bucket/runs``).

    Returns:
        None if it is neither, and perhaps the name of a saved block.

    Raises:
        ConfigurationError: It is one that cannot be a storage.
    """
    try:
        if text.startswith(("s3://", "s3a://")):
            return S3StorageSettings(bucket_path=text)
        if text.startswith(("file://", "/", ".", "~")):
            return LocalStorageSettings(path=text)
        if "://" in text:
            return FsspecStorageSettings(url=text)
    except ValueError as error:
        raise ConfigurationError(f"storage {without_credentials(text)!r}: {error}") from error
    return None
