"""Trying a storage before training: what is found, how it is said, and that nothing is left behind."""

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.settings import FsspecStorageSettings, LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.storage import preflight as preflight_module
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.preflight import PREFIX, preflight
from tests.support.s3 import FaultProxy


def _left(storage: Storage) -> list[str]:
    """Return all that is left of the trials."""
    found = storage.folder(storage.settings.root).file_sizes("") or {}
    return [name for name in found if name.startswith(PREFIX)]


def _refusal(settings: Any, kind: str, permanent: bool = True) -> str:
    """Return why a storage is refused."""
    with pytest.raises(StorageFaultError) as refused:
        preflight(settings)
    assert (refused.value.kind, refused.value.permanent) == (kind, permanent)
    return str(refused.value)


@pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
def test_a_storage_that_is_fit_passes_and_nothing_is_left(storage: Storage) -> None:
    storage.run("mnist").replace("a", b"x")
    preflight(storage.settings)
    assert _left(storage) == []
    assert storage.run("mnist").read("a") == b"x"


def test_a_directory_that_cannot_be_used_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"x")
    with pytest.raises(OSError, match=f"{tmp_path}/runs"):
        preflight(LocalStorageSettings(path=str(tmp_path / "runs")))
    reason = _refusal(LocalStorageSettings(path="/sys/runs"), "read-only")  # not even root may write there
    assert "/sys/runs" in reason
    assert "give this user write permission, or use another path" in reason


def test_a_mount_without_hard_links_is_refused(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    assert "use a disk, NFS, or a store" in _refusal(disk.settings, "not supported")
    assert _left(disk) == []


class Unfit(MemoryFileSystem):  # type: ignore[misc]
    """A store that fails at something, by the name of its bucket, and notes what it is asked."""

    protocol = "unfit"
    asked: ClassVar[list[str]] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.asked.append("write")
        if "away" in path:
            raise ConnectionRefusedError
        super().pipe_file(path, value, "overwrite" if "overwrites" in path else mode, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        return [] if "hides" in path else super().ls(path, detail, **options)

    def rm_file(self, path: str) -> None:
        self.asked.append("delete")
        super().rm_file(path)


fsspec.register_implementation(Unfit.protocol, Unfit, clobber=True)


@pytest.fixture
def unfit(request: pytest.FixtureRequest) -> Iterator[FsspecStorageSettings]:
    """A storage in a store that does not do what a run needs."""
    Unfit.asked.clear()
    yield FsspecStorageSettings(url=f"unfit://{request.param}-{uuid.uuid4().hex}/runs")
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    ("unfit", "says"),
    [
        ("overwrites", "an existing object can be created again, so two drivers could use one run"),
        ("hides", "a written object is not listed"),
    ],
    indirect=["unfit"],
)
def test_a_store_that_does_not_do_what_a_run_needs_is_refused(unfit: FsspecStorageSettings, says: str) -> None:
    reason = _refusal(unfit, "unfit")
    for part in (says, unfit.url, "To go on, use a"):
        assert part in reason


def test_a_store_without_its_package_is_refused_with_the_package() -> None:
    with pytest.raises(ConfigurationError, match="gcsfs"):
        preflight(FsspecStorageSettings(url="gs://my-bucket/runs"))


@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"bucket_path": "no-such-bucket/runs"}, "no such bucket"), ({"access_key_id": "AKIA" + "Z" * 16}, "credentials")],
)
def test_a_wrong_bucket_and_wrong_keys_are_said_at_once(
    s3_settings: S3StorageSettings, proxy: FaultProxy, changed: dict[str, str], kind: str
) -> None:
    proxy.allow_keys({s3_settings.access_key_id.get_secret_value()})
    settings = S3StorageSettings(**{**dict(s3_settings), **changed})
    assert settings.uri in _refusal(settings, kind)
    assert len(proxy.requests) <= 4, "asked again and again"


@pytest.mark.parametrize("unfit", ["away"], indirect=True)
def test_a_store_that_is_away_is_said_after_some_seconds_and_not_asked_to_delete(
    unfit: FsspecStorageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preflight_module._RETRY_SECONDS <= 15
    monkeypatch.setattr(preflight_module, "_RETRY_SECONDS", 0.3)
    assert "Is it up and reachable from this machine" in _refusal(unfit, "connection", permanent=False)
    assert len(Unfit.asked) > 1
    assert set(Unfit.asked) == {"write"}
