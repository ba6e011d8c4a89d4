"""``elastic-train resume`` and ``elastic-train automations``: dead flow runs, and what resumes them by itself."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from prefect_elastic_train.cli.common import console, errors

app = typer.Typer(no_args_is_help=True, add_completion=False)

Deployments = Annotated[
    list[str] | None, typer.Argument(help="Deployments, as flow/deployment.", metavar="[DEPLOYMENT]...")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Runs with this tag. May be given several times.")]


def resume_flow_run(
    run: Annotated[str, typer.Argument(help="Id or name of the flow run.", metavar="FLOW_RUN")],
    force: Annotated[bool, typer.Option("--force", help="Do not look for signs of life.")] = False,
) -> None:
    """Resume a flow run whose machine was lost, and which looks running ever since.

    Refuses while the run shows a sign of life: a process on this machine, or a recent heartbeat to Prefect. A dead
    Running run becomes Lost (a Crashed) and is scheduled again; a dead Cancelling run becomes Cancelled. One without a
    deployment has nobody to execute it: the error says how you do.
    """
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration import resuming

    with errors(), get_client(sync_client=True) as client:
        try:
            flow_run_id = UUID(run)
        except ValueError:
            flow_run_id = resuming.flow_run_called(client, run)
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
