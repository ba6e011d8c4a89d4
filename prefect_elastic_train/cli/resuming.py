"""``elastic-train resume``: a flow run that nobody executes any more, and that looks running ever since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from prefect_elastic_train.cli.common import console, errors, open_briefly


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
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.core.operator_settings import default_block_name
    from prefect_elastic_train.core.storage_settings import DEFAULT_STORAGE
    from prefect_elastic_train.orchestration import dead_runs

    with errors(), get_client(sync_client=True) as client:
        if not storages:
            folder = Path(DEFAULT_STORAGE).expanduser()
            storages = [default_block_name("storage") or str(folder)]
            storages = [name for name in storages if name != str(folder) or folder.is_dir()]
        opened = [open_briefly(text) for text in storages]
        try:
            flow_run_id = UUID(run)
        except ValueError:
            flow_run_id = dead_runs.flow_run_of(run, opened)
        for line in dead_runs.resume(client, flow_run_id, opened, force=force):
            console().print(line, markup=False)
