"""``elastic-train rehearse``: faults on a loop, before a training meets them."""

from __future__ import annotations

import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from prefect_elastic_train.cli.common import clean, console, errors
from prefect_elastic_train.cli.running import WRONG_USAGE, ConfigFiles, ConfigValues, Framework, Loop, loop_config


def rehearse(
    loop: Loop,
    config: ConfigFiles = None,
    settings: ConfigValues = None,
    framework: Framework = "torch",
    scaling: Annotated[str, typer.Option(help="Saved ElasticScaling. [default: one CPU a worker]")] = "",
    workers: Annotated[int, typer.Option(help="How many train undisturbed.", min=1)] = 2,
    faults: Annotated[str, typer.Option(help="Of worker,driver,freeze,storage,node,drain,growth. [default: all]")] = "",
    minutes: Annotated[float, typer.Option(help="For all of it, roughly.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the schedule: the same gives the same.")] = 0,
    tolerance: Annotated[float, typer.Option(help="For the state after a change of workers, relative.")] = 1e-3,
    out: Annotated[Path, typer.Option(help="Folder for the certificate.", metavar="FOLDER")] = Path("."),
    verbose: Annotated[bool, typer.Option(help="Show what drivers and workers print, on standard error.")] = False,
) -> None:
    """Train a loop undisturbed and then under faults, on this machine, and see whether the same comes out.

    It writes a certificate, as a page and as JSON: what each fault has cost, and what is wrong with the loop. Give a
    config with which the loop saves several times in a minute.

    Exit code 0 if the loop recovers as it should, 1 if it does not, 2 if it was refused before anything started.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, after which only a certificate is left
    with redirect_stdout(sys.stderr), errors(WRONG_USAGE):
        from prefect_elastic_train.orchestration.arguments import absolute, check_named_loop, named_loop
        from prefect_elastic_train.rehearsal.rehearsing import rehearse as run
        from prefect_elastic_train.rehearsal.schedule import KINDS

        name = absolute(loop)
        check_named_loop(name)
        certificate = run(
            named_loop(name),
            loop_config(config or [], settings or []),
            framework=framework,
            scaling=scaling or None,
            workers=workers,
            faults=[one.strip() for one in faults.split(",")] if faults else KINDS,
            minutes=minutes,
            seed=seed,
            tolerance=tolerance,
            save_to=out,
            tell=lambda line: typer.echo(f"  {clean(line)}", err=True),
            on_line=lambda source, line: typer.echo(f"    {source}: {clean(line)}", err=True) if verbose else None,
        )
    console().print(clean(certificate.markdown()), markup=False)
    if not certificate.passed:
        raise typer.Exit(1)
