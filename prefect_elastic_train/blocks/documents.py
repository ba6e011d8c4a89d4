"""Block documents as code. :func:`apply` saves what a file of code defines, and overwrites what was edited in the UI.

Secrets that the code leaves empty keep the value on the server.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from prefect_elastic_train.core.outcomes import ConfigurationError

from ._common import TrainingBlock
from .lookup import chosen_blocks, values_of

#: Names that Prefect allows for block documents.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def apply(documents: Mapping[str, Sequence[TrainingBlock]], *, dry_run: bool = False) -> list[str]:
    """Save Prefect blocks under names, and overwrite what was edited in the UI. A repeated call changes nothing.

    All names are checked before anything is written. Existing documents keep their ids, so deployments that refer to
    them use the new values. They keep their secrets if the new block has none. Block types are registered if needed.

    Args:
        documents: Blocks by the name that they are saved under, at most one of each type under a name.
        dry_run: Write nothing; only return what would be saved.

    Returns:
        A line for each document, in the order of ``documents``: ``created`` or ``updated``, and
        ``<block type>/<name>``.

    Raises:
        ConfigurationError: There is no Prefect API, or a name or a combination of blocks is not allowed.
        httpx.HTTPError: The API does not answer, or refuses.
    """
    for name, blocks in documents.items():
        if not _NAME.fullmatch(name) or len({type(block) for block in blocks}) < len(blocks):
            raise ConfigurationError(
                f"{name!r} must be lower-case letters, digits and dashes, and stand for at most one block of each type"
            )
    if not PREFECT_API_URL.value():
        raise ConfigurationError(
            "there is no Prefect API to save blocks with: PREFECT_API_URL is not set. Start a server with `prefect "
            "server start`, and run `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    with get_client(sync_client=True) as client:
        return [_save(client, block, name, dry_run) for name, blocks in documents.items() for block in blocks]


def load(name: str) -> dict[str, TrainingBlock]:
    """Return the blocks for ``elastic_train`` by argument: those saved under a name, and defaults for the others.

    As parameters of a deployment, blocks must be saved: save one of each type.

    Raises:
        ConfigurationError: No block is saved under the name.
    """
    return chosen_blocks({}, name)._asdict()


def data_to_store(block: TrainingBlock, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data to write to the document of a block: its values, secrets included.

    If the block has no secret, those in ``stored``, the document's present data, are kept.
    """
    data = values_of(block, context={"include_secrets": True})
    secrets = type(block).model_json_schema()["secret_fields"]
    if not any(data[field] for field in secrets):
        data |= {field: stored[field] for field in secrets if stored.get(field)}
    return data


def _save(client: SyncPrefectClient, block: TrainingBlock, name: str, dry_run: bool) -> str:
    document_name = f"{block.get_block_type_slug()}/{name}"
    try:
        document = client.read_block_document_by_name(name, block.get_block_type_slug())
    except ObjectNotFound:
        if not dry_run:
            block.save(name, overwrite=True, _sync=True)  # type: ignore[call-arg]
        return f"created {document_name}"
    if not dry_run:
        block.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
        # `Block.save` merges: it would empty secrets, and keep keys of dicts that the block no longer has.
        update = BlockDocumentUpdate(
            data=data_to_store(block, document.data), block_schema_id=block._block_schema_id, merge_existing_data=False
        )
        client.update_block_document(document.id, update)
    return f"updated {document_name}"
