"""The command ``elastic-train``. Runs in the CLI process; ``run`` is also the flow process.

Exit codes:

- 0: done.
- 1: refused, failed or declined, with a message. ``runs verify`` found damage, or ``doctor`` something that keeps
  trainings from running.
- 2: wrong usage. ``run`` and ``rehearse`` refused their input before anything started.
- 130: ``run`` was interrupted by Ctrl-C.

Listing the commands imports neither Ray nor Prefect. The commands ``runs`` import Prefect only to load a saved block.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prefect_elastic_train.core.version import __version__

__all__ = ["app"]

#: Commands, each with its text in the list.
COMMANDS = {
    "run": "Train with a loop, without writing a flow for it. Logs go to standard error.",
    "rehearse": "Train a loop undisturbed and then under faults, on this machine, and compare the two trainings.",
    "resume": "Resume a flow run whose machine was lost, and which Prefect still shows as running.",
    "doctor": "Check everything that a training needs, and print what to do about problems.",
    "runs": "List, check and clean up the runs of a storage.",
    "kubernetes": "Manifests of a Ray cluster on Kubernetes, and of the flow runs that use it.",
    "automations": "Automations that resume dead flow runs, start evaluations and send alerts.",
}


class _LazyGroup(TyperGroup):
    """Group of commands that imports their modules when a command is used. The list is shown without these imports."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the arguments of the command that is used."""
        from . import doctor, flow_runs, kubernetes, rehearsing, running, runs

        commands = typer.Typer()
        commands.command("run")(running.run_training)
        commands.command("rehearse")(rehearsing.rehearse)
        commands.command("resume")(flow_runs.resume_flow_run)
        commands.command("doctor")(doctor.examine)
        commands.add_typer(runs.app, name="runs", help=COMMANDS["runs"])
        commands.add_typer(kubernetes.app, name="kubernetes", help=COMMANDS["kubernetes"])
        commands.add_typer(flow_runs.app, name="automations", help=COMMANDS["automations"])
        self.commands = typer.main.get_group(commands).commands
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="elastic-train",
    help="Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.",
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)  # placeholder for the list


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
