"""Whether there is a Prefect server that lets us in and that our client can work with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from packaging.version import Version
from prefect.client.base import ServerType, determine_server_type
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import get_settings_context
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_fixed

from prefect_elastic_train.doctor.findings import Finding, fail, ok, warn

__all__ = ["asking_prefect", "check_server", "has_server"]

_ANSWER_SECONDS = 5.0


def has_server() -> bool:
    """Tell whether a server is set, so that none is started for each process."""
    return determine_server_type() in (ServerType.SERVER, ServerType.CLOUD)


@contextmanager
def asking_prefect() -> Iterator[SyncPrefectClient]:
    """Give a client that does not repeat what fails: whoever asks a doctor waits."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": _ANSWER_SECONDS}, sync_client=True) as client,
    ):
        yield client


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
        yield _answer_of_server()


def _answer_of_server() -> Finding:
    profile = get_settings_context().profile.name
    with asking_prefect() as client:
        url = str(client.api_url).rstrip("/")
        try:
            server = _version_of_server(client)
        except PrefectHTTPStatusError as error:
            if _is_busy(error):
                return fail(
                    f"the server at {url} answers HTTP {error.response.status_code}: it is busy, or broken",
                    "try again, and see the server's log; on SQLite it is soon busy, on PostgreSQL later",
                )
            return _refusal(url, error.response.status_code, client.server_type is ServerType.CLOUD)
        except httpx.HTTPError as error:
            return fail(
                f"no Prefect server answers at {url} ({type(error).__name__}: {error}); the URL is PREFECT_API_URL, "
                f"profile {profile!r}",
                "start one there with `prefect server start`, or correct it: `prefect config set PREFECT_API_URL=…`",
            )
        except (ValueError, TypeError):  # no version, perhaps no JSON at all
            return _no_api(url)
        ours = Version(client.client_version())
    if server is None:
        return ok(f"Prefect Cloud at {url} answers; Prefect {ours} here, profile {profile!r}")
    if server.major != ours.major:
        return fail(
            f"the server at {url} runs Prefect {server}, and here is {ours}: they do not understand each other",
            f"install Prefect {ours.major} on the server, or another prefect here",
        )
    if server < ours:
        return warn(
            f"the server at {url} runs Prefect {server}, older than the {ours} here",
            f"install Prefect {ours} or newer on the server",
        )
    return ok(f"the server at {url} runs Prefect {server}, here is {ours}; profile {profile!r}")


@retry(
    retry=retry_if_exception(lambda error: isinstance(error, PrefectHTTPStatusError) and _is_busy(error)),
    stop=stop_after_attempt(2),
    wait=wait_fixed(1),
    reraise=True,
)
def _version_of_server(client: SyncPrefectClient) -> Version | None:
    """Give the version of the server, if it lets us in; None for Prefect Cloud."""
    version = None if client.server_type is ServerType.CLOUD else Version(client.api_version())
    _ask_as_ourselves(client)
    return version


def _is_busy(error: PrefectHTTPStatusError) -> bool:
    return error.response.status_code == 429 or error.response.status_code >= 500


def _ask_as_ourselves(client: SyncPrefectClient) -> None:
    """Ask for something that is only told to those who are let in."""
    try:
        client.read_block_type_by_slug("elastic-scaling")
    except ObjectNotFound:
        pass


def _refusal(url: str, status: int, is_cloud: bool) -> Finding:
    api = get_current_settings().api
    if status not in (401, 403):
        return _no_api(url, f"HTTP {status}")
    if is_cloud:
        which = "the key in PREFECT_API_KEY" if api.key else "requests without a key, and PREFECT_API_KEY is not set"
        return fail(
            f"Prefect Cloud at {url} refuses {which} (HTTP {status})",
            "log in with `prefect cloud login`, or set PREFECT_API_KEY to a key of this workspace",
        )
    which = "what PREFECT_API_AUTH_STRING says" if api.auth_string else "us, and PREFECT_API_AUTH_STRING is not set"
    return fail(
        f"the Prefect server at {url} refuses {which} (HTTP {status})",
        "set PREFECT_API_AUTH_STRING to the server's own PREFECT_SERVER_API_AUTH_STRING; for a gateway before it set "
        "PREFECT_API_KEY or PREFECT_CLIENT_CUSTOM_HEADERS",
    )


def _no_api(url: str, what: str = "no version in its answer") -> Finding:
    return fail(
        f"what answers at {url} is no Prefect API ({what})",
        "correct PREFECT_API_URL; it ends with /api, as http://127.0.0.1:4200/api does",
    )
