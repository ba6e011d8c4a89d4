"""``elastic-train doctor``."""

import time
from typing import Annotated

import typer

from .common import Json, option, print_json, print_lines


def examine(
    storage: Annotated[
        str,
        option("Directory, URL or saved block. Default: of profile or settings, else ~/elastic_train_runs.", "STORAGE"),
    ] = "",
    cluster: Annotated[
        str,
        option("Saved RayCluster. Default: of profile or settings, else a local cluster.", "NAME"),
    ] = "",
    profile: Annotated[str, option("Name of a set of saved blocks.", "NAME")] = "",
    as_json: Json = False,
) -> None:
    """Check everything that a training needs, and print what to do about problems.

    Versions, the Prefect server, saved blocks, the storage, the cluster: each line is ok, warn (trainings
    run) or fail (trainings do not run). If the server or the blocks fail, the rest is not checked.

    Exit code 0 if nothing fails, 1 if something does, 2 for wrong usage.
    """
    started = time.monotonic()
    from prefect_elastic_train.doctor.examination import examine as run_checks

    findings = []
    for finding in run_checks(storage, cluster, profile):
        findings.append(finding)
        if not as_json:
            print_lines(f"{finding.level:<5}{finding.check:<10}{finding.message}")
            if finding.remedy:
                print_lines(f"{'':15}to do: {finding.remedy}")
    seconds = round(time.monotonic() - started, 1)
    is_ok = all(finding.level != "fail" for finding in findings)
    if as_json:
        print_json({"ok": is_ok, "seconds": seconds, "findings": findings})
    else:
        print_lines(
            f"{'trainings can run here' if is_ok else 'trainings cannot run like this'} (checked in {seconds} s)"
        )
    if not is_ok:
        raise typer.Exit(1)
