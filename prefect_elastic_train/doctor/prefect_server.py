"""Whether there is a Prefect server that lets us in and that our client can work with, and its blocks load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from packaging.version import Version
from prefect.client.base import ServerType, determine_server_type
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import BlockDocument
from prefect.context import get_settings_context
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import BLOCK_TYPES
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.doctor.findings import Finding, fail, ok, skip, warn

_ANSWER_SECONDS = 3.0
#: As many as the server gives at once.
_PAGE = 200
_REGISTER = "`prefect block register -m prefect_elastic_train`"


def check_server() -> Iterator[Finding]:
    """Ask the Prefect server for its version, with the credentials that trainings would use."""
    kind = determine_server_type()
    if kind is ServerType.UNCONFIGURED:
        yield fail(
            "PREFECT_API_URL is not set, and PREFECT_SERVER_ALLOW_EPHEMERAL_MODE is off, so that flows have no server",
            "set PREFECT_API_URL, such as `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api` after "
            "`prefect server start`",
        )
    elif kind is ServerType.EPHEMERAL:
        yield ok(
            "PREFECT_API_URL is not set: Prefect starts a temporary server for each process, which takes some seconds "
            "and has no UI; `prefect server start` gives one that stays"
        )
    else:
        with _asking_prefect() as client:
            yield _answer_of_server(client, str(client.api_url).rstrip("/"))


def check_blocks() -> Iterator[Finding]:
    """Look at the registered block types, and load every document of them."""
    if determine_server_type() not in (ServerType.SERVER, ServerType.CLOUD):
        yield skip("saved blocks are looked at on a server that stays: set PREFECT_API_URL")
        return
    with _asking_prefect() as client:
        kinds = {kind.get_block_type_slug(): kind for kinds in BLOCK_TYPES.values() for kind in kinds}
        states = {slug: _state(client, kind) for slug, kind in kinds.items()}
        for wrong, remedy in (("not registered", "register the block types"), ("of another version", "update them")):
            if slugs := [slug for slug, state in states.items() if state == wrong]:
                yield warn(f"block types {wrong}: {', '.join(slugs)}", f"{remedy}: {_REGISTER}")
        if not any(states.values()):
            yield ok(f"{len(states)} block types are registered and up to date")
        loaded = 0
        for slug in (slug for slug, state in states.items() if state != "not registered"):
            for document in client.read_block_documents_by_type(slug, limit=_PAGE, include_secrets=True):
                if problem := _problem(kinds[slug], document):
                    yield fail(problem, "correct the value in the UI, or save the block again from code")
                else:
                    loaded += 1
    yield ok(f"{loaded} saved blocks load")


@contextmanager
def _asking_prefect() -> Iterator[SyncPrefectClient]:
    """A client that repeats once what fails: whoever asks a doctor waits."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}),
        get_client(httpx_settings={"timeout": _ANSWER_SECONDS}, sync_client=True) as client,
    ):
        yield client


def _answer_of_server(client: SyncPrefectClient, url: str) -> Finding:
    profile, ours = get_settings_context().profile.name, Version(client.client_version())
    is_cloud = client.server_type is ServerType.CLOUD
    try:
        server = ours if is_cloud else Version(client.api_version())
        _state(client, BLOCK_TYPES["scaling"][0])  # told only to those who are let in
    except PrefectHTTPStatusError as error:
        return _refusal(url, error.response.status_code, is_cloud)
    except httpx.HTTPError as error:
        return fail(
            f"no Prefect server answers at {url} ({type(error).__name__}: {error}); the URL is PREFECT_API_URL, "
            f"profile {profile!r}",
            "start one there with `prefect server start`, or correct it: `prefect config set PREFECT_API_URL=…`",
        )
    except (ValueError, TypeError):  # no version, perhaps no JSON at all
        return _refusal(url, 200, is_cloud)
    if server.major != ours.major:
        return fail(
            f"the server at {url} runs Prefect {server}, and here is {ours}: they do not understand each other",
            f"install Prefect {ours.major} on the server, or another prefect here",
        )
    told = f"{'Prefect Cloud' if is_cloud else 'the server'} at {url} runs Prefect {server}, here is {ours}"
    if server < ours:
        return warn(f"{told}: it is older than that", f"install Prefect {ours} or newer on the server")
    return ok(f"{told}; profile {profile!r}")


def _refusal(url: str, status: int, is_cloud: bool) -> Finding:
    if status == 429 or status >= 500:
        return fail(
            f"the server at {url} answers HTTP {status}: it is busy, or broken",
            "try again, and see the server's log; on SQLite it is soon busy, on PostgreSQL later",
        )
    if status not in (401, 403):
        return fail(
            f"what answers at {url} is no Prefect API (HTTP {status})",
            "correct PREFECT_API_URL; it ends with /api, as http://127.0.0.1:4200/api does",
        )
    api = get_current_settings().api
    variable, given = ("PREFECT_API_KEY", api.key) if is_cloud else ("PREFECT_API_AUTH_STRING", api.auth_string)
    return fail(
        f"the Prefect server at {url} refuses us (HTTP {status}): {variable} is {'wrong' if given else 'not set'}",
        "log in with `prefect cloud login`, or set PREFECT_API_KEY to a key of this workspace"
        if is_cloud
        else "set PREFECT_API_AUTH_STRING to the server's own PREFECT_SERVER_API_AUTH_STRING; for a gateway before it "
        "set PREFECT_API_KEY or PREFECT_CLIENT_CUSTOM_HEADERS",
    )


def _state(client: SyncPrefectClient, kind: type[TrainingBlock]) -> str:
    """Return what is wrong with the registration of a type, empty for nothing."""
    try:
        client.read_block_type_by_slug(kind.get_block_type_slug())
    except ObjectNotFound:
        return "not registered"
    try:
        client.read_block_schema_by_checksum(kind._calculate_schema_checksum(), version=kind.get_block_schema_version())
    except ObjectNotFound:
        return "of another version"
    return ""


def _problem(kind: type[TrainingBlock], document: BlockDocument) -> str:
    """Return why a document does not load; empty if it does."""
    try:
        kind._load_from_block_document(document)
    except ConfigurationError as error:
        return " ".join(line for line in str(error).splitlines() if "errors.pydantic.dev" not in line)
    except Exception as error:  # noqa: BLE001 - a document may hold anything; what it holds may be a secret
        return f"block {kind.get_block_type_slug()}/{document.name} cannot be loaded: {type(error).__name__}"
    return ""
