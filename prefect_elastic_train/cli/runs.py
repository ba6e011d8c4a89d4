"""``elastic-train runs``: list, check and clean up the runs of a storage."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import typer

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, StorageFaultError
from prefect_elastic_train.report.formats import duration, format_counts, format_metrics, size
from prefect_elastic_train.runs.inspecting import RunDetails, RunState, RunSummary, inspect_run, summarize, verify
from prefect_elastic_train.runs.layout import commit_label
from prefect_elastic_train.runs.pruning import RunChangedError, delete_planned, plan_run
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.snapshots import reported_results
from prefect_elastic_train.storage.opening import Storage

from .common import (
    Json,
    exit_on_error,
    exit_with_error,
    format_faults,
    open_for_command,
    option,
    print_fields,
    print_json,
    print_lines,
    print_table,
)

app = typer.Typer(no_args_is_help=True)

Result = TypeVar("Result")

StorageArgument = Annotated[
    str, typer.Argument(help="Directory (./runs), URL (s3://…, ambient credentials) or saved block.", metavar="STORAGE")
]
OptionalStorage = Annotated[
    str | None,
    typer.Argument(help="As in `show`. Default: the trainings on the page `elastic-trainings`.", metavar="[STORAGE]"),
]
RunArguments = Annotated[list[str] | None, typer.Argument(help="Names of runs. Default: all.", metavar="[RUN]...")]


@app.command("list")
def list_runs(storage: OptionalStorage = None, as_json: Json = False) -> None:
    """List the runs of a storage, or the trainings of the page in Prefect: state, progress and checkpoints of each."""
    with exit_on_error():
        if storage is None:
            _list_trainings(as_json)
            return
        opened = open_for_command(storage)
        summaries = _read_runs(_summary, opened)
        if as_json:
            print_json({"storage": opened.uri, "runs": summaries})
        elif summaries:
            print_table(map(_summary_row, summaries))
        else:
            print_lines(f"no runs in {opened.uri}")
        unreadable = [summary.detail for summary in summaries if summary.state is RunState.UNREADABLE]
        if unreadable:
            exit_with_error(f"{len(unreadable)} of {len(summaries)} runs cannot be read: {unreadable[0]}")


@app.command("show")
def show_run(
    storage: StorageArgument,
    run: Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")],
    as_json: Json = False,
) -> None:
    """Show all about a run: identity, attempts, faults, checkpoints, result."""
    with exit_on_error():
        opened = open_for_command(storage)
        details = _read_runs(inspect_run, opened, [run])
        if not details:
            raise ConfigurationError(f"{opened.uri}/{run} is a folder without a run of this package")
        if as_json:
            print_json(details[0])
        else:
            _print_details(details[0])


@app.command("verify")
def verify_runs(
    storage: StorageArgument,
    runs: RunArguments = None,
    as_json: Json = False,
    samples: Annotated[
        bool,
        option(
            "Also check the indices of the samples that each step used; for loops with a session.", None, "--samples"
        ),
    ] = False,
    weights: Annotated[
        bool,
        option("Also print the SHA-256 of the newest checkpoint's float arrays.", None, "--weights"),
    ] = False,
) -> None:
    """Check checkpoints and records, and print what a resume would do. Writes nothing.

    Exit code 1 if anything that a resume needs is damaged, or if samples were skipped or repeated. For runs that are
    named, also if their samples are unknown.
    """
    with exit_on_error():
        opened = open_for_command(storage)
        verifications = _read_runs(verify, opened, runs)
        checks = {}
        hashes = dict(_read_runs(_hash_weights, opened, runs)) if weights else {}
        if samples:
            from prefect_elastic_train.runs.sample_check import check_samples  # imports numpy

            checks = {check.name: check for check in _read_runs(check_samples, opened, runs)}
    if as_json:
        each = [dict(run) | {"samples": checks.get(run.name), "weights": hashes.get(run.name)} for run in verifications]
        print_json({"storage": opened.uri, "runs": each})
    elif not verifications:
        print_lines(f"no runs in {opened.uri}")
    else:
        for run in verifications:
            print_lines(f"{run.name}: {'whole' if run.whole else 'DAMAGED'}", f"  a resume {run.resume}")
            print_lines(*(f"    repair: {repair}" for repair in run.repairs))
            if run.name in checks:
                print_lines(f"  {checks[run.name].message}")
            if run.name in hashes:
                found = hashes[run.name]
                text = "sha256 {sha256}, {arrays} arrays".format(**found) if found else "no array could be read"
                print_lines(f"  weights: {text}")
    inexact = [check for check in checks.values() if (check.wrong or not check.exact) and (runs or not check.unknown)]
    if inexact or not all(run.whole for run in verifications):
        raise typer.Exit(1)


@app.command("apply")
def apply_blocks(run: Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")]) -> None:
    """Make a live training use its changed saved blocks after its next checkpoint, instead of at its next attempt.

    A new driver is started for it, which does not count as a driver restart. A session saves first, so no step is done
    again, except in a Ray job, which repeats the steps since that checkpoint.
    """
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration.saved_blocks import request_apply

    with exit_on_error(), get_client(sync_client=True) as client:
        print_lines(request_apply(client, run))


@app.command("prune")
def prune_runs(
    storage: StorageArgument,
    runs: RunArguments = None,
    older_than: Annotated[
        float | None, option("Also delete whole runs that were inactive for longer.", "DAYS", min=0)
    ] = None,
    yes: Annotated[bool, option("Do not ask for confirmation.", None, "--yes")] = False,
    dry_run: Annotated[bool, option("Only print what would be deleted.", None, "--dry-run")] = False,
) -> None:
    """Delete files that no resume needs, of runs that are not being trained; with --older-than also whole runs.

    These are interrupted uploads, and checkpoints that were dropped or are no longer kept. A run that a driver trains,
    or may train, is skipped. Deleted files cannot be restored.
    """
    with exit_on_error():
        opened = open_for_command(storage)
        seconds = None if older_than is None else older_than * 86400
        plans = _read_runs(lambda run: plan_run(run, seconds), opened, runs)
        rows = [
            {
                "run": plan.run,
                "folder": deletion.folder or "the whole run",
                "size": size(deletion.size_bytes),
                "reason": deletion.reason,
            }
            for plan in plans
            for deletion in plan.deletions
        ]
        if rows:
            print_table(rows)
        print_lines(*(f"skipped: {plan.run}: {plan.skipped}" for plan in plans if plan.skipped))
        if not rows:
            print_lines(f"nothing to delete in {opened.uri}")
        elif not dry_run:
            if not yes:
                typer.confirm("Delete this for good?", abort=True)
            for plan in plans:
                try:
                    for deletion in delete_planned(opened.run(plan.run), plan):
                        print_lines(f"deleted {plan.run} {deletion.folder}".rstrip())
                except RunChangedError as error:
                    print_lines(f"skipped: {plan.run}: {error}")


def _read_runs(
    read: Callable[[RunDirectory], Result | None], storage: Storage, names: Sequence[str] | None = None
) -> list[Result]:
    """Call ``read`` with the run directory of each named run, or of all runs, in threads, and return the results.

    The result None, of a folder that holds no run, is left out.

    Raises:
        ConfigurationError: A named run does not exist.
    """
    existing = storage.run_names()
    for name in names or []:
        if name not in existing:
            raise ConfigurationError(f"there is no run {name!r} in {storage.uri}; see `elastic-train runs list`")
    with ThreadPoolExecutor(16) as pool:
        results = pool.map(lambda name: read(RunDirectory(storage.run(name))), dict.fromkeys(names or existing))
        return [result for result in results if result is not None]


def _hash_weights(run: RunDirectory) -> tuple[str, dict[str, Any] | None] | None:
    """Return the name of a run and the SHA-256 of its newest checkpoint's float arrays; None without a checkpoint."""
    from prefect_elastic_train.rehearsal.checker import hash_arrays, read_arrays  # imports numpy

    checkpoint = run.find_resume_point().checkpoint
    if not checkpoint:
        return None
    with TemporaryDirectory() as directory:
        run.store.download(checkpoint, directory)
        arrays = read_arrays(directory)
    return run.name, {"sha256": hash_arrays(arrays), "arrays": len(arrays)} if arrays else None


def _summary(run: RunDirectory) -> RunSummary | None:
    """Return the summary of a run; None if the folder holds no run.

    A run that cannot be read gets a summary with the state UNREADABLE. A transient fault of the storage is raised.
    """
    try:
        return summarize(run)
    except (AttemptFailedError, StorageFaultError) as error:
        if isinstance(error, StorageFaultError) and not error.permanent:
            raise
        return RunSummary(name=run.name, uri=run.uri, state=RunState.UNREADABLE, detail=str(error))


def _summary_row(run: RunSummary) -> dict[str, str]:
    return {
        "run": run.name,
        "state": _format_state(run),
        "attempts": str(run.attempts),
        "reports": str(run.reports),
        "metrics": format_metrics(run.metrics, 3),
        "kept": str(run.checkpoints),
        "size": size(run.size_bytes) if run.size_bytes else "",
        "last commit": duration(time.time() - run.last_commit_at) if run.last_commit_at else "",
        "flow run": run.flow_run_name,
    }


def _list_trainings(as_json: bool) -> None:
    """Print the rows of Prefect's page of all trainings, those in trouble first."""
    from prefect.client.orchestration import get_client

    from prefect_elastic_train.orchestration.report_publisher import read_page
    from prefect_elastic_train.report.overview import sort_rows

    with get_client(sync_client=True) as client:
        rows = sort_rows(read_page(client)[1].values(), time.time())
    if as_json:
        print_json({"trainings": rows})
    else:
        print_table(row.cells for row in rows)


def _print_details(details: RunDetails) -> None:
    summary = details.summary
    accounts = details.accounts
    record = details.run
    now = time.time()
    print_fields(
        {
            "run": summary.name,
            "where": summary.uri,
            "state": f"{_format_state(summary)} ({summary.detail})" if summary.detail else _format_state(summary),
            "created": f"{duration(now - record.created_at)} ago by {record.creator.describe()}" if record else "",
            "started from": details.started_from,
            "train loop": f"{record.fingerprint.loop} ({record.fingerprint.framework})" if record else "",
            "workers": " → ".join(str(world.size) for world in accounts.world_sizes),
            "faults": f"{format_faults(accounts)}, {accounts.storage_wait_seconds:.1f} s of storage waits",
            "failures left": format_counts(accounts.left),
            "goodput": f"{details.goodput:.1%} of {duration(accounts.time.wall_seconds)}",
        }
    )
    print_table(_attempt_rows(details, now))
    print_table(_checkpoint_rows(details))


def _checkpoint_rows(details: RunDetails) -> Iterator[dict[str, str]]:
    commit = details.commit
    if commit is None:
        return
    marks = {"latest": commit.checkpoint, "best": details.best_checkpoint}
    for index, result in reported_results(commit.snapshot):
        folder = result["checkpoint_dir_name"]
        yield {
            "checkpoint": loop_name(folder),
            "report": str(index),
            "metrics": format_metrics(result["metrics"], 6),
            "size": size(sum(commit.manifest.get(folder, {}).values())),
            "": ", ".join(mark for mark, marked in marks.items() if marked == folder),
        }


def _attempt_rows(details: RunDetails, now: float) -> Iterator[dict[str, str]]:
    for attempt in details.attempts:
        record = attempt.record
        ended = attempt.ended
        if record is None:
            yield {
                "attempt": str(attempt.number),
                "end": attempt.outcome or "record torn",
                "notes": attempt.end_message,
            }
            continue
        has_until = ended or details.summary.state is RunState.TRAINING
        yield {
            "attempt": str(attempt.number),
            "begun": duration(now - record.started_at),
            "lasted": duration((ended.at if ended else now) - record.started_at) if has_until else "",
            "end": attempt.outcome or "no end",
            "from commit": commit_label(record.base) or "the beginning",
            "flow run": record.owner.flow_run_name,
            "notes": "; ".join(filter(None, [*record.repairs, attempt.end_message])),
        }


def _format_state(summary: RunSummary) -> str:
    state = summary.state.value.replace("_", " ")
    return f"{state}: {summary.outcome}" if summary.state is RunState.FAILED else state
