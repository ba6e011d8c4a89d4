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
    RayCluster,
    S3Storage,
)
from prefect_elastic_train.blocks.documents import apply, difference
from prefect_elastic_train.blocks.steps import saved_blocks

SCALING = ElasticScaling(max_workers=4)
JOINED = "10.0.0.5:6379"
KEYS = {"access_key_id": "AKIATEMPORARY", "secret_access_key": "older", "session_token": "of the older"}
BUCKET = {"bucket_path": "bucket/runs"}

#: All variables that the profiles need, and only those.
ENVIRONMENT = {
    "ELASTIC_TRAIN_SPOT_GPU_ADDRESS": "https://ray.example.com",
    "ELASTIC_TRAIN_TPU_V6E_ADDRESS": JOINED,
    "ELASTIC_TRAIN_S3_BUCKET_PATH": "bucket/runs",
}


@pytest.mark.parametrize(
    ("block", "stored", "told"),
    [
        (
            SCALING,
            {"max_workers": 2, "resources_per_worker": {"CPU": 2}},
            ["max_workers: 2 -> 4", 'resources_per_worker: {"CPU": 2.0} -> {}'],
        ),
        (CheckpointPolicy(keep=3), {}, ["keep: null -> 3"]),
        # What the UI leaves out or stores in its own form is no difference.
        (
            ElasticScaling(max_workers=4, resources_per_worker={"CPU": 2}),
            {"max_workers": 4, "resources_per_worker": {"__prefect_kind": "json", "value": '{"CPU": 2}'}},
            [],
        ),
        # Values that are not allowed are replaced, and the value of what may be a misspelt secret is not shown.
        *((SCALING, {**dict(SCALING), "max_workers": bad}, ["max_workers: "]) for bad in (0, True, "many", None)),
        (
            SCALING,
            {**dict(SCALING), "auth_tokn": "sesame", "block_type_slug": "elastic-scaling"},
            ["auth_tokn: dropped"],
        ),
        (RayCluster(address=JOINED, auth_token="sesame"), {"address": JOINED, "auth_token": "old"}, ["auth_token: ch"]),
        # Secrets that the code leaves empty are kept, all of them or none.
        (RayCluster(address=JOINED), {"address": JOINED, "auth_token": "sesame"}, []),
        (RayCluster(address=JOINED), {"address": "auto", "auth_token": "sesame"}, ["address: ", "auth_token: kept"]),
        (S3Storage(**BUCKET), {**BUCKET, **KEYS}, []),
        (
            S3Storage(**BUCKET, access_key_id="AKIAPERMANENT", secret_access_key="newer"),
            {**BUCKET, **KEYS},
            ["access_key_id: changed", "secret_access_key: changed", "session_token: changed"],
        ),
        (
            S3Storage(**BUCKET),
            {
                **BUCKET,
                "endpoint_url": "https://me:sesame@store.example.com",
                **dict.fromkeys(("region", "ca_bundle"), ""),
            },
            ['endpoint_url: "https://***@store.example.com" -> ""'],
        ),
    ],
)
def test_each_field_that_changes_is_told_without_a_secret(block: Any, stored: dict[str, Any], told: list[str]) -> None:
    data, changes = difference(block, stored)
    assert [one.startswith(words) for one, words in zip(changes, told, strict=True)] == [True] * len(told)
    assert "sesame" not in str(changes)
    again, unchanged = difference(block, data)
    assert (again, unchanged) == (data, ())
    for secret in ("auth_token", "session_token"):
        if stored.get(secret) and not changes:
            assert data[secret] == stored[secret]


@pytest.mark.parametrize(
    ("documents", "why"),
    [
        ({"My lab": [SCALING]}, "'My lab' must be lower-case letters"),
        ({"lab": [SCALING, ElasticScaling()]}, "'lab' must .* at most one block of each type"),
        ({"lab": [SCALING]}, "PREFECT_API_URL is not set"),
    ],
)
def test_documents_that_cannot_be_saved_are_refused(documents: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        apply(documents)


def test_the_step_of_a_deployment_knows_the_types_of_blocks() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot load block 'elastic/lab'.*elastic-scaling/lab"):
        saved_blocks(scaling="elastic/lab")


def test_every_profile_makes_its_blocks_from_the_variables_that_it_needs_or_says_what_to_set() -> None:
    documents, skipped = chosen_documents([], ENVIRONMENT)
    assert list(documents) == list(PROFILES) == ["laptop", "spot-gpu", "tpu-v6e", "s3"]
    assert skipped == []
    assert {type(block) for blocks in documents.values() for block in blocks} >= {FailureBudget, S3Storage, RayCluster}
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
        ("spot-gpu", {"ELASTIC_TRAIN_SPOT_GPU_ADDRESS": "nowhere"}, "profile spot-gpu has a bad value: address: "),
        ("desktop", {}, "there is no profile 'desktop'; profiles are laptop, spot-gpu, tpu-v6e, s3"),
    ],
)
def test_a_profile_that_was_named_is_made_or_refused(profile: str, environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        chosen_documents([profile], environment)
