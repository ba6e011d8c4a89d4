"""Errors of the command line: one line on standard error, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_console = Console(stderr=True, highlight=False, soft_wrap=True)


#: What a program that was used wrongly ends with, as typer does.
_WRONG_USAGE = 2


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong and end."""
    _console.print(f"error: {' '.join(message.split())}", markup=False, style="red")
    raise typer.Exit(code)


def note(message: str) -> None:
    """Say something that is neither an error nor what was asked for."""
    _console.print(message, markup=False)


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn what the user's input is wrong with into one line and the exit code of wrong usage."""
    try:
        yield
    except ConfigurationError as error:
        fail(str(error), _WRONG_USAGE)


@contextmanager
def prefect_errors() -> Iterator[None]:
    """Turn what Prefect's API or the user's input is wrong with into one line and exit code 1."""
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        yield
    except ConfigurationError as error:
        fail(str(error))
    except PrefectHTTPStatusError as error:
        fail(f"the Prefect API refused: {error}")
    except httpx.HTTPError as error:
        fail(f"cannot reach the Prefect API ({type(error).__name__}: {error}); is PREFECT_API_URL right?")


@contextmanager
def prefect_api() -> Iterator[SyncPrefectClient]:
    """Give Prefect's API."""
    from prefect.client.orchestration import get_client

    with prefect_errors(), get_client(sync_client=True) as client:
        yield client


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what a storage refuses, and what the user's input is wrong with, into one line and exit code 1."""
    try:
        yield
    except ElasticTrainError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot use the storage: {type(error).__name__}: {error}")
