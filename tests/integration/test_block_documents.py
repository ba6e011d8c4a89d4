"""Block documents as code, on a real server."""

import secrets
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.exceptions import ObjectNotFound

from prefect_elastic_train import ConfigurationError, ElasticScaling, LocalStorage, RayCluster
from prefect_elastic_train.blocks.documents import apply
from prefect_elastic_train.blocks.lookup import chosen_block

pytestmark = pytest.mark.usefixtures("api")


def _edit(client: SyncPrefectClient, name: str, **data: Any) -> None:
    """Change a document as somebody does in the UI, which validates nothing."""
    document = client.read_block_document_by_name(name, "elastic-scaling")
    client.update_block_document(document.id, BlockDocumentUpdate(data=data))


def test_documents_are_created_once_and_what_is_changed_in_the_ui_is_changed_back(client: SyncPrefectClient) -> None:
    name = f"documents-{secrets.token_hex(4)}"
    blocks = [LocalStorage(path="/runs"), ElasticScaling(max_workers=4), RayCluster(auth_token="sesame")]
    those = [f"training-storage-directory/{name}", f"elastic-scaling/{name}", f"ray-cluster-training/{name}"]
    for dry_run in (True, False):
        with pytest.raises(ObjectNotFound):
            client.read_block_document_by_name(name, "elastic-scaling")
        assert apply({name: blocks}, dry_run=dry_run) == [f"created {document}" for document in those]
    first = client.read_block_document_by_name(name, "elastic-scaling")

    _edit(client, name, max_workers="lots", colour="blue")
    with pytest.raises(ConfigurationError, match="not allowed"):
        chosen_block("scaling", name)
    blocks[2] = RayCluster()
    for dry_run in (True, False):
        assert "colour" in client.read_block_document_by_name(name, "elastic-scaling").data
        assert apply({name: blocks}, dry_run=dry_run) == [f"updated {document}" for document in those]
    after = client.read_block_document_by_name(name, "elastic-scaling")
    assert after.id == first.id, "deployments that refer to it follow"
    assert "colour" not in after.data
    assert ElasticScaling.load(name).max_workers == 4
    assert RayCluster.load(name).auth_token.get_secret_value() == "sesame", "a secret that the code leaves empty stays"
