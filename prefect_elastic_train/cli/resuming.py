"""``elastic-train resume``: a flow run that nobody executes any more, and that looks running ever since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer
from rich.console import Console

from prefect_elastic_train.cli.errors import prefect_api, storage_errors

_console = Console(highlight=False, soft_wrap=True)


def resume_flow_run(
    run: Annotated[
        str,
        typer.Argument(
            help="Id of the flow run, or name of a run of its trainings, which is looked for in the storages.",
            metavar="FLOW_RUN_ID|RUN",
        ),
    ],
    storages: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            help="Storage of its trainings (directory, URL or block), to look for the run and for a driver that lives. "
            "May be given several times. [default: that of the settings, else ~/elastic_train_runs, if it exists]",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do not look for signs of life.")] = False,
) -> None:
    """Resume a flow run whose machine was lost, and which looks running ever since.

    Refuses while the run shows a sign of life: a process on this machine, a recent heartbeat, a living driver. A dead
    Running run becomes Lost (a Crashed) and is scheduled again; a dead Cancelling run becomes Cancelled.
    """
    from prefect_elastic_train.blocks.lookup import storage_named
    from prefect_elastic_train.cli.opening import open_briefly
    from prefect_elastic_train.orchestration import dead_runs

    with storage_errors(), prefect_api() as client:
        opened = [open_briefly(storage_named(text)) for text in storages or _default_storages()]
        flow_run_id = _as_id(run) or dead_runs.flow_run_of(run, opened)
        for line in dead_runs.resume(client, flow_run_id, opened, force=force):
            _console.print(line, markup=False)


def _as_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _default_storages() -> list[str]:
    """Give the storage of trainings that name none; the folder for runs only if it is there."""
    from prefect_elastic_train.core.operator_settings import default_block_name
    from prefect_elastic_train.core.storage_settings import DEFAULT_STORAGE

    if name := default_block_name("storage"):
        return [name]
    folder = Path(DEFAULT_STORAGE).expanduser()
    return [str(folder)] if folder.is_dir() else []
