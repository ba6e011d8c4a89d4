"""Block documents as code: what a file says is what the server has, and what changes is shown.

A value that somebody typed in the UI is overwritten. Secrets that the code leaves empty stay what the server has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from pydantic import ValidationError

from prefect_elastic_train.blocks._common import BOOKKEEPING, TrainingBlock
from prefect_elastic_train.blocks.lookup import chosen_blocks, values_of
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import without_credentials

#: What Prefect takes for the name of a block document.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SIGNS = {"created": "+", "updated": "~", "unchanged": "="}


@dataclass(frozen=True)
class Change:
    """What :func:`apply` does to one document. Never holds a secret.

    Attributes:
        document: Its name, ``<block type>/<name>``.
        what: ``created``, ``updated`` or ``unchanged``.
        fields: A text for each field that changes, such as ``max_workers: 2 -> 4`` or ``auth_token: changed``; for a
            created document the values that are not the type's defaults.
    """

    document: str
    what: Literal["created", "updated", "unchanged"]
    fields: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the change as people read it: a line for each field that changes, else one for the document."""
        told = {"created": [", ".join(self.fields)], "updated": self.fields, "unchanged": ["unchanged"]}[self.what]
        return [f"{_SIGNS[self.what]} {self.document}  {text}".rstrip() for text in told]


def apply(documents: Mapping[str, Sequence[TrainingBlock]], *, dry_run: bool = False) -> list[Change]:
    """Save blocks under names; doing so again changes nothing.

    Nothing is written before all documents have been read and compared. Documents keep their ids, so deployments that
    refer to them follow. Block types are registered on the way.

    Args:
        documents: Blocks by the name that they are saved under, at most one of a type for each name.
        dry_run: Whether to write nothing, and only say what would change.

    Returns:
        What was done to each document, in the order given.

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
        plans = [_plan(client, block, name) for name, blocks in documents.items() for block in blocks]
        for change, write in plans:
            if change.what != "unchanged" and not dry_run:
                write()
    return [change for change, _ in plans]


def load(name: str) -> dict[str, TrainingBlock]:
    """Load the blocks that are saved under a name, as arguments of ``elastic_train``; others are its defaults.

    A deployment takes saved ones only as its parameters: save one of each type.

    Raises:
        ConfigurationError: None is saved under it.
    """
    return chosen_blocks({}, name)


def difference(block: TrainingBlock, stored: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compare a block with the data of a document, secrets included; the data need not be valid.

    Values are compared as they are loaded: what the UI has stored in another form, or left out because it is the
    default, is no difference.

    Returns:
        What the document shall hold: the block's values, and the document's secrets if the block has none. And what
        changes by that, see :attr:`Change.fields`.
    """
    kind, data = type(block), _data(block)
    secrets = kind.model_json_schema()["secret_fields"]
    kept = {} if any(data[field] for field in secrets) else {name: stored[name] for name in secrets if stored.get(name)}
    data |= kept
    known = {field: stored[field] for field in data if field in stored}
    before = {**data, **known}
    with suppress(ValidationError):
        before = _data(kind.model_validate(known))
    changes = [
        f"{field}: changed" if field in secrets else f"{field}: {_text(before[field])} -> {_text(value)}"
        for field, value in data.items()
        if before[field] != value
    ]
    # Their values are not shown: one may be a secret under a misspelt name.
    changes += [f"{field}: dropped" for field in stored if field not in data and field not in BOOKKEEPING]
    changes += [f"{field}: kept, and used with what changes" for field in kept if changes]
    return data, tuple(map(without_credentials, changes))


def _plan(client: SyncPrefectClient, block: TrainingBlock, name: str) -> tuple[Change, Callable[[], Any]]:
    """Return what is to be done to a document, and what does it."""
    slug = block.get_block_type_slug()
    try:
        document = client.read_block_document_by_name(name, slug)
    except ObjectNotFound:
        given = values_of(block, exclude_defaults=True)
        shown = tuple(without_credentials(f"{field}: {_text(value)}") for field, value in given.items())
        save = partial(block.save, name, overwrite=True, _sync=True)  # type: ignore[call-arg]
        return Change(f"{slug}/{name}", "created", shown), save
    data, fields = difference(block, document.data)

    def write() -> None:
        block.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
        # Unlike `Block.save`, which merges and would keep fields that the type does not know.
        update = BlockDocumentUpdate(data=data, block_schema_id=block._block_schema_id, merge_existing_data=False)
        client.update_block_document(document.id, update)

    return Change(f"{slug}/{name}", "updated" if fields else "unchanged", fields), write


def _data(block: TrainingBlock) -> dict[str, Any]:
    """Return a block's values as a document holds them."""
    return values_of(block, context={"include_secrets": True})


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
