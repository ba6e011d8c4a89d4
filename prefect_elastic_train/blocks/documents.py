"""Block documents as code: what a file says is what the server has, and what changes is shown.

The code is the truth: a value that somebody typed in the UI is overwritten, and shown. Two things are not in the code's
hands: a secret that it leaves empty stays what the server has, and a document that no block of the code stands for is
left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from prefect_elastic_train.blocks._common import BOOKKEEPING, TrainingBlock
from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.outcomes import ConfigurationError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import BlockDocument

__all__ = ["Change", "FieldChange", "apply", "difference"]

#: What Prefect takes for the name of a block document.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SIGNS = {"created": "+", "updated": "~", "unchanged": "="}
#: Stands for a value that a document does not have, and the type gives no default for.
_NOTHING = object()


@dataclass(frozen=True)
class FieldChange:
    """What changes in one field of a document. Never holds a secret.

    Attributes:
        field: Name of the field.
        how: ``2 -> 4`` with both values as JSON, the value of a document that is created, ``changed`` for a secret.
    """

    field: str
    how: str

    def __str__(self) -> str:
        return f"{self.field}: {self.how}"


@dataclass(frozen=True)
class Change:
    """What :func:`apply` does to one document.

    Attributes:
        document: Its name, ``<block type>/<name>``.
        what: ``created``, ``updated`` or ``unchanged``.
        fields: What changes; for a created document the values that are not the type's defaults.
    """

    document: str
    what: Literal["created", "updated", "unchanged"]
    fields: tuple[FieldChange, ...] = ()

    def lines(self) -> list[str]:
        """Give the change as people read it: a line for each field that changes, else one for the document."""
        head = f"{_SIGNS[self.what]} {self.document}"
        if self.what == "updated":
            return [f"{head}  {change}" for change in self.fields]
        told = ", ".join(map(str, self.fields)) if self.what == "created" else "unchanged"
        return [f"{head}  {told}".rstrip()]


@dataclass(frozen=True)
class _Plan:
    """What is to be written, and what of it is new.

    Attributes:
        block: What the code says.
        name: Name of the document.
        document: What the server has; None if it has none.
        data: What the document shall hold.
        change: The difference, for people.
    """

    block: TrainingBlock
    name: str
    document: BlockDocument | None
    data: dict[str, Any]
    change: Change


def apply(documents: Mapping[str, Sequence[TrainingBlock]], *, dry_run: bool = False) -> list[Change]:
    """Save blocks under names; doing so again changes nothing.

    Block types are registered first. Nothing is written before all documents have been read and compared. Documents
    keep their ids, so deployments that refer to them follow.

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
    with get_client(sync_client=True) as client:
        plans = [_plan(client, block, name) for name, blocks in documents.items() for block in blocks]
        if not dry_run:
            for kind in dict.fromkeys(type(plan.block) for plan in plans):
                kind.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
            for plan in plans:
                _carry_out(client, plan)
    return [plan.change for plan in plans]


def difference(block: TrainingBlock, stored: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[FieldChange, ...]]:
    """Compare a block with the data of a document; the data need not be valid.

    Values are compared as they are loaded: what the UI has stored in another form, or left out because it is the
    default, is no difference.

    Args:
        block: What the code says.
        stored: What the document holds, secrets included.

    Returns:
        What the document shall hold: the block's values, and those secrets that only the document has. And what
        changes by that.

    Raises:
        ConfigurationError: A secret that only the document has does not fit to the block's values.
    """
    wanted = _data(block)
    data, changes, kept = dict(wanted), [], []
    for field in wanted:
        if field in _secret_fields(block):
            secret = stored.get(field)
            partner = _GOES_WITH.get(field, field)
            if not wanted[field] and secret and wanted[partner] and wanted[partner] != stored.get(partner):
                changes.append(FieldChange(field, f"dropped, as the code gives another {partner}"))
            elif not wanted[field] and secret:
                data[field] = secret
                kept.append(field)
            elif (secret or "") != wanted[field]:
                changes.append(FieldChange(field, "changed"))
        else:
            before, after = _text(_as_loaded(block, field, stored)), _text(wanted[field])
            if before != after:
                # A document that does not validate may hold a password in a field that is no secret.
                shown = without_credentials(before), without_credentials(after)
                changes.append(FieldChange(field, "changed" if shown[0] == shown[1] else " -> ".join(shown)))
    # Their values are not shown: one may be a secret under a misspelt name.
    unknown = [field for field in stored if field not in wanted and field not in BOOKKEEPING]
    changes += [FieldChange(field, "dropped, the block type has no such field") for field in unknown]
    changed = {change.field for change in changes}
    changes += [FieldChange(field, "kept, and sent there") for field in kept if _SENT_TO.get(field) in changed]
    if kept:
        _check_kept(block, data, kept)
    return data, tuple(changes)


#: Secrets that are worth nothing beside another one than theirs.
_GOES_WITH = {"session_token": "secret_access_key"}
#: Where secrets are sent to.
_SENT_TO = {"auth_token": "address", "secret_access_key": "endpoint_url", "session_token": "endpoint_url"}


def _check_names(documents: Mapping[str, Sequence[TrainingBlock]]) -> None:
    for name, blocks in documents.items():
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} cannot be the name of a block: lower-case letters, digits and dashes are allowed"
            )
        slugs = [block.get_block_type_slug() for block in blocks]
        for slug in slugs:
            if slugs.count(slug) > 1:
                raise ConfigurationError(f"{name!r} has several blocks of the type {slug}: give one of each type")


def _check_kept(block: TrainingBlock, data: dict[str, Any], kept: Sequence[str]) -> None:
    try:
        type(block).model_validate(dict(data))
    except ValidationError as error:
        reasons = "; ".join(problem["msg"] for problem in error.errors(include_input=False, include_url=False))
        raise ConfigurationError(
            f"the server has {' and '.join(kept)}, which the code leaves empty, so that it is kept, but which does not "
            f"fit ({reasons}); give the secrets in the code, or mend or empty them in the UI"
        ) from None


def _plan(client: SyncPrefectClient, block: TrainingBlock, name: str) -> _Plan:
    from prefect.exceptions import ObjectNotFound

    slug = block.get_block_type_slug()
    label = f"{slug}/{name}"
    try:
        document = client.read_block_document_by_name(name, slug)
    except ObjectNotFound:
        return _Plan(block, name, None, _data(block), Change(label, "created", _set_fields(block)))
    data, changes = _difference(block, document.data, label)
    if document.block_schema is None or document.block_schema.checksum != block._calculate_schema_checksum():
        # The UI's form, and which fields the server hides, are those of the schema that the document names.
        changes += (FieldChange("schema", "brought up to date with the block type"),)
    return _Plan(block, name, document, data, Change(label, "updated" if changes else "unchanged", changes))


def _difference(
    block: TrainingBlock, stored: Mapping[str, Any], label: str
) -> tuple[dict[str, Any], tuple[FieldChange, ...]]:
    try:
        return difference(block, stored)
    except ConfigurationError as error:
        raise ConfigurationError(f"cannot update {label}: {error}") from error


def _carry_out(client: SyncPrefectClient, plan: _Plan) -> None:
    from prefect.client.schemas.actions import BlockDocumentCreate, BlockDocumentUpdate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    kind = type(plan.block)
    assert kind._block_type_id is not None, "the type has been registered"
    assert kind._block_schema_id is not None
    try:
        if plan.document is None:
            client.create_block_document(
                BlockDocumentCreate(
                    name=plan.name,
                    data=plan.data,
                    block_type_id=kind._block_type_id,
                    block_schema_id=kind._block_schema_id,
                )
            )
        elif plan.change.what == "updated":
            # Read anew: a secret that was typed in the UI since the plan was made is kept too.
            stored = client.read_block_document(plan.document.id).data
            data = _difference(plan.block, stored, plan.change.document)[0]
            # Unlike `Block.save`, which merges and would keep fields that the type does not know.
            client.update_block_document(
                plan.document.id,
                BlockDocumentUpdate(data=data, block_schema_id=kind._block_schema_id, merge_existing_data=False),
            )
    except (ObjectAlreadyExists, ObjectNotFound) as error:
        raise ConfigurationError(
            f"{plan.change.document} was created or deleted by somebody else meanwhile; apply once more"
        ) from error


def _data(block: TrainingBlock) -> dict[str, Any]:
    """Give a block's values as a document holds them."""
    fields = set(type(block).model_fields)
    return block.model_dump(mode="json", include=fields, context={"include_secrets": True})


def _set_fields(block: TrainingBlock) -> tuple[FieldChange, ...]:
    secrets = _secret_fields(block)
    shown = {name: without_credentials(_text(value)) for name, value in _data(block).items()}
    changes = []
    for name, field in type(block).model_fields.items():
        if field.is_required() or getattr(block, name) != field.get_default(call_default_factory=True):
            changes.append(FieldChange(name, "set" if name in secrets else shown[name]))
    return tuple(changes)


def _secret_fields(block: TrainingBlock) -> set[str]:
    return set(type(block).model_json_schema()["secret_fields"])


def _as_loaded(block: TrainingBlock, field: str, stored: Mapping[str, Any]) -> Any:
    """Give what a stored value is loaded as; one that is not allowed as it is."""
    data = _data(block)
    del data[field]
    if field in stored:
        data[field] = stored[field]
    try:
        return _data(type(block).model_validate(data))[field]
    except ValidationError:
        return stored.get(field, _NOTHING)


def _text(value: Any) -> str:
    if value is _NOTHING:
        return "(nothing)"
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
