"""``elastic-train automations``: automations that resume dead flow runs, and start evaluations."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from prefect_elastic_train.cli.errors import prefect_api
from prefect_elastic_train.core.outcomes import ConfigurationError

app = typer.Typer(help="Automations that resume dead flow runs, and start evaluations.", no_args_is_help=True)

#: Three of Prefect's heartbeat intervals (180 s) and some.
_HEARTBEAT_TIMEOUT_SECONDS = 600.0

_console = Console(highlight=False, soft_wrap=True)

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
        str,
        typer.Option(
            metavar="DEPLOYMENT",
            help="Start this deployment with checkpoints, by the parameters checkpoint_uri and storage.",
        ),
    ] = "",
    evaluate_at: Annotated[
        str,
        typer.Option(
            help="When: best-checkpoint, at each new best one, or completed, with the best one of a training that has."
        ),
    ] = "best-checkpoint",
) -> None:
    """Create or update the automations that resume crashed and lost runs. May be repeated."""
    from prefect_elastic_train.orchestration import automations

    with prefect_api() as client:
        scopes = automations.scopes(client, deployments or [], tags or [])
        for change in automations.apply(client, scopes, max_resumes, heartbeat_timeout, evaluate_with, evaluate_at):
            _console.print(f"{change.what:<10}{change.name}", markup=False)


@app.command("delete")
def delete_automations(
    deployments: Deployments = None,
    tags: Tags = None,
    everything: Annotated[bool, typer.Option("--all", help="All that this command ever created.")] = False,
) -> None:
    """Delete automations that `create` has made."""
    from prefect_elastic_train.orchestration import automations

    labels = [*(deployments or []), *(f"tag {tag}" for tag in tags or [])]
    if everything == bool(labels):
        raise typer.BadParameter("name deployments or tags, or give --all")
    with prefect_api() as client:
        changes = automations.delete(client, None if everything else labels)
        for change in changes:
            _console.print(f"{change.what:<10}{change.name}", markup=False)
        if not changes:
            raise ConfigurationError("there are no such automations; see `prefect automation ls`")
