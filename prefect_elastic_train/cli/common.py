"""Helpers of the commands: errors, access to a storage, and output for people."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from pydantic_core import to_json, to_jsonable_python
from rich.console import Console
from rich.table import Column, Table

from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.settings import LocalStorageSettings, storage_at
from prefect_elastic_train.storage.opening import Storage

#: Width of output that does not go to a terminal: lines are not folded.
_PIPE_WIDTH = 400
#: Retry limit of the storage. It is shorter than that of a training, since a person waits.
_RETRY_SECONDS = 20.0


def option(help: str, metavar: str | None = None, *names: str, **limits: Any) -> Any:
    """Return an option of a command, with its help text, the name of its value, its own names, and limits."""
    return typer.Option(*names, help=help, metavar=metavar, **limits)


Json = Annotated[bool, option("Print JSON and nothing else.", None, "--json")]


def exit_with_error(message: str, code: int = 1) -> NoReturn:
    """Print an error in one line to standard error, and exit."""
    typer.secho(f"error: {' '.join(message.split())}", fg="red", err=True)
    raise typer.Exit(code)


@contextmanager
def exit_on_error(input_code: int = 1) -> Iterator[None]:
    """Exit with a one-line message if the ``with`` block raises an error of the storage, the Prefect API or the input.

    The exit code is ``input_code`` for a ConfigurationError, else 1.
    """
    try:
        yield
    except ElasticTrainError as error:
        exit_with_error(str(error), input_code if isinstance(error, ConfigurationError) else 1)
    except OSError as error:
        exit_with_error(f"cannot use the storage: {type(error).__name__}: {error}")
    except httpx.HTTPError as error:
        exit_with_error(f"cannot use the Prefect API ({type(error).__name__}: {error}); is PREFECT_API_URL right?")


def open_for_command(name: str) -> Storage:
    """Open the storage with this directory, URL or saved block, with a short retry limit, since a person waits.

    Raises:
        ConfigurationError: The directory or the block does not exist, or the block cannot be loaded.
    """
    settings = storage_at(name)
    if settings is None:
        from prefect_elastic_train.blocks import lookup  # imports Prefect

        settings = lookup.load_saved(lookup.STORAGE_TYPES, name).plain()
    if isinstance(settings, LocalStorageSettings) and not Path(settings.path).is_dir():
        raise ConfigurationError(f"there is no directory {settings.path}")
    return Storage(settings.model_copy(update={"retry_seconds": min(settings.retry_seconds, _RETRY_SECONDS)}))


def print_json(value: Any) -> None:
    """Print values and models as JSON to standard output, with null for NaN. A rich console would fold long lines."""
    typer.echo(to_json(to_jsonable_python(value), inf_nan_mode="null", indent=2).decode())


def print_lines(*lines: str) -> None:
    """Print each text to standard output, with control characters replaced."""
    for line in lines:
        typer.echo(printable(line))


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values to standard output, one pair a line. Empty values are left out."""
    print_lines(*(f"{name + ':':<16}{value}" for name, value in fields.items() if value))


def print_table(rows: Iterable[Mapping[str, str]]) -> None:
    """Print a table without frames to standard output. Each row has its cells by heading."""
    rows = list(rows)
    headings = dict.fromkeys(chain.from_iterable(rows))
    table = Table(*(Column(heading, overflow="fold") for heading in headings), box=None)
    for row in rows:
        table.add_row(*(printable(row.get(heading, "")) for heading in headings))
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(markup=False, emoji=False, highlight=False, width=width).print(table)


def printable(text: str) -> str:
    """Return text with control characters replaced: those in the content of a run could control the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


def format_faults(accounts: Any) -> str:
    """Return the numbers of failures, preemptions, resizes and repeated work in a run's accounts or result as text."""
    counts = f"worker failures: {accounts.worker_failures}, preemptions: {accounts.preemptions}"
    repeated = f"reports done again: {accounts.reports_lost}, steps: {accounts.steps_redone}"
    return f"{counts}, resizes: {accounts.resizes}, {repeated}"
