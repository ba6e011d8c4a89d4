"""Block documents as code, on a real server."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.exceptions import ObjectNotFound

from prefect_elastic_train import CheckpointPolicy, ConfigurationError, ElasticScaling, LocalStorage
from prefect_elastic_train.blocks.documents import apply

pytestmark = pytest.mark.usefixtures("api")


def _lines(documents: dict[str, Any], dry_run: bool = False) -> list[str]:
    return [line for change in apply(documents, dry_run=dry_run) for line in change.lines()]


def _edit(client: SyncPrefectClient, name: str, **data: Any) -> None:
    """Change a document as somebody does in the UI, which validates nothing."""
    document = client.read_block_document_by_name(name, "elastic-scaling")
    client.update_block_document(document.id, BlockDocumentUpdate(data=data))


def test_documents_are_created_once_and_what_is_changed_in_the_ui_is_changed_back(client: SyncPrefectClient) -> None:
    name = f"documents-{secrets.token_hex(4)}"
    documents = {name: [LocalStorage(path="/runs"), ElasticScaling(max_workers=4), CheckpointPolicy(keep=3)]}
    assert [line[0] for line in _lines(documents, dry_run=True)] == ["+", "+", "+"]
    with pytest.raises(ObjectNotFound):
        client.read_block_document_by_name(name, "elastic-scaling")
    created = _lines(documents)
    assert created[1] == f"+ elastic-scaling/{name}  max_workers: 4"
    first = client.read_block_document_by_name(name, "elastic-scaling")
    assert [line[0] for line in _lines(documents)] == ["=", "=", "="]
    assert client.read_block_document_by_name(name, "elastic-scaling").updated == first.updated

    _edit(client, name, max_workers=2)
    changed = [line for line in _lines(documents) if line[0] != "="]
    assert changed == [f"~ elastic-scaling/{name}  max_workers: 2 -> 4"]
    after = client.read_block_document_by_name(name, "elastic-scaling")
    assert (after.id, after.data["max_workers"]) == (first.id, 4), "deployments that refer to it follow"

    _edit(client, name, max_workers="lots", colour="blue")
    with pytest.raises(ConfigurationError, match="not allowed"):
        ElasticScaling.load(name)
    apply(documents)
    assert ElasticScaling.load(name).max_workers == 4
