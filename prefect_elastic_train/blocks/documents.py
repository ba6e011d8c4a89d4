"""Block documents as code: what a file says is what the server has.

A value that somebody typed in the UI is overwritten. Secrets that the code leaves empty stay what the server has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import chosen_blocks, values_of
from prefect_elastic_train.core.outcomes import ConfigurationError

#: What Prefect takes for the name of a block document.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def apply(documents: Mapping[str, Sequence[TrainingBlock]], *, dry_run: bool = False) -> list[str]:
    """Save blocks under names; doing so again changes nothing.

    Nothing is written before all names have been checked. Documents keep their ids, so deployments that refer to them
    follow. Block types are registered on the way.

    Args:
        documents: Blocks by the name that they are saved under, at most one of a type for each name.
        dry_run: Whether to write nothing, and only say what would be saved.

    Returns:
        A line for each document, in the order given: ``created`` or ``updated``, and ``<block type>/<name>``.

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
    """Load the blocks that are saved under a name, as arguments of ``elastic_train``; others are its defaults.

    A deployment takes saved ones only as its parameters: save one of each type.

    Raises:
        ConfigurationError: None is saved under it.
    """
    return chosen_blocks({}, name)


def data_to_store(block: TrainingBlock, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a document shall hold: the block's values, and the document's secrets if the block has none."""
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
        # Unlike `Block.save`, which merges: it would empty secrets, and keep fields that the type does not know.
        data = data_to_store(block, document.data)
        update = BlockDocumentUpdate(data=data, block_schema_id=block._block_schema_id, merge_existing_data=False)
        client.update_block_document(document.id, update)
    return f"updated {document_name}"
