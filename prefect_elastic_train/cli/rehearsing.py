"""``elastic-train rehearse``: test the recovery of a loop before a real fault."""

import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from .common import exit_on_error, option, print_lines, printable
from .running import WRONG_USAGE, ConfigFiles, ConfigValues, Framework, Loop, loop_config


def rehearse(
    loop: Loop,
    config: ConfigFiles = None,
    settings: ConfigValues = None,
    framework: Framework = "torch",
    scaling: Annotated[str, option("Saved ElasticScaling. Default: one CPU a worker.")] = "",
    workers: Annotated[int, option("Number of workers of the undisturbed training.", min=1)] = 2,
    faults: Annotated[str, option("Some of worker,driver,freeze,storage,node,drain,growth. Default: all.")] = "",
    minutes: Annotated[float, option("Approximate duration.")] = 10.0,
    seed: Annotated[int, option("Seed of the fault schedule.")] = 0,
    tolerance: Annotated[float, option("Limit of the state's relative difference after a change of workers.")] = 1e-3,
    out: Annotated[Path, option("Folder for the certificate.", "FOLDER")] = Path("."),
    verbose: Annotated[bool, option("Print the output of drivers and workers to standard error.")] = False,
) -> None:
    """Train a loop undisturbed and then under faults, on this machine, and compare the two trainings.

    Writes a certificate as JSON and Markdown: the cost of each fault, and the problems of the loop. Use a config with
    which the loop saves several times a minute.

    Exit code 0 if the certificate passes, 1 if it does not, 2 if the input was refused before anything started.
    """
    # SIGTERM acts as Ctrl-C: the certificate is written, and everything else is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with redirect_stdout(sys.stderr), exit_on_error(WRONG_USAGE):
        from prefect_elastic_train.orchestration.train_loops import load_named_loop, resolve_loop_name
        from prefect_elastic_train.rehearsal.runner import rehearse as run
        from prefect_elastic_train.rehearsal.schedule import KINDS

        certificate = run(
            load_named_loop(resolve_loop_name(loop)),
            loop_config(config or [], settings or []),
            framework=framework,
            scaling=scaling or None,
            workers=workers,
            faults=[kind.strip() for kind in faults.split(",")] if faults else KINDS,
            minutes=minutes,
            seed=seed,
            tolerance=tolerance,
            save_to=out,
            tell=lambda line: typer.echo(f"  {printable(line)}", err=True),
            on_line=lambda source, line: typer.echo(f"    {source}: {printable(line)}", err=True) if verbose else None,
        )
    print_lines(certificate.markdown())
    if not certificate.passed:
        raise typer.Exit(1)
