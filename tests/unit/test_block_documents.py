"""Block documents as code: what a document shall hold, which are refused, and the profiles of this repository."""

from typing import Any

import pytest

from blocks.apply import chosen_documents
from blocks.profiles import PROFILES
from prefect_elastic_train import (
    ConfigurationError,
    ElasticScaling,
    FailureBudget,
    RayCluster,
    S3Storage,
)
from prefect_elastic_train.blocks.documents import apply, data_to_store
from prefect_elastic_train.blocks.lookup import values_of
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
    ("block", "stored", "changed"),
    [
        # Values of the document, also those that are not allowed, and fields that the type does not know, go.
        (SCALING, {"max_workers": "many", "min_workers": 3, "auth_tokn": "sesame"}, {}),
        (RayCluster(address=JOINED, auth_token="sesame"), {"address": JOINED, "auth_token": "old"}, {}),
        # Secrets that the code leaves empty are kept, all of them or none.
        (RayCluster(address=JOINED), {"address": "auto", "auth_token": "sesame"}, {"auth_token": "sesame"}),
        (RayCluster(address=JOINED), {"auth_token": None}, {}),
        (S3Storage(**BUCKET), {**BUCKET, **KEYS}, KEYS),
        (S3Storage(**BUCKET, access_key_id="AKIAPERMANENT", secret_access_key="newer"), {**BUCKET, **KEYS}, {}),
    ],
)
def test_a_document_holds_the_blocks_values_and_keeps_secrets_that_the_block_has_not(
    block: Any, stored: dict[str, Any], changed: dict[str, Any]
) -> None:
    own = values_of(block, context={"include_secrets": True})
    assert data_to_store(block, stored) == {**own, **changed}
    assert "**" not in str(own)


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
        "skipped spot-gpu: set ELASTIC_TRAIN_SPOT_GPU_ADDRESS",
        "skipped tpu-v6e: set ELASTIC_TRAIN_TPU_V6E_ADDRESS",
        "skipped s3: set ELASTIC_TRAIN_S3_BUCKET_PATH",
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
