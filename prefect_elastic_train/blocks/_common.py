"""What all blocks of the collection have in common."""

from __future__ import annotations

from typing import Any

from prefect.blocks.core import Block
from prefect.client.schemas.objects import BlockDocument
from pydantic import GetJsonSchemaHandler, HttpUrl, ValidationError, model_validator
from pydantic_core import CoreSchema
from typing_extensions import Self

from prefect_elastic_train.core.outcomes import ConfigurationError

_REPOSITORY = "prefect-elastic-train/prefect-elastic-train"

#: What Prefect adds to the data of a block that it serialises.
BOOKKEEPING = ("block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous")


class TrainingBlock(Block):
    """Base of the collection's blocks: with forbidden extra fields, and yet flow parameters, inline or by reference."""

    _logo_url = HttpUrl(f"https://raw.githubusercontent.com/{_REPOSITORY}/main/docs/images/logo.png")
    _documentation_url = HttpUrl(f"https://github.com/{_REPOSITORY}/tree/main/docs/guide.md")

    @model_validator(mode="before")
    @classmethod
    def _without_bookkeeping(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if name not in BOOKKEEPING}
        return values

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Let references through where a deployment is created, and only there."""
        # Prefect's server validates a new deployment's parameters without ``required``, references unresolved;
        # a new flow run's with ``required``, references replaced by what they refer to. A reference that was
        # left in a flow run's parameters is refused by a field that nobody can have.
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema)["patternProperties"] = {
            r"^\$ref$": {"required": ["a value instead of a reference"]},
            f"^({'|'.join(BOOKKEEPING)})$": {},
        }
        return schema

    @classmethod
    def _load_from_block_document(cls, block_document: BlockDocument, validate: bool = True) -> Self:
        """Load a block; say which of its values is wrong, which Prefect keeps to itself."""
        try:
            return super()._load_from_block_document(block_document, validate=validate)
        except RuntimeError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            name = f"{cls.get_block_type_slug()}/{block_document.name}"
            raise ConfigurationError(f"block {name} holds a value that is not allowed: {error.__cause__}") from error
