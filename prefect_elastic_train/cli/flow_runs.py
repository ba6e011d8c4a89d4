"""``elastic-train resume`` and ``elastic-train automations``: resume dead flow runs, once or automatically."""

from typing import Annotated
from uuid import UUID

import typer

from .common import exit_on_error, option, print_lines

app = typer.Typer(no_args_is_help=True)


def resume_flow_run(
    flow_run_id: Annotated[UUID, typer.Argument(help="Id of the flow run.", metavar="FLOW_RUN")],
    force: Annotated[bool, option("Do not check whether the flow run is alive.", None, "--force")] = False,
) -> None:
    """Resume a flow run whose machine was lost, and which Prefect still shows as running.

    A flow run that may be alive is refused: one with a process on this machine, or with a recent heartbeat to Prefect.
    A dead Running run becomes Lost (a Crashed) and is scheduled again; a dead Cancelling run becomes Cancelled. A run
    without a deployment is not executed by any runner: the error says how to resume it.
    """
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration import flow_run_resume

    with exit_on_error(), get_client(sync_client=True) as client:
        for line in flow_run_resume.resume(client, flow_run_id, force=force):
            print_lines(line)


@app.command("create")
def create_automations(
    deployments: Annotated[
        list[str] | None, typer.Argument(help="Deployments, as flow/deployment.", metavar="[DEPLOYMENT]...")
    ] = None,
    tags: Annotated[list[str] | None, option("Runs with this tag. May be given several times.", None, "--tag")] = None,
    max_resumes: Annotated[int, option("How often a flow run may be resumed.", min=1)] = 10,
    heartbeat_timeout: Annotated[
        float,
        # Prefect's heartbeats come at most every 30 s.
        option("Seconds without a heartbeat after which a run counts as crashed.", min=60),
    ] = 600.0,  # longer than three of Prefect's heartbeat intervals
    evaluate_with: Annotated[
        str,
        option("Start this deployment with each checkpoint, as parameters checkpoint_uri and storage.", "DEPLOYMENT"),
    ] = "",
    evaluate_at: Annotated[
        str, option("best-checkpoint: at each new best one; completed: with the best one at the end.")
    ] = "best-checkpoint",
    alert: Annotated[str, option("Notification block for a message about each failure, as type/name.", "BLOCK")] = "",
) -> None:
    """Create or update the automations that resume crashed and lost runs. May be repeated.

    `prefect automation ls` lists them, and `prefect automation delete` deletes one.
    """
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration.automations import save_automations

    with exit_on_error(), get_client(sync_client=True) as client:
        for change, name in save_automations(
            client, deployments or [], tags or [], max_resumes, heartbeat_timeout, evaluate_with, evaluate_at, alert
        ):
            print_lines(f"{change:<10}{name}")
