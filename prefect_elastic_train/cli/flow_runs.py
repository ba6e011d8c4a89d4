"""``elastic-train resume`` and ``elastic-train automations``: dead flow runs, and what resumes them by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from prefect_elastic_train.cli.common import console, errors, open_briefly
from prefect_elastic_train.core.storage_settings import DEFAULT_STORAGE

app = typer.Typer(no_args_is_help=True, add_completion=False)

Deployments = Annotated[
    list[str] | None, typer.Argument(help="Deployments, as flow/deployment.", metavar="[DEPLOYMENT]...")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Runs with this tag. May be given several times.")]


def resume_flow_run(
    run: Annotated[
        str, typer.Argument(help="Flow run, by id or name, or name of a run in the storages.", metavar="FLOW_RUN|RUN")
    ],
    storages: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            help="Storage to look for the run in, by its name. May be given several times. [default: that of the "
            "settings, else ~/elastic_train_runs]",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do not look for signs of life.")] = False,
) -> None:
    """Resume a flow run whose machine was lost, and which looks running ever since.

    Refuses while the run shows a sign of life: a process on this machine, or a recent heartbeat to Prefect. A dead
    Running run becomes Lost (a Crashed) and is scheduled again; a dead Cancelling run becomes Cancelled. One without a
    deployment has nobody to execute it: the error says how you do.
    """
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.core.operator_settings import default_block_name
    from prefect_elastic_train.orchestration import resuming

    with errors(), get_client(sync_client=True) as client:
        try:
            flow_run_id = UUID(run)
        except ValueError:
            if not storages:
                default = default_block_name("storage") or DEFAULT_STORAGE
                storages = [default] if default != DEFAULT_STORAGE or Path(default).expanduser().is_dir() else []
            flow_run_id = resuming.flow_run_of(client, run, [open_briefly(text) for text in storages])
        for line in resuming.resume(client, flow_run_id, force=force):
            console().print(line, markup=False)


@app.callback()
def automations() -> None:
    """Automations that resume dead flow runs, start evaluations, and alert."""


@app.command("create")
def create_automations(
    deployments: Deployments = None,
    tags: Tags = None,
    max_resumes: Annotated[int, typer.Option(min=1, help="How often a flow run may be resumed.")] = 10,
    heartbeat_timeout: Annotated[
        float,
        # Prefect's heartbeats come at most every 30 s.
        typer.Option(min=60, help="Seconds without a heartbeat after which a run counts as crashed."),
    ] = 600.0,  # three of Prefect's heartbeat intervals and some
    evaluate_with: Annotated[
        str, typer.Option(metavar="DEPLOYMENT", help="Start this one with checkpoints: checkpoint_uri and storage.")
    ] = "",
    evaluate_at: Annotated[
        str, typer.Option(help="best-checkpoint: at each new best one; completed: with the best one at the end.")
    ] = "best-checkpoint",
    alert: Annotated[
        str, typer.Option(metavar="BLOCK", help="Notification block that tells of each failure, as type/name.")
    ] = "",
) -> None:
    """Create or update the automations that resume crashed and lost runs. May be repeated.

    `prefect automation ls` lists them, and `prefect automation delete` deletes one.
    """
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration import resuming

    with errors(), get_client(sync_client=True) as client:
        scopes = resuming.scopes(client, deployments or [], tags or [])
        how = max_resumes, heartbeat_timeout, evaluate_with, evaluate_at, alert
        for what, name in resuming.apply(client, scopes, *how):
            console().print(f"{what:<10}{name}", markup=False)
