"""What the commands have in common: errors in one line, opening a storage, values as people read them, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, storage_at
from prefect_elastic_train.report.markdown import duration
from prefect_elastic_train.storage.opening import Storage, open_storage

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

#: Width of what is not printed to a terminal, where nothing needs to be folded.
_WIDE = 400
#: A storage that is away for longer is said to be: a person waits for the answer.
_RETRY_SECONDS = 20.0


def console() -> Console:
    """Return the console of standard output as it is now."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong on standard error and end."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"error: {' '.join(message.split())}", markup=False, style="red"
    )
    raise typer.Exit(code)


@contextmanager
def errors(code: int = 1) -> Iterator[None]:
    """Turn what a storage or Prefect's API refuses into one line and exit code 1, and bad input into ``code``."""
    try:
        yield
    except ElasticTrainError as error:
        fail(str(error), code if isinstance(error, ConfigurationError) else 1)
    except OSError as error:
        fail(f"cannot use the storage: {type(error).__name__}: {error}")
    except Exception as error:
        import httpx

        if not isinstance(error, httpx.HTTPError):
            raise
        fail(f"cannot use the Prefect API ({type(error).__name__}: {error}); is PREFECT_API_URL right?")


def open_briefly(text: str) -> Storage:
    """Open a storage (a directory, a URL or a saved block) for a person, who waits less than a training does."""
    settings = storage_at(text)
    if settings is None:
        from prefect.events.clients import NullEventsClient
        from prefect.events.worker import EventsWorker

        from prefect_elastic_train.blocks import lookup  # it loads Prefect

        EventsWorker.set_client_override(NullEventsClient)  # that a person looks at a block is no event to wait for
        settings = lookup.plain_storage(lookup.load_saved([*lookup.STORAGE_TYPES], text))
    if isinstance(settings, LocalStorageSettings) and not Path(settings.path).is_dir():
        raise ConfigurationError(f"there is no directory {settings.path}")
    return open_storage(settings, min(settings.retry_seconds, _RETRY_SECONDS))


def print_json(value: Any) -> None:
    """Print a value as JSON, not through the console, which would fold long lines."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and their values, one a line; those without a value are left out."""
    for name, value in pairs:
        if value:
            console().print(f"{name + ':':<16}{clean(value)}", markup=False)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str]) -> None:
    """Print a table without frames; ``right`` are the columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(value)) for value in row))
    console().print(table, soft_wrap=False)


def clean(text: str) -> str:
    """Leave out what could steer the terminal: a run holds what its loop has put there."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


def age(at: float | None, now: float) -> str:
    """Return how long ago something was; empty if it was not."""
    return "" if at is None else duration(now - at)


def faults(of: Any) -> str:
    """Return what the accounts or the result of a run count."""
    counts = f"worker failures: {of.worker_failures}, preemptions: {of.preemptions}, resizes: {of.resizes}"
    return f"{counts}, reports done again: {of.reports_lost}, steps: {of.steps_redone}"


def metrics_in_short(metrics: dict[str, Any], limit: int = 3) -> str:
    """Return the first metrics that are numbers or short words."""
    numbers = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
    shown = [f"{name}={text}" for name, text in numbers.items() if len(text) <= 20]
    return " ".join(shown[:limit]) + (" …" if len(shown) > limit else "")
