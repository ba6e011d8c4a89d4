"""The command ``elastic-train``. Runs in the CLI process; ``run`` is also the flow process.

Exit codes:

- 0: done.
- 1: refused, failed or declined, with a message. ``runs verify`` found damage, or ``doctor`` something that keeps
  trainings from running.
- 2: wrong usage. ``run`` and ``rehearse`` refused their input before anything started.
- 130: ``run`` was interrupted by Ctrl-C.

Listing the commands imports neither Ray nor Prefect. The commands ``runs`` import Prefect only to load a saved block.
"""

from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prefect_elastic_train.core.version import __version__

__all__ = ["app"]

#: Location and help text of each command. The list of commands is shown without importing their modules.
COMMANDS = {
    "run": ("running:run_training", "Train with a loop, without writing a flow for it. Logs go to standard error."),
    "rehearse": (
        "rehearsing:rehearse",
        "Train a loop undisturbed and then under faults, on this machine, and compare the two trainings.",
    ),
    "resume": (
        "flow_runs:resume_flow_run",
        "Resume a flow run whose machine was lost, and which still looks running.",
    ),
    "doctor": ("doctor:examine", "Check everything that a training needs, and print what to do about problems."),
    "runs": ("runs:app", "List, check and clean up the runs of a storage."),
    "automations": ("flow_runs:app", "Automations that resume dead flow runs, start evaluations and send alerts."),
}


class _LazyGroup(TyperGroup):
    """Group of commands that imports the module of a command when the command is used.

    The list of commands is shown without these imports.
    """

    _lists_commands = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._lists_commands or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        location, help_text = COMMANDS[cmd_name]
        target = resolve_name(f"{__name__}.{location}")
        if not isinstance(target, typer.Typer):
            function = target
            target = typer.Typer(add_completion=False)
            target.command(cmd_name)(function)
        command = typer.main.get_command(target)
        command.name = cmd_name
        command.help = command.help or help_text
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._lists_commands = True
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="elastic-train",
    help="Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.",
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)  # placeholder for the list; the module is imported when it runs


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
