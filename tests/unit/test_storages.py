"""Storages as a person names them, and secrets that no text of theirs holds."""

import pickle
from typing import Any

import pytest
from pydantic import SecretStr

from prefect_elastic_train.blocks.lookup import chosen_block
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import FsspecStorageSettings, LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.storage.opening import Storage
from tests.unit.test_storage_faults import SECRET, WITH_SECRETS


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("/mnt/runs", LocalStorageSettings(path="/mnt/runs")),
        ("file:///mnt/runs", LocalStorageSettings(path="/mnt/runs")),
        ("s3://my-bucket/runs/", S3StorageSettings(bucket_path="my-bucket/runs")),
        ("s3a://my-bucket", S3StorageSettings(bucket_path="my-bucket")),
        ("abfs://container/runs/", FsspecStorageSettings(url="abfs://container/runs")),
        *(
            (url, FsspecStorageSettings(url=url))
            for url in ("abfs://container@account.dfs/runs", "sftp://ada@host:22/runs", "gs://my-bucket/a:b@c")
        ),
    ],
)
def test_a_directory_and_a_url_name_a_storage_with_the_ambient_credentials(text: str, settings: Any) -> None:
    assert chosen_block("storage", text).plain() == settings


@pytest.mark.parametrize("text", ["s3://", "gs://", f"s3://AKIA:x/{SECRET}/x@my-bucket/runs"])
def test_a_url_that_names_no_storage_is_refused_with_what_was_typed_but_a_password(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        chosen_block("storage", text)
    assert (repr(text) in str(refused.value)) == (SECRET not in text)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "root", "uri"),
    [
        (LocalStorageSettings(path="/mnt/runs"), "/mnt/runs", "/mnt/runs"),
        (S3StorageSettings(bucket_path="s3://my-bucket/runs"), "my-bucket/runs", "s3://my-bucket/runs"),
        (FsspecStorageSettings(url="gs://my-bucket/runs/"), "my-bucket/runs", "gs://my-bucket/runs"),
    ],
)
def test_a_run_is_below_its_storage_and_repeats_for_as_long_as_it_is_told(settings: Any, root: str, uri: str) -> None:
    run = Storage(settings.model_copy(update={"retry_seconds": 77})).run("mnist")
    assert (settings.root, run.path, run.uri) == (root, f"{root}/mnist", f"{uri}/mnist")
    limited = [run, run.with_retry_limit(3), run.with_retry_limit(100)]
    assert [(one.path, one.retries.seconds) for one in limited] == [(run.path, 77), (run.path, 3), (run.path, 77)]


@pytest.mark.parametrize("settings", WITH_SECRETS)
def test_no_text_of_a_storage_holds_a_secret_and_a_copy_has_them_all(settings: Any) -> None:
    storage = Storage(settings)
    run = storage.run("mnist")
    for one in (settings, storage, run, run.retries, settings.model_dump_json()):
        assert SECRET not in f"{one!r} {one}"
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    secrets = [value.get_secret_value() for value in dict(copy).values() if isinstance(value, SecretStr)]
    assert all(SECRET in secret for secret in secrets)
