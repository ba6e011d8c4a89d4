"""``elastic-train doctor``: whether trainings can run here, and what to do if they cannot."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from prefect_elastic_train.cli.tables import clean, console
from prefect_elastic_train.doctor.findings import Finding, Level

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.SKIP: "dim", Level.FAIL: "bold red"}


def examine(
    storage: Annotated[
        str,
        typer.Option(
            metavar="STORAGE",
            help="Storage to try: a directory, a URL or a saved block. [default: as the profile or the settings say, "
            "else ~/elastic_train_runs]",
        ),
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Saved RayCluster to try. [default: as the profile or the settings say, else a local one]",
        ),
    ] = "",
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="Name that a set of blocks is saved under, to try those.")
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            min=15,
            max=45,
            help="Seconds that the checks of blocks, storage and cluster may take each; they run beside each other.",
        ),
    ] = 45.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Try all that a training needs, and say what to do about what is wrong. Leaves nothing behind.

    Versions, settings, the Prefect server, saved blocks, the storage, the cluster, leftovers: each line is ok, warn
    (trainings run), skip (could not be looked at) or fail (trainings do not run).

    Exit code 0 if nothing fails, 1 if something does, 2 for wrong usage.
    """
    started = time.monotonic()
    from prefect_elastic_train.doctor.examination import examine as run_checks

    findings = []
    for finding in run_checks(storage, cluster, profile, timeout):
        findings.append(finding)
        if not as_json:
            _print(finding)
    seconds = time.monotonic() - started
    counts = Counter(finding.level for finding in findings)
    is_well = not counts[Level.FAIL]
    if as_json:
        listed = [{"check": finding.check, **asdict(finding)} for finding in findings]
        typer.echo(json.dumps({"ok": is_well, "seconds": round(seconds, 1), "findings": listed}, indent=2))
    else:
        words = ", ".join(f"{counts[level]} {level.value}" for level in Level if counts[level])
        verdict = "trainings can run here" if is_well else "trainings cannot run like this"
        console().print(f"{verdict}: {words}, in {seconds:.1f} s", markup=False)
    if not is_well:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    line = Text(f"{finding.level.value:<5}", style=_STYLES[finding.level])
    line.append(f"{finding.check:<10}{clean(finding.message)}", style="default")
    console().print(line)
    if finding.remedy:
        console().print(Text(f"{'':15}to do: {clean(finding.remedy)}", style="default"))
