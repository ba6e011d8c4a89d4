"""Whether there is a Prefect server that lets us in and that our client can work with, and its blocks load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.base import ServerType, determine_server_type
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from prefect_elastic_train.blocks.lookup import BLOCK_TYPES
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.doctor import Finding, fail, ok, skip, warn

_ANSWER_SECONDS = 3.0
#: As many as the server gives at once.
_PAGE = 200


def check_server() -> Iterator[Finding]:
    """Ask the Prefect server for its version, with the credentials that trainings would use."""
    if determine_server_type() is ServerType.EPHEMERAL:
        yield ok("PREFECT_API_URL is not set: Prefect starts a temporary server for each process, without a UI")
    else:
        with _asking_prefect() as client:
            yield _answer(client)


def check_block_types() -> Iterator[Finding]:
    """Look at the registered block types, and load every document of them."""
    if determine_server_type() is ServerType.EPHEMERAL:
        yield skip("saved blocks are looked at on a server that stays: set PREFECT_API_URL")
        return
    old, loaded = [], 0
    with _asking_prefect() as client:
        for kind in [kind for kinds in BLOCK_TYPES.values() for kind in kinds]:
            slug, checksum = kind.get_block_type_slug(), kind._calculate_schema_checksum()
            try:
                documents = client.read_block_documents_by_type(slug, limit=_PAGE, include_secrets=True)
                client.read_block_schema_by_checksum(checksum, version=kind.get_block_schema_version())
            except ObjectNotFound:
                old.append(slug)
            for document in documents:
                try:
                    kind._load_from_block_document(document)
                    loaded += 1
                except ConfigurationError as error:
                    yield fail(str(error), "correct the value in the UI, or save the block again from code")
                except Exception as error:  # noqa: BLE001 - a document may hold anything, perhaps a secret
                    yield fail(f"block {slug}/{document.name} cannot be loaded: {type(error).__name__}")
    if old:
        yield warn(
            f"block types not registered, or of another version: {', '.join(old)}",
            "`prefect block register -m prefect_elastic_train`",
        )
    yield ok(f"{loaded} saved blocks load")


@contextmanager
def _asking_prefect() -> Iterator[SyncPrefectClient]:
    """A client that repeats once what fails: whoever asks a doctor waits."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}),
        get_client(httpx_settings={"timeout": _ANSWER_SECONDS}, sync_client=True) as client,
    ):
        yield client


def _answer(client: SyncPrefectClient) -> Finding:
    url = str(client.api_url).rstrip("/")
    try:
        client.raise_for_api_version_mismatch()
        client.read_flows(limit=1)  # the version is told to everybody
    except (httpx.HTTPError, RuntimeError, ValueError, TypeError) as error:  # ValueError: it answers with no version
        reason = error.__cause__ or error
        if isinstance(reason, PrefectHTTPStatusError) and reason.response.status_code in (401, 403):
            return fail(
                f"the Prefect server at {url} refuses us (HTTP {reason.response.status_code})",
                "set PREFECT_API_AUTH_STRING to the server's own PREFECT_SERVER_API_AUTH_STRING; on Prefect Cloud, or "
                "for a gateway, PREFECT_API_KEY or PREFECT_CLIENT_CUSTOM_HEADERS",
            )
        return fail(
            f"no Prefect server that can be used answers at {url} ({type(reason).__name__}: {reason})",
            "start one with `prefect server start`, or correct PREFECT_API_URL, which ends with /api: `prefect config "
            "set PREFECT_API_URL=http://127.0.0.1:4200/api`",
        )
    return ok(f"the server at {url} lets us in; here is Prefect {client.client_version()}")
