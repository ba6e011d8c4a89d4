"""The command ``elastic-train``.

Exit codes: 0 done, 1 refused or failed with a message, 2 wrong usage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.console import Console

from prefect_elastic_train.outcomes import ConfigurationError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

__all__ = ["app"]

app = typer.Typer(
    name="elastic-train",
    help="Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
automations_app = typer.Typer(help="Automations that resume flow runs whose process died.", no_args_is_help=True)
app.add_typer(automations_app, name="automations")

_console = Console(highlight=False, soft_wrap=True)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)

Deployments = Annotated[
    list[str] | None, typer.Argument(help="Deployments, as flow/deployment.", metavar="[DEPLOYMENT]...")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Runs with this tag. May be given several times.")]


@app.callback()
def main() -> None:
    """Long, elastic, fault-tolerant Ray Train runs, operated from Prefect."""


@automations_app.command("create")
def create_automations(
    deployments: Deployments = None,
    tags: Tags = None,
    max_resumes: Annotated[int, typer.Option(help="How often a flow run may be resumed.")] = 10,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a run counts as crashed.")
    ] = 600.0,
) -> None:
    """Create or update the automations that resume crashed and lost runs. May be repeated."""
    from prefect_elastic_train import automations

    with _api() as client:
        scopes = automations.scopes(client, deployments or [], tags or [])
        for change in automations.apply(client, scopes, max_resumes, heartbeat_timeout):
            _console.print(f"{change.what:<10}{change.name}", markup=False)


@automations_app.command("delete")
def delete_automations(
    deployments: Deployments = None,
    tags: Tags = None,
    everything: Annotated[bool, typer.Option("--all", help="All that this command ever created.")] = False,
) -> None:
    """Delete automations that `create` has made."""
    from prefect_elastic_train import automations

    labels = [*(deployments or []), *(f"tag {tag}" for tag in tags or [])]
    if everything == bool(labels):
        raise typer.BadParameter("name deployments or tags, or give --all")
    with _api() as client:
        changes = automations.delete(client, None if everything else labels)
        for change in changes:
            _console.print(f"{change.what:<10}{change.name}", markup=False)
        if not changes:
            raise ConfigurationError("there are no such automations; see `prefect automation ls`")


@app.command("resume")
def resume_flow_run(
    flow_run_id: Annotated[UUID, typer.Argument(help="The flow run.", metavar="FLOW_RUN_ID")],
    storages: Annotated[
        list[Path] | None,
        typer.Option(
            "--storage",
            help="Storage path of its trainings, to look for a driver that lives. May be given several times. "
            "[default: ~/elastic_train_runs, if it exists]",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do not look for signs of life.")] = False,
) -> None:
    """Resume a flow run whose machine was lost, and which looks running ever since.

    Refuses while the run shows a sign of life: a process on this machine, a recent heartbeat, a living driver. A dead
    Running run becomes Lost (a Crashed) and is scheduled again; a dead Cancelling run becomes Cancelled.
    """
    from prefect_elastic_train import dead_runs
    from prefect_elastic_train.training import DEFAULT_STORAGE

    default = Path(DEFAULT_STORAGE).expanduser()
    with _api() as client:
        for line in dead_runs.resume(
            client, flow_run_id, storages or ([default] if default.is_dir() else []), force=force
        ):
            _console.print(line, markup=False)


@contextmanager
def _api() -> Iterator[SyncPrefectClient]:
    """Give Prefect's API; what it or the user's input is wrong with becomes one line and exit code 1."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            yield client
    except ConfigurationError as error:
        _fail(str(error))
    except PrefectHTTPStatusError as error:
        _fail(f"the Prefect API refused: {error}")
    except httpx.HTTPError as error:
        _fail(f"cannot reach the Prefect API ({type(error).__name__}: {error}); is PREFECT_API_URL right?")


def _fail(message: str) -> None:
    _errors.print(f"error: {message}", markup=False, style="red")
    raise typer.Exit(1)
