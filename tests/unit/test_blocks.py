"""The blocks: Prefect's own standards, registration, and being a flow parameter."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any

import prefect.testing.standard_test_suites.blocks as standards
import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from prefect.utilities.callables import parameter_schema
from pydantic import SecretStr

import prefect_elastic_train
import prefect_elastic_train.blocks
from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
)
from prefect_elastic_train.blocks._common import LOGO_URL
from tests.unit.support import REPOSITORY

BLOCKS = [CheckpointPolicy, ElasticScaling, FailureBudget, FsspecStorage, LocalStorage, RayCluster, S3Storage]
LOGO = REPOSITORY / "docs" / "images" / "logo.png"


def _registered_from(module: Any) -> list[type[Block]]:
    """Give what `prefect block register -m` finds in a module."""
    return [found for _, found in inspect.getmembers(module) if found is not None and Block.is_block_class(found)]


@pytest.mark.parametrize("block", BLOCKS)
class TestStandards(BlockStandardTestSuite):
    """Prefect's standards for the blocks of a collection."""

    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        found: type[Block] = request.param
        return found

    @pytest.fixture(autouse=True)
    def _logo_of_the_repository(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def read(url: str) -> BytesIO:
            assert url == str(LOGO_URL)
            assert url.endswith(LOGO.relative_to(REPOSITORY).as_posix())
            return BytesIO(LOGO.read_bytes())

        monkeypatch.setattr(standards, "urlopen", read)


def test_the_images_of_the_standards_are_really_looked_at() -> None:
    assert standards.HAS_PIL


@pytest.mark.parametrize("module", [prefect_elastic_train, prefect_elastic_train.blocks])
def test_prefect_block_register_finds_exactly_seven_blocks(module: Any) -> None:
    found = _registered_from(module)
    assert len(found) == 7
    assert found == BLOCKS


def test_no_two_blocks_share_a_slug_or_a_name() -> None:
    slugs = [block.get_block_type_slug() for block in BLOCKS]
    assert slugs == [
        "checkpoint-policy",
        "elastic-scaling",
        "failure-budget",
        "training-storage-fsspec",
        "training-storage-directory",
        "ray-cluster-training",
        "training-storage-s3",
    ]
    assert len({block.get_block_type_name() for block in BLOCKS}) == 7


def test_only_what_lets_one_in_is_a_secret() -> None:
    secrets = {(block, name) for block in BLOCKS for name in block.model_json_schema()["secret_fields"]}
    assert secrets == {
        (RayCluster, "auth_token"),
        (S3Storage, "access_key_id"),
        (S3Storage, "secret_access_key"),
        (S3Storage, "session_token"),
        (FsspecStorage, "secret_options"),
    }


@pytest.mark.parametrize(
    "block",
    [
        RayCluster(auth_token="hush"),
        S3Storage(bucket_path="my-bucket/runs", access_key_id="hush", secret_access_key="hush", session_token="hush"),
        FsspecStorage(url="gs://my-bucket/runs", secret_options='{"token": "hush"}'),
    ],
    ids=lambda block: type(block).__name__,
)
def test_the_text_of_a_block_never_holds_its_secret(block: Block) -> None:
    assert "hush" not in repr(block)
    assert "hush" not in str(block)
    assert "hush" not in str(block.model_dump())
    assert "hush" not in block.model_dump_json()


@pytest.mark.parametrize(
    "block",
    [
        CheckpointPolicy(),
        ElasticScaling(),
        FailureBudget(),
        FsspecStorage(url="gs://bucket/runs", options={"project": "p"}),
        LocalStorage(path="/runs"),
        RayCluster(),
        S3Storage(bucket_path="bucket/runs"),
    ],
    ids=lambda block: type(block).__name__,
)
def test_a_block_comes_back_from_the_json_of_a_flow_run_as_it_was(block: Block) -> None:
    assert type(block).model_validate_json(block.model_dump_json()) == block


def _flow_with(block: type[Block]) -> Callable[..., None]:
    def train(settings: block) -> None:  # type: ignore[valid-type]
        """A flow that takes a block."""

    train.__annotations__["settings"] = block
    return train


@pytest.mark.parametrize("block", BLOCKS)
def test_a_flow_with_a_block_as_parameter_has_a_form(block: type[Block]) -> None:
    schema = parameter_schema(_flow_with(block)).model_dump_for_openapi()
    definition = schema["definitions"][block.__name__]
    assert definition["block_type_slug"] == block.get_block_type_slug()
    assert set(definition["properties"]) == set(block.model_fields)
    assert definition["additionalProperties"] is False


@pytest.mark.parametrize("block", BLOCKS)
def test_every_field_of_a_form_has_a_title_a_person_can_read(block: type[Block]) -> None:
    for name, field in block.model_json_schema()["properties"].items():
        assert field["title"], name
        assert "_" not in field["title"]
        assert field["title"][0].isupper()


@pytest.mark.parametrize("block", BLOCKS)
def test_the_guide_has_every_field_of_a_block_with_its_default_and_no_other(block: type[Block]) -> None:
    guide = (REPOSITORY / "docs" / "guide.md").read_text()
    section = guide.partition(f"\n### {block.__name__}\n")[2].partition("\n###")[0]
    told: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*)", section, re.MULTILINE):
        names, defaults, _ = row.split(" | ", 2)
        names, defaults = names.split(", "), defaults.split(", ")
        told |= zip((name.strip("`") for name in names), defaults * (len(names) // len(defaults)), strict=True)
    assert set(told) == set(block.model_fields)
    for name, field in block.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if field.is_required():
            assert told[name] == "required"
        elif isinstance(default, SecretStr):
            assert told[name] in ("empty", '`""`')
        else:
            shown = json.dumps(default) if default is not None else "none"
            assert told[name].strip("`").removesuffix(".0") == shown.removesuffix(".0"), name
