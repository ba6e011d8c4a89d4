"""The command ``elastic-train``. Runs in the CLI process; ``run`` is also the flow process.

Exit codes:

- 0: done.
- 1: refused, failed or declined, with a message. ``runs verify`` found damage, or ``doctor`` something that keeps
  trainings from running.
- 2: wrong usage. ``run`` and ``rehearse`` refused their input before anything started.
- 130: ``run`` was interrupted by Ctrl-C.

Listing the commands imports neither Ray nor Prefect. The commands ``runs`` import Prefect only to load a saved block.
"""

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
app.command("run")(running.run_training)
app.command("rehearse")(rehearsing.rehearse)
app.command("resume")(flow_runs.resume_flow_run)
app.command("doctor")(doctor.examine)
app.add_typer(runs.app, name="runs", help="List, check and clean up the runs of a storage.")
app.add_typer(flow_runs.app, name="automations")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept the options that stand before the command."""
