"""Settings as plain values: what is refused, and what the refusal says."""

import json
import math
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, ValidationError, create_model

from prefect_elastic_train import ElasticScaling, FsspecStorage, RayCluster, S3Storage
from prefect_elastic_train.blocks.lookup import BLOCK_TYPES
from prefect_elastic_train.core.settings import (
    ClusterSettings,
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    ScalingSettings,
)

BLOCKS = [block for blocks in BLOCK_TYPES.values() for block in blocks]
#: What cannot be left out, and what a field is refused without.
BESIDE = {
    LocalStorageSettings: {"path": "/runs"},
    S3StorageSettings: {"bucket_path": "my-bucket/runs"},
    FsspecStorageSettings: {"url": "gs://my-bucket/runs"},
}

_DIRECTORY = "expected a directory such as"
_BUCKET = "expected bucket/prefix such as my-bucket/runs"
_ENDPOINT = "expected http(s)://host[:port] without credentials"
_ADDRESS = "expected '' (a local cluster), 'auto' or 'host:port' (from a node of the cluster, not the Ray client)"
#: Settings, values, and what is said of them. The public API lists the bounds.
REFUSED = [
    *(
        (ScalingSettings, {"min_workers": value}, f"\nmin_workers … input_value={value!r}")
        for value in (0, 2.5, "many")
    ),
    *(
        (ScalingSettings, {"resources_per_worker": value}, "\nresources_per_worker")
        for value in ({"CPU": -1}, {"CPU": math.nan}, {"CPU": "four"}, [1], "[4]")
    ),
    (ScalingSettings, {"label_selector": {"zone": 1}}, "\nlabel_selector"),
    *((LocalStorageSettings, {"retry_seconds": value}, "\nretry_seconds") for value in (-1, math.nan)),
    (ScalingSettings, {"resources_per_worker": '{"CPU": 4'}, 'expected a JSON object … {"CPU": 4'),
    (ScalingSettings, {"resources_per_worker": {"CPU": 0}}, "must have a resource of at least 0.0001"),
    (ScalingSettings, {"min_workers": 3, "max_workers": 2}, "min_workers (3) must be at most max_workers (2); raise"),
    *((LocalStorageSettings, {"path": path}, f"{_DIRECTORY} … {path!r}") for path in ("  ", "s3://bucket/runs")),
    *(
        (S3StorageSettings, {"bucket_path": path}, f"{_BUCKET} … {path!r}")
        for path in ("", "gs://b/runs", "b/runs/../x")
    ),
    (S3StorageSettings, {"endpoint_url": "minio:9000"}, f"{_ENDPOINT} … 'minio:9000'"),
    (S3StorageSettings, {"endpoint_url": "https://me:hush@minio"}, f"{_ENDPOINT} … 'https://***@minio'"),
    *((S3StorageSettings, {key: "hush"}, "belong together") for key in ("session_token", "secret_access_key")),
    (FsspecStorageSettings, {"url": "bucket/runs"}, "expected protocol://bucket/prefix, got 'bucket/runs'"),
    (FsspecStorageSettings, {"url": "s3://b/runs"}, "s3:// is supported better by S3Storage … use that block"),
    (FsspecStorageSettings, {"url": "ftp://me:hush@host/runs"}, "the URL contains a password … secret_options"),
    (FsspecStorageSettings, {"secret_options": '["hush"]'}, 'expected a JSON object such as {"token": "…"}'),
    # What pydantic would show beside what is wrong.
    (S3StorageSettings, {"bucket_path": "", "access_key_id": "hush", "secret_access_key": "hush"}, ""),
    (S3StorageSettings, {"secret_access_key": ["hush"]}, ""),
    (S3StorageSettings, {"endpoint_url": "https://ada:p@hush@minio:9000"}, ""),
    (S3StorageSettings, {"bucket_path": "s3://AKIA:x/hush/x@my-bucket/runs"}, ""),
    (FsspecStorageSettings, {"url": "gs://", "secret_options": '{"token": "hush"}'}, ""),
    (FsspecStorageSettings, {"url": "FTP://ada:hush@host/runs"}, ""),
    *(
        (ClusterSettings, {"address": address}, f"{_ADDRESS} … got {address!r}")
        for address in ("http://", "https://head:99999", "https://head/?token=1", "ray://head:10001", "head", "head:0")
    ),
    (ClusterSettings, {"address": "https://ada:hush@head"}, f"{_ADDRESS} … got 'https://***@head'"),
    (ClusterSettings, {"driver_resources": {"CPU": 1}}, "is for a cluster that runs are submitted to by http"),
    (ClusterSettings, {"address": "http://head", "verify_tls": False}, "verify_tls is for … by https://"),
    (
        ClusterSettings,
        {"address": "auto", "num_cpus": 4, "auth_token": "hush"},
        "num_cpus is for a training that starts its own cluster",
    ),
    (ClusterSettings, {"auth_tokn": "hush"}, "auth_tokn\n  Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("settings", "values", "says"), REFUSED)
def test_a_refusal_says_what_is_allowed_and_shows_no_secret(
    settings: type[BaseModel], values: dict[str, Any], says: str
) -> None:
    for model in (settings, next(block for block in BLOCKS if issubclass(block, settings))):
        with pytest.raises(ValidationError) as refused:
            model(**{**BESIDE.get(settings, {}), **values})
        message = str(refused.value)
        assert [words for words in says.split(" … ") if words not in message] == []
        assert "hush" not in message


@pytest.mark.parametrize(
    ("block", "values", "says"),
    [
        (S3Storage, {"bucket_path": "my-bucket/runs", "session_token": "hush"}, "belong together"),
        (FsspecStorage, {"url": "gs://b/runs", "secret_options": "hush"}, "secret_options: expected a JSON object"),
    ],
)
def test_a_secret_that_is_refused_is_not_shown_where_the_block_is_a_flows_parameter(
    block: type[BaseModel], values: dict[str, str], says: str
) -> None:
    parameters = create_model("Parameters", storage=(block, ...))
    with pytest.raises(ValidationError, match=says) as refused:
        parameters(storage=values)
    assert "hush" not in str(refused.value.errors()), "which Prefect logs"


@pytest.mark.parametrize(
    ("address", "is_submitted"),
    [
        *((address, False) for address in ("", " auto ", "head.example.org:1", "[fe80::1]:65535")),
        *((f"{url}/", True) for url in (" https://ray.example.org/a/prefix", "http://[fe80::1]:1")),
    ],
)
def test_addresses_that_can_be_used_are_taken_without_blanks_and_a_last_slash(address: str, is_submitted: bool) -> None:
    cluster = ClusterSettings(address=address)
    assert cluster.address == address.strip().rstrip("/")
    assert (cluster.is_local, cluster.is_submitted) == (address == "", is_submitted)


@pytest.mark.parametrize(
    ("block", "field", "text"),
    [
        (ElasticScaling, "resources_per_worker", '{"CPU": 4}'),
        (ElasticScaling, "label_selector", '{"market-type": "spot"}'),
        (RayCluster, "runtime_env", '{"pip": ["einops"]}'),
    ],
)
def test_dict_fields_take_the_form_that_the_ui_sends(block: Any, field: str, text: str) -> None:
    value = json.loads(text)
    for given in ({"__prefect_kind": "json", "value": text}, {"__prefect_kind": "json", "value": value}, text, value):
        assert getattr(block(**{field: given}), field) == value
        if field == "label_selector":
            assert getattr(block(**{field: [given]}), field) == [value]
    for empty in ({"__prefect_kind": "json", "value": " "}, "", {}):
        assert getattr(block(**{field: empty}), field) == {}


def test_plain_keeps_every_value_of_a_block() -> None:
    values = {"address": "https://ray/prefix", "auth_token": SecretStr("hush"), "verify_tls": False}
    kept = RayCluster(**values).plain()
    assert kept == ClusterSettings(**values)
    assert {name: getattr(kept, name) for name in values} == values


def test_a_block_of_a_user_may_have_a_mixin_and_more_fields() -> None:
    class Owned:
        """A mixin that knows nothing of blocks."""

    class TeamStorage(Owned, S3Storage):
        _block_type_name = "Team Storage"
        team: str = "vision"

    assert TeamStorage(bucket_path="bucket/runs").plain() == S3StorageSettings(bucket_path="bucket/runs")


def test_a_storage_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir("/tmp")
    for path, absolute in {"~/runs": "/home/ada/runs", "runs/../x": "/tmp/x", "file:///mnt/runs": "/mnt/runs"}.items():
        settings = LocalStorageSettings(path=path)
        assert settings.path == settings.root == settings.uri == absolute
