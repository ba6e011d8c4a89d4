"""Block documents as code: what a file says is what the server has, and what changes is shown.

The code is the truth: a value that somebody typed in the UI is overwritten, and shown. Two things are not in the code's
hands: a secret that it leaves empty stays what the server has, and a document that no block of the code stands for is
left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from prefect_elastic_train.blocks._common import BOOKKEEPING, TrainingBlock
from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.outcomes import ConfigurationError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

#: What Prefect takes for the name of a block document.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SIGNS = {"created": "+", "updated": "~", "unchanged": "="}
#: Secrets that are worth nothing beside another one than theirs.
_GOES_WITH = {"session_token": "secret_access_key"}
#: Where secrets are sent to.
_SENT_TO = {"auth_token": "address", "secret_access_key": "endpoint_url", "session_token": "endpoint_url"}


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
        head = f"{_SIGNS[self.what]} {self.document}"
        if self.what == "updated":
            return [f"{head}  {change}" for change in self.fields]
        return [f"{head}  {', '.join(self.fields) if self.what == 'created' else 'unchanged'}".rstrip()]


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
        ConfigurationError: There is no Prefect API; a name or a combination of blocks is not allowed; or a secret that
            only the server has does not fit to what the code says.
        httpx.HTTPError: The API does not answer, or refuses.

    Example:
        Keep the blocks of a profile in a file, and bring the server up to date with it::

            from prefect_elastic_train import ElasticScaling, FailureBudget
            from prefect_elastic_train.blocks.documents import apply

            changes = apply({"lab": [ElasticScaling(max_workers=4), FailureBudget(driver_restarts=10)]})
            for change in changes:
                print(*change.lines(), sep="\\n")
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    _check_names(documents)
    if not PREFECT_API_URL.value():
        raise ConfigurationError(
            "there is no Prefect API to save blocks with: PREFECT_API_URL is not set. Start a server with `prefect "
            "server start`, and run `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    plans = []
    with get_client(sync_client=True) as client:
        for name, blocks in documents.items():
            plans += [_plan(client, block, name) for block in blocks]
        for change, write in plans:
            if change.what != "unchanged" and not dry_run:
                write()
    return [change for change, _ in plans]


def difference(block: TrainingBlock, stored: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compare a block with the data of a document; the data need not be valid.

    Values are compared as they are loaded: what the UI has stored in another form, or left out because it is the
    default, is no difference.

    Args:
        block: What the code says.
        stored: What the document holds, secrets included.

    Returns:
        What the document shall hold: the block's values, and those secrets that only the document has. And what
        changes by that, see :attr:`Change.fields`.

    Raises:
        ConfigurationError: A secret that only the document has does not fit to the block's values.
    """
    data, before, secrets = _data(block), _loaded(block, stored), type(block).model_json_schema()["secret_fields"]
    changes, kept = {}, []
    for field in data:
        was, wanted = _text(before, field), _text(data, field)
        if field in secrets and stored.get(field) and not data[field]:
            partner = _GOES_WITH.get(field, field)
            if data[partner] and data[partner] != stored.get(partner):
                changes[field] = f"dropped, as the code gives another {partner}"
            else:
                kept.append(field)
        elif was != wanted:
            changes[field] = "changed" if field in secrets or _same(was, wanted) else f"{was} -> {wanted}"
    # Their values are not shown: one may be a secret under a misspelt name.
    unknown = [field for field in stored if field not in data and field not in BOOKKEEPING]
    changes |= dict.fromkeys(unknown, "dropped, the block type has no such field")
    changes |= {field: "kept, and sent there" for field in kept if _SENT_TO.get(field) in changes}
    data |= {field: stored[field] for field in kept}
    try:
        type(block).model_validate(dict(data))
    except ValidationError as error:
        reasons = "; ".join(problem["msg"] for problem in error.errors(include_input=False, include_url=False))
        raise ConfigurationError(
            f"the server has {' and '.join(kept)}, which the code leaves empty, so that it is kept, but which does not "
            f"fit ({reasons}); give the secrets in the code, or mend or empty them in the UI"
        ) from None
    # A document that does not validate may hold a password in a field that is no secret.
    return data, tuple(without_credentials(f"{field}: {how}") for field, how in changes.items())


def _check_names(documents: Mapping[str, Sequence[TrainingBlock]]) -> None:
    for name, blocks in documents.items():
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} cannot be the name of a block: lower-case letters, digits and dashes are allowed"
            )
        slugs = [block.get_block_type_slug() for block in blocks]
        if twice := [slug for slug in slugs if slugs.count(slug) > 1]:
            raise ConfigurationError(f"{name!r} has several blocks of the type {twice[0]}: give one of each type")


def _plan(client: SyncPrefectClient, block: TrainingBlock, name: str) -> tuple[Change, Callable[[], Any]]:
    """Return what is to be done to a document, and what does it."""
    from prefect.client.schemas.actions import BlockDocumentUpdate
    from prefect.exceptions import ObjectNotFound

    slug = block.get_block_type_slug()
    label = f"{slug}/{name}"
    try:
        document = client.read_block_document_by_name(name, slug)
    except ObjectNotFound:
        return Change(label, "created", _given(block)), partial(block.save, name, overwrite=True, _sync=True)  # type: ignore[call-arg]
    try:
        data, fields = difference(block, document.data)
    except ConfigurationError as error:
        raise ConfigurationError(f"cannot update {label}: {error}") from error
    if document.block_schema is None or document.block_schema.checksum != block._calculate_schema_checksum():
        # The UI's form, and which fields the server hides, are those of the schema that the document names.
        fields += ("schema: brought up to date with the block type",)

    def write() -> None:
        block.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
        # Unlike `Block.save`, which merges and would keep fields that the type does not know.
        update = BlockDocumentUpdate(data=data, block_schema_id=block._block_schema_id, merge_existing_data=False)
        client.update_block_document(document.id, update)

    return Change(label, "updated" if fields else "unchanged", fields), write


def _data(block: TrainingBlock) -> dict[str, Any]:
    """Return a block's values as a document holds them."""
    fields = set(type(block).model_fields)
    return block.model_dump(mode="json", include=fields, context={"include_secrets": True})


def _given(block: TrainingBlock) -> tuple[str, ...]:
    """Return those values of a block that are not the type's defaults."""
    data, defaults, secrets = _data(block), _loaded(block, {}), type(block).model_json_schema()["secret_fields"]
    given = [field for field in data if _text(data, field) != _text(defaults, field)]
    return tuple(without_credentials(f"{one}: {'set' if one in secrets else _text(data, one)}") for one in given)


def _loaded(block: TrainingBlock, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stored values are loaded as; as they are if they are not allowed, missing ones by default."""
    fields = type(block).model_fields
    known = {name: stored[name] for name in fields if name in stored}
    try:
        return _data(type(block).model_validate(dict(known)))
    except ValidationError:
        optional = {name: field for name, field in fields.items() if not field.is_required()}
        defaults = {name: field.get_default(call_default_factory=True) for name, field in optional.items()}
        return {**to_jsonable_python(defaults), **known}


def _text(values: Mapping[str, Any], field: str) -> str:
    if field not in values:
        return "(nothing)"
    return json.dumps(values[field], sort_keys=True, ensure_ascii=False, default=str)


def _same(one: str, other: str) -> bool:
    return without_credentials(one) == without_credentials(other)
