"""``elastic-train resume``: a flow run that nobody executes any more, and that looks running ever since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer
from rich.console import Console

from prefect_elastic_train.cli.errors import prefect_api

__all__ = ["resume_flow_run"]

_console = Console(highlight=False, soft_wrap=True)


def resume_flow_run(
    flow_run_id: Annotated[UUID, typer.Argument(help="The flow run.", metavar="FLOW_RUN_ID")],
    storages: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            help="Storage of its trainings (directory, URL or block), to look for a driver that lives. May be given "
            "several times. [default: ~/elastic_train_runs, if it exists]",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do not look for signs of life.")] = False,
) -> None:
    """Resume a flow run whose machine was lost, and which looks running ever since.

    Refuses while the run shows a sign of life: a process on this machine, a recent heartbeat, a living driver. A dead
    Running run becomes Lost (a Crashed) and is scheduled again; a dead Cancelling run becomes Cancelled.
    """
    from prefect_elastic_train import dead_runs
    from prefect_elastic_train.blocks.lookup import storage_named
    from prefect_elastic_train.filesystems.opening import open_storage
    from prefect_elastic_train.training import DEFAULT_STORAGE

    default = Path(DEFAULT_STORAGE).expanduser()
    named = storages or ([str(default)] if default.is_dir() else [])
    with prefect_api() as client:
        for line in dead_runs.resume(
            client, flow_run_id, [open_storage(storage_named(text)) for text in named], force=force
        ):
            _console.print(line, markup=False)
