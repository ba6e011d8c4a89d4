"""The command ``elastic-train``.

Exit codes: 0 done; 1 refused, failed or declined, with a message, and for ``runs verify`` also damage; 2 wrong usage.
Neither Ray nor, where no block or flow run is named, Prefect is imported.
"""

from __future__ import annotations

import typer

from prefect_elastic_train.cli import automations, resuming, runs

__all__ = ["app"]

app = typer.Typer(
    name="elastic-train",
    help="Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(runs.app, name="runs")
app.add_typer(automations.app, name="automations")
app.command("resume")(resuming.resume_flow_run)


@app.callback()
def main() -> None:
    """Long, elastic, fault-tolerant Ray Train runs, operated from Prefect."""
