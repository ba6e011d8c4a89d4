"""The command ``elastic-train``.

Exit codes: 0 done; 1 refused, failed or declined, with a message, and for ``runs verify`` also damage, for ``doctor``
also something that keeps trainings from running; 2 wrong usage, for ``run`` also input that it refuses before anything
starts; 130 for ``run`` after Ctrl-C. Ray is not imported, and Prefect only where a block or a flow run is named, and by
``run`` and ``doctor``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from prefect_elastic_train.cli import doctor, flow_runs, rehearsing, running, runs
from prefect_elastic_train.core.version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="elastic-train",
    help="Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Have options that stand before the command."""


app.command("run")(running.run_training)
app.command("rehearse")(rehearsing.rehearse)
app.add_typer(runs.app, name="runs")
app.add_typer(flow_runs.app, name="automations")
app.command("resume")(flow_runs.resume_flow_run)
app.command("doctor")(doctor.examine)
