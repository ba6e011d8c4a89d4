"""``elastic-train runs``: what a storage holds, whether it is whole, and what of it may go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from prefect_elastic_train.cli.common import (
    Json,
    age,
    clean,
    console,
    errors,
    fail,
    faults,
    metrics_in_short,
    open_briefly,
    print_json,
    print_pairs,
    print_table,
)
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, StorageFaultError
from prefect_elastic_train.report.accounts import counts_in_words
from prefect_elastic_train.report.markdown import duration, size
from prefect_elastic_train.runs.inspecting import RunDetails, RunState, RunSummary, describe, summarize, verify
from prefect_elastic_train.runs.layout import commit_label
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.pruning import RunChangedError, carry_out, plan_run
from prefect_elastic_train.runs.snapshots import latest_checkpoint, reported
from prefect_elastic_train.storage.opening import Storage

if TYPE_CHECKING:
    from prefect_elastic_train.runs.samples import SampleCheck

app = typer.Typer(no_args_is_help=True, add_completion=False)

Answer = TypeVar("Answer")

_THREADS = 16

StorageArgument = Annotated[
    str, typer.Argument(help="Directory (./runs), URL (s3://…, ambient credentials) or saved block.", metavar="STORAGE")
]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")]
RunArguments = Annotated[list[str] | None, typer.Argument(help="Names of runs. Default: all.", metavar="[RUN]...")]


@app.command("list")
def list_runs(storage: StorageArgument, as_json: Json = False) -> None:
    """List the runs: where each stands, how far it has come, what it holds."""
    with errors():
        opened = open_briefly(storage)
        found = _of_each(_summary, opened, opened.run_names())
        if as_json:
            print_json({"storage": opened.uri, "runs": [run.model_dump(mode="json") for run in found]})
        elif found:
            rows = [_columns(run) for run in found]
            print_table(
                [*rows[0]],
                [[*row.values()] for row in rows],
                ["attempts", "reports", "kept", "size", "last commit"],
            )
        else:
            _say(f"no runs in {opened.uri}")
        if unreadable := [run.detail for run in found if run.state is RunState.UNREADABLE]:
            fail(f"{len(unreadable)} of {len(found)} runs cannot be read: {unreadable[0]}")


@app.command("show")
def show_run(storage: StorageArgument, run: RunArgument, as_json: Json = False) -> None:
    """Show all about a run: identity, attempts, faults, checkpoints, result."""
    with errors():
        opened = open_briefly(storage)
        _chosen(opened, [run])
        details = describe(RunDirectory(opened.run(run)))
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
            "--samples", help="Also check the indices of the samples that each step saw; of loops with a session."
        ),
    ] = False,
) -> None:
    """Check checkpoints and records, and say what a resume would do. Writes nothing.

    Exit code 1 if anything that a resume needs is damaged, or samples were left out or seen twice, or if that is not
    known of a run that was named.
    """
    with errors():
        opened = open_briefly(storage)
        names = _chosen(opened, runs)
        found = _of_each(verify, opened, names)
        seen: dict[str, SampleCheck] = {}
        if samples:
            from prefect_elastic_train.runs.samples import check_samples  # which needs numpy

            seen = {check.name: check for check in _of_each(check_samples, opened, names)}
    if as_json:
        ledgers = {name: {"samples": check.model_dump(mode="json")} for name, check in seen.items()}
        each = [one.model_dump(mode="json") | ledgers.get(one.name, {}) for one in found]
        print_json({"storage": opened.uri, "runs": each})
    elif not found:
        _say(f"no runs in {opened.uri}")
    else:
        for one in found:
            _say(f"{one.name}: {'whole' if one.whole else 'DAMAGED'}", f"  a resume {one.resume}")
            _say(*(f"    it would say: {repair}" for repair in one.repairs))
            if one.name in seen:
                _say(f"  {seen[one.name].words}")
    inexact = [check for check in seen.values() if not check.exact and (runs or not check.unknown)]
    if not all(one.whole for one in found) or inexact or any(check.wrong for check in seen.values()):
        raise typer.Exit(1)


@app.command("prune")
def prune_runs(
    storage: StorageArgument,
    runs: RunArguments = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Also whole runs without any activity for so long.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
) -> None:
    """Delete what no resume needs, of runs that nobody trains; with --older-than whole runs.

    That is interrupted uploads, and checkpoints that were given up or are no longer kept. A run that lives, or of
    which nothing tells whether it does, is left alone. What is deleted cannot be brought back.
    """
    with errors():
        opened = open_briefly(storage)
        seconds = None if older_than is None else older_than * 86400
        plans = _of_each(lambda run: plan_run(run, seconds), opened, _chosen(opened, runs))
        wanted = [(plan.run, deletion) for plan in plans for deletion in plan.deletions]
        if wanted:
            rows = [[run, one.folder or "the whole run", size(one.size_bytes), one.reason] for run, one in wanted]
            print_table(["run", "what", "size", "why"], rows, right=["size"])
        _say(*(f"left alone: {plan.run}: {plan.kept}" for plan in plans if plan.kept))
        if not wanted:
            _say(f"nothing to delete in {opened.uri}")
        elif not dry_run:
            if not yes:
                typer.confirm("Delete this for good?", abort=True)
            for plan in plans:
                try:
                    for deletion in carry_out(opened.run(plan.run), plan):
                        _say(f"deleted {plan.run} {deletion.folder}".rstrip())
                except RunChangedError as error:
                    _say(f"left alone: {plan.run}: {error}")


def _columns(run: RunSummary) -> dict[str, str]:
    return {
        "run": run.name,
        "state": _state(run),
        "attempts": str(run.attempts),
        "reports": str(run.reports),
        "metrics": metrics_in_short(run.metrics),
        "kept": str(run.checkpoints),
        "size": size(run.size_bytes) if run.size_bytes else "",
        "last commit": age(run.last_commit_at, time.time()),
        "flow run": run.flow_run_name,
    }


def _chosen(storage: Storage, runs: Sequence[str] | None) -> list[str]:
    """Return the names of the runs that are meant, in the order given."""
    known = storage.run_names()
    for name in runs or []:
        if name not in known:
            raise ConfigurationError(f"there is no run {name!r} in {storage.uri}; see `elastic-train runs list`")
    return list(dict.fromkeys(runs or known))


def _of_each(look: Callable[[RunDirectory], Answer | None], storage: Storage, names: Sequence[str]) -> list[Answer]:
    """Look at runs, several at a time; leave out the folders that hold none."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-train-look") as pool:
        found = pool.map(lambda name: look(RunDirectory(storage.run(name))), names)
        return [one for one in found if one is not None]


def _summary(run: RunDirectory) -> RunSummary | None:
    try:
        return summarize(run)
    except (AttemptFailedError, StorageFaultError) as error:
        if isinstance(error, StorageFaultError) and not error.permanent:
            raise
        return RunSummary(name=run.name, uri=run.uri, state=RunState.UNREADABLE, detail=str(error))


def _say(*lines: str) -> None:
    for line in lines:
        console().print(clean(line), markup=False)


def _print_details(details: RunDetails) -> None:
    summary, accounts, run, now = details.summary, details.accounts, details.run, time.time()
    print_pairs(
        [
            ("run", summary.name),
            ("where", summary.uri),
            ("state", f"{_state(summary)} ({summary.detail})" if summary.detail else _state(summary)),
            ("created", f"{age(run.created_at, now)} ago by {run.creator.describe()}" if run else ""),
            ("started from", details.started_from),
            ("train loop", f"{run.fingerprint.loop} ({run.fingerprint.framework})" if run else ""),
            ("workers", " → ".join(str(world.size) for world in accounts.world_sizes)),
            ("faults", f"{faults(accounts)}, {accounts.storage_wait_seconds:.1f} s of storage waits"),
            ("may still fail", counts_in_words(accounts.left)),
            ("goodput", f"{details.goodput:.1%} of {duration(accounts.time.wall_seconds)}"),
        ]
    )
    print_table(
        ["attempt", "begun", "lasted", "end", "from commit", "flow run", "notes"],
        _attempts(details, now),
        right=["attempt", "begun", "lasted"],
    )
    rows = []
    snapshot, manifest = (details.commit.snapshot, details.commit.manifest) if details.commit is not None else ({}, {})
    latest = (latest_checkpoint(snapshot) or {}).get("checkpoint_dir_name")
    which = {"latest": latest, "best": details.best_checkpoint}
    for index, one in reported(snapshot) if snapshot else []:
        name = one["checkpoint_dir_name"]
        size_bytes = sum(manifest.get(name, {}).values())
        marks = ", ".join(mark for mark, folder in which.items() if name == folder)
        metrics = metrics_in_short(one["metrics"] or {}, 6)
        rows.append([loop_name(name), str(index), metrics, size(size_bytes), marks])
    print_table(["checkpoint", "report", "metrics", "size", ""], rows, right=["report", "size"])


def _attempts(details: RunDetails, now: float) -> Iterator[list[str]]:
    for one in details.attempts:
        record, ended = one.record, one.ended
        until = ended.at if ended else now if details.summary.state is RunState.TRAINING else None
        notes = [*(record.repairs if record else []), (ended.verdict or ended.message) if ended else ""]
        yield [
            str(one.number),
            age(record.started_at if record else None, now),
            age(record.started_at, until) if record and until else "",
            one.outcome or ("no end" if record else "record torn"),
            (commit_label(record.base) if record else "") or "the beginning",
            record.owner.flow_run_name if record else "",
            "; ".join(note.strip().partition("\n")[0] for note in notes if note),
        ]


def _state(summary: RunSummary) -> str:
    words = summary.state.value.replace("_", " ")
    return f"{words}: {summary.outcome}" if summary.state is RunState.FAILED else words
