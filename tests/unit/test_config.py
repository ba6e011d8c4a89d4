"""Settings as plain values: what is refused, and what the refusal says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
)
from prefect_elastic_train.core.settings import (
    CheckpointSettings,
    ClusterSettings,
    FailureSettings,
    ScalingSettings,
    plain,
)
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, LocalStorageSettings, S3StorageSettings

#: Settings, field, bad value as it is given, and what the message must say: the value and the rule.
REFUSED: list[tuple[type[BaseModel], str, Any, list[str]]] = [
    (ScalingSettings, "min_workers", 0, ["0", "greater than or equal to 1"]),
    (ScalingSettings, "min_workers", 2.5, ["2.5", "valid integer"]),
    (ScalingSettings, "min_workers", True, ["True", "expected a whole number, got a boolean"]),
    (ScalingSettings, "min_workers", "many", ["many", "valid integer"]),
    (ScalingSettings, "max_workers", -1, ["-1", "greater than or equal to 1"]),
    (ScalingSettings, "max_workers", False, ["False", "expected a whole number, got a boolean"]),
    (ScalingSettings, "accelerator", "npu", ["npu", "'cpu', 'gpu' or 'tpu'"]),
    (ScalingSettings, "resources_per_worker", {"CPU": -1}, ["'CPU'", "-1", "0 or more"]),
    (ScalingSettings, "resources_per_worker", {"CPU": "four"}, ["four", "valid number"]),
    (ScalingSettings, "resources_per_worker", [1], ["[1]", "valid dictionary"]),
    (ScalingSettings, "resources_per_worker", '{"CPU": 4', ['{"CPU": 4', "expected a JSON object"]),
    (ScalingSettings, "resources_per_worker", "[4]", ["[4]", "valid dictionary"]),
    (ScalingSettings, "resize_check_interval_seconds", 0, ["0", "greater than 0"]),
    (ScalingSettings, "resize_check_interval_seconds", math.nan, ["nan", "greater than 0"]),
    (ScalingSettings, "wait_for_max_seconds", -0.1, ["-0.1", "greater than or equal to 0"]),
    (ScalingSettings, "stability_delay_seconds", -0.1, ["-0.1", "greater than or equal to 0"]),
    (ScalingSettings, "resize_patience_seconds", -1, ["-1", "greater than or equal to 0"]),
    (ScalingSettings, "capacity_timeout_seconds", math.nan, ["nan", "greater than or equal to 0"]),
    (ScalingSettings, "placement_strategy", "NEAR", ["NEAR", "'PACK', 'SPREAD', 'STRICT_PACK' or 'STRICT_SPREAD'"]),
    (ScalingSettings, "label_selector", {"zone": 1}, ["1", "valid string"]),
    (ScalingSettings, "topology", 4, ["4", "valid string"]),
    (ScalingSettings, "accelerator_type", 100, ["100", "valid string"]),
    (FailureSettings, "max_failures", -2, ["-2", "greater than or equal to -1"]),
    (FailureSettings, "max_preemption_failures", -2, ["-2", "greater than or equal to -1"]),
    (FailureSettings, "driver_restarts", -1, ["-1", "greater than or equal to 0"]),
    (FailureSettings, "driver_restarts", 1001, ["1001", "less than or equal to 1000"]),
    (FailureSettings, "driver_restart_delay_seconds", -1, ["-1", "greater than or equal to 0"]),
    (FailureSettings, "driver_restart_delay_seconds", 3601, ["3601", "less than or equal to 3600"]),
    (FailureSettings, "preemption_grace_seconds", -1, ["-1", "greater than or equal to 0"]),
    (FailureSettings, "relax_collectives_on_preemption", "perhaps", ["perhaps", "valid boolean"]),
    (FailureSettings, "max_attempts_without_progress", 0, ["0", "greater than or equal to 1"]),
    (FailureSettings, "stall_timeout_seconds", -1, ["-1", "greater than or equal to 0"]),
    (FailureSettings, "ignored_checkpoint", "stop", ["stop", "'warn' or 'fail'"]),
    (CheckpointSettings, "keep", 0, ["0", "greater than or equal to 1"]),
    (CheckpointSettings, "keep", True, ["True", "expected a whole number, got a boolean"]),
    (CheckpointSettings, "score_attribute", 1, ["1", "valid string"]),
    (CheckpointSettings, "score_order", "best", ["best", "'max' or 'min'"]),
    (LocalStorageSettings, "path", "", ["''", "must name a directory, got an empty string"]),
    (LocalStorageSettings, "path", "  ", ["'  '", "must name a directory"]),
    (LocalStorageSettings, "path", "s3://bucket/runs", ["'s3://bucket/runs' is a URL", "takes a directory"]),
    (LocalStorageSettings, "path", "/runs\0", ["must not contain a NUL character"]),
    (LocalStorageSettings, "retry_seconds", -1, ["-1", "greater than or equal to 0"]),
    (LocalStorageSettings, "retry_seconds", math.nan, ["nan", "greater than or equal to 0"]),
    (LocalStorageSettings, "preflight", "perhaps", ["perhaps", "valid boolean"]),
    (S3StorageSettings, "bucket_path", "", ["''", "expected bucket/prefix such as my-bucket/runs"]),
    (S3StorageSettings, "bucket_path", "my bucket/runs", ["'my bucket/runs'", "expected bucket/prefix"]),
    (S3StorageSettings, "bucket_path", "gs://b/runs", ["'gs://b/runs' is a URL of another store", "s3://bucket"]),
    (
        S3StorageSettings,
        "bucket_path",
        "my-bucket/runs/../x",
        ["'my-bucket/runs/../x'", "must not have empty parts, '.' or '..'"],
    ),
    (S3StorageSettings, "bucket_path", "my-bucket//runs", ["'my-bucket//runs'", "must not have empty parts"]),
    (S3StorageSettings, "endpoint_url", "minio:9000", ["'minio:9000'", "expected http(s)://host[:port]"]),
    (S3StorageSettings, "endpoint_url", "ftp://minio", ["'ftp://minio'", "expected http(s)://host[:port]"]),
    (S3StorageSettings, "region", 1, ["valid string"]),
    (S3StorageSettings, "access_key_id", 1, ["valid string"]),
    (S3StorageSettings, "secret_access_key", 1, ["valid string"]),
    (S3StorageSettings, "session_token", "t", ["belongs to an access_key_id and its secret_access_key: give all"]),
    (S3StorageSettings, "addressing_style", "host", ["'auto', 'path' or 'virtual'"]),
    (S3StorageSettings, "verify_tls", "perhaps", ["valid boolean"]),
    (S3StorageSettings, "ca_bundle", 1, ["valid string"]),
    (S3StorageSettings, "retry_seconds", -1, ["greater than or equal to 0"]),
    (S3StorageSettings, "preflight", "perhaps", ["valid boolean"]),
    (FsspecStorageSettings, "url", "bucket/runs", ["'bucket/runs'", "expected protocol://bucket/prefix"]),
    (FsspecStorageSettings, "url", "gs://", ["'gs:'", "expected protocol://bucket/prefix"]),
    (FsspecStorageSettings, "url", "s3://b/runs", ["s3:// belongs to S3Storage", "use that block"]),
    (FsspecStorageSettings, "url", "file:///runs", ["file:// belongs to LocalStorage", "use that block"]),
    (FsspecStorageSettings, "options", "{token", ["expected a JSON object"]),
    (FsspecStorageSettings, "secret_options", "[1]", ['expected a JSON object such as {"token": "…"}']),
    (FsspecStorageSettings, "retry_seconds", -1, ["greater than or equal to 0"]),
    (FsspecStorageSettings, "preflight", "perhaps", ["valid boolean"]),
    (ClusterSettings, "address", "http://", ["got 'http://'", "'http://head:8265'"]),
    (ClusterSettings, "address", "https://head:99999", ["got 'https://head:99999'", "URL of a Ray dashboard"]),
    (ClusterSettings, "address", "https://head/?token=1", ["URL of a Ray dashboard"]),
    (ClusterSettings, "address", "https://ada:hush@head", ["holds credentials", "auth_token"]),
    (ClusterSettings, "address", "ray://head:10001", ["'ray://head:10001'", "'auto' or 'host:port'"]),
    (ClusterSettings, "address", "head", ["got 'head'", "'auto', 'host:port' (port 1 to 65535) or 'http(s)://"]),
    (ClusterSettings, "address", "head:0", ["got 'head:0'", "port 1 to 65535"]),
    (ClusterSettings, "address", "head:65536", ["got 'head:65536'", "port 1 to 65535"]),
    (ClusterSettings, "runtime_env", "{pip", ["{pip", "expected a JSON object"]),
    (ClusterSettings, "num_cpus", -1, ["got -1", "greater than or equal to 0"]),
    (ClusterSettings, "num_gpus", -2, ["got -2", "greater than or equal to -1"]),
    (ClusterSettings, "working_dir", 1, ["valid string"]),
    (ClusterSettings, "connect_timeout_seconds", 0, ["got 0", "greater than"]),
    (ClusterSettings, "unreachable_timeout_seconds", -1, ["got -1", "greater than"]),
    (ClusterSettings, "driver_resources", {"CPU": "one"}, ["CPU 'one'", "an amount of 0 or more"]),
    (ClusterSettings, "driver_resources", {"CPU": 1}, ["driver_resources is for clusters that runs are submitted to"]),
    (ClusterSettings, "verify_tls", False, ["verify_tls is for clusters", "by https", "address is ''"]),
    (ClusterSettings, "ca_bundle", "/own.pem", ["ca_bundle is for clusters", "by https", "address is ''"]),
]

#: Each plain settings class, and values that satisfy all of its fields.
COMPLETE: dict[type[BaseModel], dict[str, Any]] = {
    ScalingSettings: {
        "min_workers": 2,
        "max_workers": 8,
        "accelerator": "tpu",
        "resources_per_worker": {"CPU": 4.0, "TPU": 8.0},
        "resize_check_interval_seconds": 5.0,
        "wait_for_max_seconds": 1.0,
        "stability_delay_seconds": 2.0,
        "resize_patience_seconds": 0.0,
        "capacity_timeout_seconds": 3600.0,
        "placement_strategy": "SPREAD",
        "label_selector": {},  # never beside a topology
        "topology": "2x4",
        "accelerator_type": "TPU-V6E",
    },
    FailureSettings: {
        "max_failures": -1,
        "max_preemption_failures": 7,
        "driver_restarts": 9,
        "driver_restart_delay_seconds": 1.5,
        "preemption_grace_seconds": 30.0,
        "relax_collectives_on_preemption": True,
        "max_attempts_without_progress": 4,
        "stall_timeout_seconds": 600.0,
        "ignored_checkpoint": "fail",
    },
    CheckpointSettings: {"keep": 3, "score_attribute": "loss", "score_order": "min"},
    LocalStorageSettings: {"path": "/mnt/shared/runs", "retry_seconds": 60.0, "preflight": False},
    S3StorageSettings: {
        "bucket_path": "my-bucket/training/runs",
        "endpoint_url": "https://minio.example.com:9000",
        "region": "eu-central-1",
        "access_key_id": SecretStr("hush"),
        "secret_access_key": SecretStr("hushhush"),
        "session_token": SecretStr("hushhushhush"),
        "addressing_style": "virtual",
        "verify_tls": False,
        "ca_bundle": "/etc/ssl/own.pem",
        "retry_seconds": 60.0,
        "preflight": False,
    },
    FsspecStorageSettings: {
        "url": "gs://my-bucket/runs",
        "options": {"project": "my-project"},
        "secret_options": SecretStr('{"token": "hush"}'),
        "retry_seconds": 60.0,
        "preflight": False,
    },
    ClusterSettings: {
        "address": "https://ray.example.com/prefix",
        "auth_token": SecretStr("hush"),
        "runtime_env": {"pip": ["einops"]},
        "num_cpus": 0,
        "num_gpus": -1,
        "working_dir": "/code",
        "connect_timeout_seconds": 3.0,
        "unreachable_timeout_seconds": 60.0,
        "driver_resources": {"CPU": 1, "on_demand": 0.01},
        "verify_tls": False,
        "ca_bundle": "/etc/ssl/own.pem",
    },
}

BLOCK_OF = {
    ScalingSettings: ElasticScaling,
    FailureSettings: FailureBudget,
    CheckpointSettings: CheckpointPolicy,
    LocalStorageSettings: LocalStorage,
    S3StorageSettings: S3Storage,
    FsspecStorageSettings: FsspecStorage,
    ClusterSettings: RayCluster,
}

#: What cannot be left out.
REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    LocalStorageSettings: {"path": "/runs"},
    S3StorageSettings: {"bucket_path": "my-bucket/runs"},
    FsspecStorageSettings: {"url": "gs://my-bucket/runs"},
}

#: Their errors hide what may be a secret.
SECRETIVE = (ClusterSettings, S3StorageSettings, FsspecStorageSettings)

DICT_FIELDS = [
    (ScalingSettings, "resources_per_worker", '{"CPU": 4}', {"CPU": 4.0}),
    (ScalingSettings, "label_selector", '{"market-type": "spot"}', {"market-type": "spot"}),
    (ClusterSettings, "runtime_env", '{"pip": ["einops"]}', {"pip": ["einops"]}),
    (ClusterSettings, "driver_resources", '{"CPU": 1}', {"CPU": 1}),
    (FsspecStorageSettings, "options", '{"project": "p"}', {"project": "p"}),
]
#: What a field is refused without.
BESIDE = {"driver_resources": {"address": "http://head:8265"}}


def _refusal(settings: type[BaseModel], **values: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        settings(**values)
    return str(refused.value)


@pytest.mark.parametrize(("settings", "field", "value", "says"), REFUSED)
@pytest.mark.parametrize("as_block", [False, True], ids=["settings", "block"])
def test_a_refusal_names_the_field_the_value_and_the_rule(
    settings: type[BaseModel], field: str, value: Any, says: list[str], as_block: bool
) -> None:
    message = _refusal(BLOCK_OF[settings] if as_block else settings, **{**REQUIRED.get(settings, {}), field: value})
    assert f"\n{field}" in message
    for words in says:
        assert words in message
    if isinstance(value, int | float) and settings not in SECRETIVE:
        assert f"input_value={value!r}" in message


def test_every_field_that_can_be_wrong_has_a_refusal_in_the_table() -> None:
    covered = {(settings, field) for settings, field, _, _ in REFUSED} | {(ClusterSettings, "auth_token")}
    assert covered == {(settings, field) for settings in COMPLETE for field in settings.model_fields}


@pytest.mark.parametrize("amount", [math.nan, math.inf])
def test_a_resource_that_is_no_finite_number_is_refused(amount: float) -> None:
    assert "'CPU'" in _refusal(ScalingSettings, resources_per_worker={"CPU": amount})


def test_more_minimum_than_maximum_is_refused_with_both_numbers_and_a_way_out() -> None:
    message = _refusal(ScalingSettings, min_workers=3, max_workers=2)
    assert "min_workers (3) must be at most max_workers (2); raise max_workers or lower min_workers" in message


@pytest.mark.parametrize(("field", "size"), [("num_cpus", 4), ("num_gpus", 0)])
def test_sizes_of_a_local_cluster_are_refused_beside_an_address(field: str, size: int) -> None:
    message = _refusal(ClusterSettings, **{"address": "auto", field: size})
    assert f"\n{field}" in message
    assert f"{field}={size} sizes a local cluster and address ('auto') names another one" in message
    assert getattr(ClusterSettings(**{field: size}), field) == size


@pytest.mark.parametrize("as_block", [False, True], ids=["settings", "block"])
def test_no_refusal_shows_the_token(as_block: bool) -> None:
    cluster = RayCluster if as_block else ClusterSettings
    assert "hush" not in _refusal(cluster, address="auto", num_cpus=4, auth_token="hush")
    assert "hush" not in _refusal(cluster, address="nowhere", auth_token="hush")
    assert "hush" not in _refusal(cluster, auth_token="hush", adress="auto")
    assert "hush" not in _refusal(cluster, auth_tokn="hush")
    assert "hush" not in _refusal(cluster, auth_token=["hush"])


@pytest.mark.parametrize("address", ["", " auto ", "auto", "10.0.0.5:6379", "head.example.org:1", "[fe80::1]:65535"])
def test_addresses_that_can_be_joined_are_taken(address: str) -> None:
    cluster = ClusterSettings(address=address)
    assert cluster.address == address.strip()
    assert cluster.is_local == (address == "")
    assert not cluster.is_submitted


@pytest.mark.parametrize(
    "address", ["http://head:8265", " https://ray.example.org/a/prefix/ ", "http://[fe80::1]:8265"]
)
def test_urls_of_dashboards_are_taken_without_their_last_slash(address: str) -> None:
    cluster = ClusterSettings(address=address)
    assert cluster.address == address.strip().rstrip("/")
    assert cluster.is_submitted
    assert not cluster.is_local


@pytest.mark.parametrize(("settings", "field", "text", "value"), DICT_FIELDS)
@pytest.mark.parametrize("as_block", [False, True], ids=["settings", "block"])
def test_dict_fields_take_the_form_that_the_ui_sends(
    settings: type[BaseModel], field: str, text: str, value: dict[str, Any], as_block: bool
) -> None:
    required = {**REQUIRED.get(settings, {}), **BESIDE.get(field, {})}
    settings = BLOCK_OF[settings] if as_block else settings
    for given in ({"__prefect_kind": "json", "value": text}, {"__prefect_kind": "json", "value": value}, text, value):
        assert getattr(settings(**{**required, field: given}), field) == value
    for empty in ({"__prefect_kind": "json", "value": ""}, {"__prefect_kind": "json", "value": " "}, "", {}):
        assert getattr(settings(**{**required, field: empty}), field) == {}


@pytest.mark.parametrize(("settings", "field", "text", "value"), DICT_FIELDS)
def test_bad_json_of_the_ui_is_refused_by_the_name_of_its_field(
    settings: type[BaseModel], field: str, text: str, value: dict[str, Any]
) -> None:
    message = _refusal(settings, **{field: {"__prefect_kind": "json", "value": text[:-1]}})
    assert f"\n{field}" in message
    assert text[:-1] in message
    assert "expected a JSON object" in message


def test_the_dict_fields_in_the_tests_are_all_there_are() -> None:
    dicts = {
        (settings, name)
        for settings in COMPLETE
        for name, info in settings.model_fields.items()
        if info.default_factory is dict
    }
    assert dicts == {(settings, field) for settings, field, _, _ in DICT_FIELDS}


@pytest.mark.parametrize("settings", COMPLETE)
def test_an_unknown_field_is_refused_by_its_name(settings: type[BaseModel]) -> None:
    for model in (settings, BLOCK_OF[settings]):
        message = _refusal(model, **COMPLETE[settings], colour="green")
        assert "\ncolour\n  Extra inputs are not permitted" in message
        # A misspelt secret would be shown, too.
        assert ("green" in message) == (settings not in SECRETIVE)


@pytest.mark.parametrize("settings", COMPLETE)
def test_plain_keeps_every_value_of_a_block(settings: type[BaseModel]) -> None:
    values = COMPLETE[settings]
    assert values.keys() == settings.model_fields.keys()
    assert plain(settings, BLOCK_OF[settings](**values)) == settings(**values)


def test_plain_keeps_a_label_selector() -> None:
    block = ElasticScaling(label_selector={"market-type": "spot"})
    assert plain(ScalingSettings, block).label_selector == {"market-type": "spot"}


def test_plain_keeps_secrets() -> None:
    assert plain(ClusterSettings, RayCluster(auth_token="hush")).auth_token.get_secret_value() == "hush"


def test_plain_values_of_a_block_by_default_are_the_defaults() -> None:
    for settings, block in BLOCK_OF.items():
        required = REQUIRED.get(settings, {})
        assert plain(settings, block(**required)) == settings(**required)


def test_a_storage_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir("/tmp")
    assert LocalStorageSettings(path="~/runs").path == "/home/ada/runs"
    assert LocalStorageSettings(path="runs/../x").path == "/tmp/x"
    assert LocalStorageSettings(path="file:///mnt/runs").path == "/mnt/runs"
