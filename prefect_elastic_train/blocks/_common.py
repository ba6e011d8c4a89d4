"""Base class of the blocks."""

from typing import Any

from prefect.blocks.core import Block
from prefect.client.schemas.objects import BlockDocument
from pydantic import GetJsonSchemaHandler, HttpUrl, ValidationError, model_validator
from pydantic_core import CoreSchema
from typing_extensions import Self

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import SettingsModel

_REPOSITORY = "prefect-elastic-train/prefect-elastic-train"

#: Keys that Prefect adds to the serialized data of a block.
BOOKKEEPING = ("block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous")


class TrainingBlock(Block):
    """Base of this package's blocks. They forbid extra fields, and can be flow parameters, by value or by reference."""

    _logo_url = HttpUrl(f"https://raw.githubusercontent.com/{_REPOSITORY}/main/docs/images/logo.png")
    _documentation_url = HttpUrl(f"https://github.com/{_REPOSITORY}/tree/main/docs/reference/blocks.md")

    @model_validator(mode="before")
    @classmethod
    def _without_bookkeeping(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if name not in BOOKKEEPING}
        return values

    def plain(self) -> Any:
        """Return the values of the block as the settings class that it inherits, secrets included.

        The settings can be loaded without Prefect, as in a driver.
        """
        settings_type = next(
            base for base in type(self).__mro__ if issubclass(base, SettingsModel) and not issubclass(base, Block)
        )
        return settings_type(**{name: getattr(self, name) for name in settings_type.model_fields})

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the block, for the parameters of deployments and flow runs.

        It allows a reference to a saved block in the parameters of a deployment, but none that is left in those of a
        flow run.
        """
        # Prefect's server validates the parameters of a new deployment without ``required`` and with unresolved
        # references, and those of a new flow run with ``required`` and with resolved references. A reference that
        # is left in a flow run's parameters is refused by a required field that cannot exist.
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema)["patternProperties"] = {
            r"^\$ref$": {"required": ["a value instead of a reference"]},
            f"^({'|'.join(BOOKKEEPING)})$": {},
        }
        return schema

    @classmethod
    def _load_from_block_document(cls, block_document: BlockDocument, validate: bool = True) -> Self:
        """Load a saved block from its Prefect document.

        Raises:
            ConfigurationError: A value is not allowed. The message names the field, the value and the rule; that of
                Prefect's own error does not.
        """
        try:
            return super()._load_from_block_document(block_document, validate=validate)
        except RuntimeError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            name = f"{cls.get_block_type_slug()}/{block_document.name}"
            raise ConfigurationError(f"block {name} holds a value that is not allowed: {error.__cause__}") from error
