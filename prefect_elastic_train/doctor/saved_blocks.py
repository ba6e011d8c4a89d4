"""Whether the server knows our block types, and every saved block loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import ObjectNotFound

from prefect_elastic_train import blocks
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.doctor.findings import Finding, fail, ok, warn
from prefect_elastic_train.doctor.prefect_server import asking_prefect

__all__ = ["BLOCK_TYPES", "check_blocks"]

BLOCK_TYPES: tuple[type[TrainingBlock], ...] = tuple(getattr(blocks, name) for name in blocks.__all__)
_PAGE = 200
_REGISTER = "`prefect block register -m prefect_elastic_train`"


def check_blocks() -> Iterator[Finding]:
    """Look at the registered types, and load every document of them."""
    with asking_prefect() as client:
        yield _types(client)
        loaded = 0
        for kind in BLOCK_TYPES:
            for document in _documents(client, kind):
                problem = _problem(kind, document)
                loaded += not problem
                if problem:
                    yield fail(problem, "correct the value in the UI, or save the block again from code")
    yield ok(f"{loaded} saved blocks load")


def _types(client: SyncPrefectClient) -> Finding:
    states = {kind.get_block_type_slug(): _state(client, kind) for kind in BLOCK_TYPES}
    missing = [slug for slug, state in states.items() if state is None]
    old = [slug for slug, state in states.items() if state is False]
    if missing:
        return warn(f"not registered: {', '.join(missing)}", f"register the block types: {_REGISTER}")
    if old:
        return warn(f"registered by another version: {', '.join(old)}", f"bring their forms up to date: {_REGISTER}")
    return ok(f"{len(states)} block types are registered and up to date")


def _state(client: SyncPrefectClient, kind: type[TrainingBlock]) -> bool | None:
    """Tell whether a type is up to date; None if it is not registered."""
    try:
        client.read_block_type_by_slug(kind.get_block_type_slug())
    except ObjectNotFound:
        return None
    try:
        client.read_block_schema_by_checksum(kind._calculate_schema_checksum(), version=kind.get_block_schema_version())
    except ObjectNotFound:
        return False
    return True


def _documents(client: SyncPrefectClient, kind: type[TrainingBlock]) -> Iterator[BlockDocument]:
    offset = 0
    while True:
        try:
            page: list[Any] = client.read_block_documents_by_type(
                kind.get_block_type_slug(), offset=offset, limit=_PAGE, include_secrets=True
            )
        except ObjectNotFound:
            return
        yield from page
        if len(page) < _PAGE:
            return
        offset += _PAGE


def _problem(kind: type[TrainingBlock], document: BlockDocument) -> str:
    """Say why a document does not load; nothing if it does."""
    try:
        kind._load_from_block_document(document)
    except ConfigurationError as error:
        lines = [line for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
        return " ".join(lines)
    except Exception as error:  # noqa: BLE001 - a document may hold anything; what it holds may be a secret
        return f"block {kind.get_block_type_slug()}/{document.name} cannot be loaded: {type(error).__name__}"
    return ""
