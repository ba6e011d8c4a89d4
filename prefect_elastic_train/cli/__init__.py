"""The command ``elastic-train``.

Exit codes: 0 done; 1 refused, failed or declined, with a message, and for ``runs verify`` also damage, for ``doctor``
also something that keeps trainings from running; 2 wrong usage, for ``run`` also input that it refuses before anything
starts; 130 for ``run`` after Ctrl-C. Ray is not imported, and Prefect only where a block or a flow run is named, and by
``run`` and ``doctor``.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prefect_elastic_train.core.version import __version__

__all__ = ["app"]

#: Where each command is, and what it says first of itself: the list of them shall not load what they need.
COMMANDS = {
    "run": ("running:run_training", "Train with a loop, without writing a flow for it. Logs go to standard error."),
    "rehearse": (
        "rehearsing:rehearse",
        "Train a loop undisturbed and then under faults, on this machine, and see whether the same comes out.",
    ),
    "resume": (
        "flow_runs:resume_flow_run",
        "Resume a flow run whose machine was lost, and which looks running ever since.",
    ),
    "doctor": ("doctor:examine", "Try all that a training needs, and say what to do about what is wrong."),
    "runs": ("runs:app", "Look at the runs of a storage, check them, and clean up."),
    "automations": ("flow_runs:app", "Automations that resume dead flow runs, start evaluations, and alert."),
}


class _Commands(TyperGroup):
    """Loads a command once it is needed; until then another stands in for it, in the list and among suggestions."""

    _is_listed = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._is_listed or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        where, words = COMMANDS[cmd_name]
        found = resolve_name(f"{__name__}.{where}")
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name, command.help = cmd_name, command.help or words
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listed = True
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="elastic-train",
    help="Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _stand_in() -> None:
    """Stand for a command that is not loaded."""


for _name, (_, _words) in COMMANDS.items():
    app.command(_name, help=_words)(_stand_in)


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
