"""The blocks: Prefect's own standards, registration, and being a flow parameter."""

import inspect
import re
from io import BytesIO
from typing import Any

import prefect.testing.standard_test_suites.blocks as standards
import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from prefect.utilities.callables import parameter_schema

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
from tests.unit.support import REPOSITORY

#: Blocks of all types, with secrets, by the slugs of the types.
BLOCKS = {
    "checkpoint-policy": CheckpointPolicy(),
    "elastic-scaling": ElasticScaling(),
    "failure-budget": FailureBudget(),
    "training-storage-fsspec": FsspecStorage(url="gs://bucket/runs", secret_options='{"token": "hush"}'),
    "training-storage-directory": LocalStorage(path="/runs"),
    "ray-cluster-training": RayCluster(auth_token="hush"),
    "training-storage-s3": S3Storage(
        bucket_path="my-bucket/runs", access_key_id="hush", secret_access_key="hush", session_token="hush"
    ),
}
KINDS = [type(block) for block in BLOCKS.values()]
SECRETS = {"auth_token", "access_key_id", "secret_access_key", "session_token", "secret_options"}
LOGO = REPOSITORY / "docs" / "images" / "logo.png"


@pytest.mark.parametrize("block", KINDS)
class TestStandards(BlockStandardTestSuite):
    """Prefect's standards for the blocks of a collection."""

    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    @pytest.fixture(autouse=True)
    def _logo_of_the_repository(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def read(url: str) -> BytesIO:
            assert url.endswith(f"/main/{LOGO.relative_to(REPOSITORY).as_posix()}")
            return BytesIO(LOGO.read_bytes())

        assert standards.HAS_PIL, "or images are not looked at"
        monkeypatch.setattr(standards, "urlopen", read)


@pytest.mark.parametrize("module", [prefect_elastic_train, prefect_elastic_train.blocks])
def test_prefect_block_register_finds_exactly_the_seven_blocks_under_their_slugs(module: Any) -> None:
    assert [found for _, found in inspect.getmembers(module) if found and Block.is_block_class(found)] == KINDS
    assert [kind.get_block_type_slug() for kind in KINDS] == list(BLOCKS)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_text_of_a_block_never_holds_its_secret_and_without_one_it_is_the_block(block: Block) -> None:
    texts = (repr(block), str(block), str(block.model_dump()), block.model_dump_json())
    assert "hush" not in "".join(texts)
    assert type(block).model_validate_json(texts[-1]) == block or "****" in texts[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flow_with_a_block_as_parameter_has_a_form_that_a_person_can_read(kind: type[Block]) -> None:
    def train(settings: Any) -> None:
        """A flow that takes a block."""

    train.__annotations__["settings"] = kind
    definition = parameter_schema(train).model_dump_for_openapi()["definitions"][kind.__name__]
    assert definition["additionalProperties"] is False
    assert set(kind.model_json_schema()["secret_fields"]) == SECRETS & set(kind.model_fields)
    for field in definition["properties"].values():
        assert re.fullmatch(r"(?!.*\b(Tls|Ca|Url|Cpus|Gpus|Env|Dir|Auth)\b)[A-Z][^_]+", field["title"])
        assert not {"ge", "gt", "le", "lt"} & {*field, *(key for kind in field.get("anyOf", ()) for key in kind)}, (
            "no bound that a form does not know"
        )
