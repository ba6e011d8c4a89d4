"""``elastic-train doctor``: whether trainings can run here, and what to do if they cannot."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from prefect_elastic_train.cli.common import Json, clean, console, print_json


def examine(
    storage: Annotated[
        str,
        typer.Option(
            help="Directory, URL or saved block to try. [default: of profile or settings, else ~/elastic_train_runs]",
            metavar="STORAGE",
        ),
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            help="Saved RayCluster to try. [default: that of profile or settings, else a local one]", metavar="NAME"
        ),
    ] = "",
    profile: Annotated[str, typer.Option(help="Name of a set of saved blocks to try.", metavar="NAME")] = "",
    as_json: Json = False,
) -> None:
    """Try all that a training needs, and say what to do about what is wrong.

    Versions, the Prefect server, saved blocks, the storage, the cluster: each line is ok, warn (trainings
    run), skip (could not be looked at) or fail (trainings do not run).

    Exit code 0 if nothing fails, 1 if something does, 2 for wrong usage.
    """
    started = time.monotonic()
    from prefect_elastic_train.doctor.examination import examine as run_checks

    findings = []
    for finding in run_checks(storage, cluster, profile):
        findings.append(finding)
        if not as_json:
            remedy = f"\n{'':15}to do: {clean(finding.remedy)}" if finding.remedy else ""
            text = f"{finding.level:<5}{finding.check:<10}{clean(finding.message)}{remedy}"
            console().print(text, markup=False)
    seconds = round(time.monotonic() - started, 1)
    is_well = all(finding.level != "fail" for finding in findings)
    if as_json:
        print_json({"ok": is_well, "seconds": seconds, "findings": [*map(asdict, findings)]})
    else:
        verdict = "trainings can run here" if is_well else "trainings cannot run like this"
        console().print(f"{verdict} (checked in {seconds} s)", markup=False)
    if not is_well:
        raise typer.Exit(1)
