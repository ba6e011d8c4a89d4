"""Block documents as code: what counts as a difference, how it is told, and the profiles of this repository."""

from __future__ import annotations

from typing import Any

import pytest

from blocks.apply import chosen_documents
from blocks.profiles import PROFILES
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
from prefect_elastic_train.blocks.documents import apply, difference
from prefect_elastic_train.blocks.steps import saved_blocks

SCALING = ElasticScaling(max_workers=4)
JOINED = "10.0.0.5:6379"

#: All variables that the profiles need, and only those.
ENVIRONMENT = {
    "ELASTIC_TRAIN_SPOT_GPU_ADDRESS": "https://ray.example.com",
    "ELASTIC_TRAIN_TPU_V6E_ADDRESS": JOINED,
    "ELASTIC_TRAIN_S3_BUCKET_PATH": "bucket/runs",
}


def _told(block: Any, stored: dict[str, Any]) -> list[str]:
    return list(difference(block, stored)[1])


def test_each_changed_field_is_told_with_both_values_and_no_other() -> None:
    stored, _ = difference(SCALING, {})
    assert difference(SCALING, stored) == (stored, ())
    stored |= {"max_workers": 2, "resources_per_worker": {"CPU": 2.0}}
    assert _told(SCALING, stored) == ["max_workers: 2 -> 4", 'resources_per_worker: {"CPU": 2.0} -> {}']
    assert _told(LocalStorage(path="/runs"), {}) == ['path: (nothing) -> "/runs"']


def test_what_the_ui_leaves_out_or_stores_in_its_own_form_is_no_difference() -> None:
    block = ElasticScaling(max_workers=4, resources_per_worker={"CPU": 2})
    wrapped = {"__prefect_kind": "json", "value": '{"CPU": 2}'}
    assert _told(block, {"max_workers": 4, "resources_per_worker": wrapped}) == []
    assert _told(CheckpointPolicy(keep=3), {}) == ["keep: null -> 3"]


@pytest.mark.parametrize("bad", [0, True, "many", None, {"a": 1}])
def test_a_value_that_is_not_allowed_is_a_difference_and_is_replaced(bad: Any) -> None:
    stored, _ = difference(SCALING, {})
    data, changes = difference(SCALING, {**stored, "max_workers": bad})
    assert data == stored
    assert [change.partition(":")[0] for change in changes] == ["max_workers"]


def test_a_field_that_the_type_does_not_know_is_dropped_without_showing_its_value() -> None:
    stored, _ = difference(SCALING, {})
    data, changes = difference(SCALING, {**stored, "auth_tokn": "sesame", "block_type_slug": "elastic-scaling"})
    assert data == stored
    assert list(changes) == ["auth_tokn: dropped, the block type has no such field"]


def test_a_secret_is_stored_and_kept_but_never_told() -> None:
    cluster = RayCluster(address=JOINED, auth_token="sesame")
    data, changes = difference(cluster, {"address": JOINED, "auth_token": "older"})
    assert data["auth_token"] == "sesame"
    assert changes == ("auth_token: changed",)
    data, changes = difference(RayCluster(address=JOINED), {"address": JOINED, "auth_token": "sesame"})
    assert (data["auth_token"], changes) == ("sesame", ())


_KEYS = {"access_key_id": "AKIATEMPORARY", "secret_access_key": "older", "session_token": "of the older"}


def test_a_session_token_goes_with_the_keys_that_it_is_of() -> None:
    new = S3Storage(bucket_path="bucket/runs", access_key_id="AKIAPERMANENT", secret_access_key="newer")
    stored = {**difference(new, {})[0], **_KEYS}
    data, changes = difference(new, stored)
    assert data["session_token"] == ""
    assert "session_token: dropped, as the code gives another secret_access_key" in changes
    same = S3Storage(bucket_path="bucket/runs", access_key_id="AKIATEMPORARY", secret_access_key="older")
    assert difference(same, stored) == (stored, ())
    none = S3Storage(bucket_path="bucket/runs")
    assert difference(none, stored)[0]["session_token"] == "of the older"


def test_a_secret_that_is_kept_while_the_place_that_gets_it_changes_is_told() -> None:
    data, changes = difference(RayCluster(address="10.0.0.6:6379"), {"address": JOINED, "auth_token": "sesame"})
    assert data["auth_token"] == "sesame"
    assert list(changes) == [
        'address: "10.0.0.5:6379" -> "10.0.0.6:6379"',
        "auth_token: kept, and sent there",
    ]
    assert difference(RayCluster(address="10.0.0.6:6379"), data)[1] == ()


@pytest.mark.parametrize(
    ("block", "stored", "why"),
    [
        (
            S3Storage(bucket_path="bucket/runs"),
            {"bucket_path": "bucket/runs", "access_key_id": "sesame"},
            "belong together",
        ),
        (
            FsspecStorage(url="gs://bucket/runs"),
            {"url": "gs://bucket/runs", "secret_options": {"a": "sesame"}},
            "valid string",
        ),
    ],
)
def test_a_kept_secret_that_does_not_fit_is_refused_without_showing_it(block: Any, stored: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the server has .*{why}.*in the UI") as refused:
        difference(block, stored)
    assert "sesame" not in str(refused.value)


def test_a_password_in_a_bad_url_is_not_told() -> None:
    stored = {"bucket_path": "bucket/runs", "endpoint_url": "https://me:se/s@me@store.example.com"}
    assert _told(S3Storage(bucket_path="bucket/runs"), stored) == [
        'endpoint_url: "https://***@store.example.com" -> ""',
    ]


def test_a_change_of_what_is_masked_is_a_change() -> None:
    stored = {"url": "abfs://old@account/runs"}
    assert _told(FsspecStorage(url="abfs://new@account/runs"), stored) == ["url: changed"]


@pytest.mark.parametrize(
    ("documents", "why"),
    [
        ({"My lab": [SCALING]}, "'My lab' cannot be the name of a block"),
        ({"lab": [SCALING, ElasticScaling()]}, "'lab' has several blocks of the type elastic-scaling"),
    ],
)
def test_documents_that_cannot_be_saved_are_refused(documents: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        apply(documents)


def test_without_a_prefect_api_nothing_is_saved() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ConfigurationError, match="PREFECT_API_URL is not"):
        apply({"lab": [SCALING]})


def test_the_step_of_a_deployment_knows_the_types_of_blocks() -> None:
    with pytest.raises(ConfigurationError, match=r"'elastic/lab' is no block.*elastic-scaling"):
        saved_blocks(scaling="elastic/lab")


def test_every_profile_makes_its_blocks_from_the_variables_that_it_needs() -> None:
    documents, skipped = chosen_documents([], ENVIRONMENT)
    assert list(documents) == list(PROFILES) == ["laptop", "spot-gpu", "tpu-v6e", "s3"]
    assert skipped == []
    spot = {type(block): block for block in documents["spot-gpu"]}
    assert spot[FailureBudget].max_preemption_failures == -1
    assert (spot[ElasticScaling].min_workers, spot[ElasticScaling].max_workers) == (1, 8)


def test_profiles_without_their_variables_are_skipped_with_what_to_set() -> None:
    documents, skipped = chosen_documents([], {"ELASTIC_TRAIN_TPU_V6E_ADDRESS": " "})
    assert list(documents) == ["laptop"]
    assert [line.partition(", for example")[0] for line in skipped] == [
        "- spot-gpu  skipped: set ELASTIC_TRAIN_SPOT_GPU_ADDRESS",
        "- tpu-v6e  skipped: set ELASTIC_TRAIN_TPU_V6E_ADDRESS",
        "- s3  skipped: set ELASTIC_TRAIN_S3_BUCKET_PATH",
    ]


@pytest.mark.parametrize(
    ("profile", "environment", "why"),
    [
        ("spot-gpu", {}, "profile spot-gpu: set ELASTIC_TRAIN_SPOT_GPU_ADDRESS"),
        ("spot-gpu", {"ELASTIC_TRAIN_SPOT_GPU_ADDRESS": "nowhere"}, "profile spot-gpu has a bad value: address: "),
        ("desktop", {}, "there is no profile 'desktop'; profiles are laptop, spot-gpu, tpu-v6e, s3"),
    ],
)
def test_a_profile_that_was_named_is_made_or_refused(profile: str, environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        chosen_documents([profile], environment)
