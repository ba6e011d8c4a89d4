"""``elastic-train automations``: automations that resume dead flow runs, and start evaluations."""

from __future__ import annotations

from typing import Annotated

import typer

from prefect_elastic_train.cli.common import console, errors, fail

app = typer.Typer(help="Automations that resume dead flow runs, and start evaluations.", no_args_is_help=True)

#: Three of Prefect's heartbeat intervals (180 s) and some.
_HEARTBEAT_TIMEOUT_SECONDS = 600.0

Deployments = Annotated[
    list[str] | None, typer.Argument(help="Deployments, as flow/deployment.", metavar="[DEPLOYMENT]...")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Runs with this tag. May be given several times.")]


@app.command("create")
def create_automations(
    deployments: Deployments = None,
    tags: Tags = None,
    max_resumes: Annotated[int, typer.Option(min=1, help="How often a flow run may be resumed.")] = 10,
    heartbeat_timeout: Annotated[
        float,
        # Prefect's heartbeats come at most every 30 s.
        typer.Option(min=60, help="Seconds without a heartbeat after which a run counts as crashed."),
    ] = _HEARTBEAT_TIMEOUT_SECONDS,
    evaluate_with: Annotated[
        str, typer.Option(metavar="DEPLOYMENT", help="Start this one with checkpoints: checkpoint_uri and storage.")
    ] = "",
    evaluate_at: Annotated[
        str, typer.Option(help="best-checkpoint: at each new best one; completed: with the best one at the end.")
    ] = "best-checkpoint",
) -> None:
    """Create or update the automations that resume crashed and lost runs. May be repeated."""
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration import automations

    with errors(), get_client(sync_client=True) as client:
        scopes = automations.scopes(client, deployments or [], tags or [])
        for change in automations.apply(client, scopes, max_resumes, heartbeat_timeout, evaluate_with, evaluate_at):
            console().print(f"{change.what:<10}{change.name}", markup=False)


@app.command("delete")
def delete_automations(
    deployments: Deployments = None,
    tags: Tags = None,
    everything: Annotated[bool, typer.Option("--all", help="All that this command ever created.")] = False,
) -> None:
    """Delete automations that `create` has made."""
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration import automations

    labels = [*(deployments or []), *(f"tag {tag}" for tag in tags or [])]
    if everything == bool(labels):
        raise typer.BadParameter("name deployments or tags, or give --all")
    with errors(), get_client(sync_client=True) as client:
        changes = automations.delete(client, None if everything else labels)
        for change in changes:
            console().print(f"{change.what:<10}{change.name}", markup=False)
    if not changes:
        fail("there are no such automations; see `prefect automation ls`")
