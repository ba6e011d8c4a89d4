"""``elastic-train runs``: list, check and clean up the runs of a storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from prefect_elastic_train.cli.common import (
    Json,
    exit_on_error,
    exit_with_error,
    format_age,
    format_faults,
    open_for_command,
    print_fields,
    print_json,
    print_lines,
    print_table,
    short_metrics,
)
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, StorageFaultError
from prefect_elastic_train.report.formats import duration, format_counts, size
from prefect_elastic_train.runs.inspecting import RunDetails, RunState, RunSummary, inspect_run, summarize, verify
from prefect_elastic_train.runs.layout import commit_label
from prefect_elastic_train.runs.pruning import RunChangedError, delete_planned, plan_run
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.snapshots import latest_checkpoint, reported_results
from prefect_elastic_train.storage.opening import Storage

if TYPE_CHECKING:
    from prefect_elastic_train.runs.sample_check import SampleCheck

app = typer.Typer(no_args_is_help=True, add_completion=False)

Result = TypeVar("Result")

_THREADS = 16

StorageArgument = Annotated[
    str, typer.Argument(help="Directory (./runs), URL (s3://…, ambient credentials) or saved block.", metavar="STORAGE")
]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")]
RunArguments = Annotated[list[str] | None, typer.Argument(help="Names of runs. Default: all.", metavar="[RUN]...")]


@app.command("list")
def list_runs(storage: StorageArgument, as_json: Json = False) -> None:
    """List the runs: state, progress and checkpoints of each."""
    with exit_on_error():
        opened = open_for_command(storage)
        summaries = _read_runs(_summary, opened, opened.run_names())
        if as_json:
            print_json({"storage": opened.uri, "runs": [summary.model_dump(mode="json") for summary in summaries]})
        elif summaries:
            rows = [_columns(summary) for summary in summaries]
            print_table(
                [*rows[0]],
                [[*row.values()] for row in rows],
                ["attempts", "reports", "kept", "size", "last commit"],
            )
        else:
            print_lines(f"no runs in {opened.uri}")
        unreadable = [summary.detail for summary in summaries if summary.state is RunState.UNREADABLE]
        if unreadable:
            exit_with_error(f"{len(unreadable)} of {len(summaries)} runs cannot be read: {unreadable[0]}")


@app.command("show")
def show_run(storage: StorageArgument, run: RunArgument, as_json: Json = False) -> None:
    """Show all about a run: identity, attempts, faults, checkpoints, result."""
    with exit_on_error():
        opened = open_for_command(storage)
        _select_runs(opened, [run])
        details = inspect_run(RunDirectory(opened.run(run)))
        if details is None:
            raise ConfigurationError(f"{opened.uri}/{run} is a folder without a run of this package")
        if as_json:
            print_json(details.model_dump(mode="json"))
        else:
            _print_details(details)


@app.command("verify")
def verify_runs(
    storage: StorageArgument,
    runs: RunArguments = None,
    as_json: Json = False,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples", help="Also check the indices of the samples that each step used; for loops with a session."
        ),
    ] = False,
) -> None:
    """Check checkpoints and records, and print what a resume would do. Writes nothing.

    Exit code 1 if anything that a resume needs is damaged, or if samples were skipped or repeated. For runs that are
    named, also if their samples are unknown.
    """
    with exit_on_error():
        opened = open_for_command(storage)
        names = _select_runs(opened, runs)
        verifications = _read_runs(verify, opened, names)
        checks: dict[str, SampleCheck] = {}
        if samples:
            from prefect_elastic_train.runs.sample_check import check_samples  # imports numpy

            checks = {check.name: check for check in _read_runs(check_samples, opened, names)}
    if as_json:
        fields = {name: {"samples": check.model_dump(mode="json")} for name, check in checks.items()}
        each = [run.model_dump(mode="json") | fields.get(run.name, {}) for run in verifications]
        print_json({"storage": opened.uri, "runs": each})
    elif not verifications:
        print_lines(f"no runs in {opened.uri}")
    else:
        for run in verifications:
            print_lines(f"{run.name}: {'whole' if run.whole else 'DAMAGED'}", f"  a resume {run.resume}")
            print_lines(*(f"    repair: {repair}" for repair in run.repairs))
            if run.name in checks:
                print_lines(f"  {checks[run.name].message}")
    inexact = [check for check in checks.values() if not check.exact and (runs or not check.unknown)]
    if not all(run.whole for run in verifications) or inexact or any(check.wrong for check in checks.values()):
        raise typer.Exit(1)


@app.command("prune")
def prune_runs(
    storage: StorageArgument,
    runs: RunArguments = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Also delete whole runs that were inactive for longer.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
) -> None:
    """Delete files that no resume needs, of runs that are not being trained; with --older-than also whole runs.

    These are interrupted uploads, and checkpoints that were dropped or are no longer kept. A run that a driver trains,
    or may train, is skipped. Deleted files cannot be restored.
    """
    with exit_on_error():
        opened = open_for_command(storage)
        seconds = None if older_than is None else older_than * 86400
        plans = _read_runs(lambda run: plan_run(run, seconds), opened, _select_runs(opened, runs))
        rows = [
            [plan.run, deletion.folder or "the whole run", size(deletion.size_bytes), deletion.reason]
            for plan in plans
            for deletion in plan.deletions
        ]
        if rows:
            print_table(["run", "folder", "size", "reason"], rows, right=["size"])
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


def _columns(run: RunSummary) -> dict[str, str]:
    """Return the row of a run for ``elastic-train runs list``: a text for each column heading."""
    return {
        "run": run.name,
        "state": _format_state(run),
        "attempts": str(run.attempts),
        "reports": str(run.reports),
        "metrics": short_metrics(run.metrics),
        "kept": str(run.checkpoints),
        "size": size(run.size_bytes) if run.size_bytes else "",
        "last commit": format_age(run.last_commit_at, time.time()),
        "flow run": run.flow_run_name,
    }


def _select_runs(storage: Storage, names: Sequence[str] | None) -> list[str]:
    """Return the names of the requested runs without duplicates; without names, those of all runs in the storage.

    Raises:
        ConfigurationError: A requested run does not exist.
    """
    existing = storage.run_names()
    for name in names or []:
        if name not in existing:
            raise ConfigurationError(f"there is no run {name!r} in {storage.uri}; see `elastic-train runs list`")
    return list(dict.fromkeys(names or existing))


def _read_runs(read: Callable[[RunDirectory], Result | None], storage: Storage, names: Sequence[str]) -> list[Result]:
    """Call ``read`` with the run directory of each run, in threads, and return the results in the order of the names.

    The result None, of a folder that holds no run, is left out.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-train-runs") as pool:
        results = pool.map(lambda name: read(RunDirectory(storage.run(name))), names)
        return [result for result in results if result is not None]


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


def _print_details(details: RunDetails) -> None:
    summary = details.summary
    accounts = details.accounts
    record = details.run
    now = time.time()
    print_fields(
        [
            ("run", summary.name),
            ("where", summary.uri),
            ("state", f"{_format_state(summary)} ({summary.detail})" if summary.detail else _format_state(summary)),
            ("created", f"{format_age(record.created_at, now)} ago by {record.creator.describe()}" if record else ""),
            ("started from", details.started_from),
            ("train loop", f"{record.fingerprint.loop} ({record.fingerprint.framework})" if record else ""),
            ("workers", " → ".join(str(world.size) for world in accounts.world_sizes)),
            ("faults", f"{format_faults(accounts)}, {accounts.storage_wait_seconds:.1f} s of storage waits"),
            ("may still fail", format_counts(accounts.left)),
            ("goodput", f"{details.goodput:.1%} of {duration(accounts.time.wall_seconds)}"),
        ]
    )
    print_table(
        ["attempt", "begun", "lasted", "end", "from commit", "flow run", "notes"],
        _attempt_rows(details, now),
        right=["attempt", "begun", "lasted"],
    )
    print_table(["checkpoint", "report", "metrics", "size", ""], _checkpoint_rows(details), right=["report", "size"])


def _checkpoint_rows(details: RunDetails) -> Iterator[list[str]]:
    commit = details.commit
    if commit is None:
        return
    latest = (latest_checkpoint(commit.snapshot) or {}).get("checkpoint_dir_name")
    for index, result in reported_results(commit.snapshot):
        folder = result["checkpoint_dir_name"]
        marks = {"latest": folder == latest, "best": folder == details.best_checkpoint}
        yield [
            loop_name(folder),
            str(index),
            short_metrics(result["metrics"] or {}, 6),
            size(sum(commit.manifest.get(folder, {}).values())),
            ", ".join(mark for mark, is_set in marks.items() if is_set),
        ]


def _attempt_rows(details: RunDetails, now: float) -> Iterator[list[str]]:
    for attempt in details.attempts:
        record = attempt.record
        ended = attempt.ended
        until = now if details.summary.state is RunState.TRAINING else None
        notes = [*record.repairs] if record else []
        if ended:
            until = ended.at
            notes.append(attempt.end_message)
        yield [
            str(attempt.number),
            format_age(record.started_at if record else None, now),
            format_age(record.started_at, until) if record and until else "",
            attempt.outcome or ("no end" if record else "record torn"),
            (commit_label(record.base) if record else "") or "the beginning",
            record.owner.flow_run_name if record else "",
            "; ".join(filter(None, notes)),
        ]


def _format_state(summary: RunSummary) -> str:
    state = summary.state.value.replace("_", " ")
    return f"{state}: {summary.outcome}" if summary.state is RunState.FAILED else state
