"""``elastic-train runs``: what a storage holds, whether it is whole, and what of it may go."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from prefect_elastic_train.cli.errors import fail, prefect_errors, storage_errors
from prefect_elastic_train.cli.opening import open_briefly
from prefect_elastic_train.cli.tables import age, clean, console, metrics_in_short, print_pairs, print_table, size
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, StorageFaultError
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings, storage_at
from prefect_elastic_train.report.markdown import TIME_PARTS
from prefect_elastic_train.report.words import duration
from prefect_elastic_train.runs.ancestry import ancestors
from prefect_elastic_train.runs.checking import Verification, verify
from prefect_elastic_train.runs.identity import LATEST_RUN
from prefect_elastic_train.runs.inspecting import RunDetails, RunState, RunSummary, describe, summarize
from prefect_elastic_train.runs.pruning import (
    AwaitedSources,
    Deletion,
    RunChangedError,
    RunPlan,
    carry_out,
    plan_runs,
)
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

__all__ = ["app"]

app = typer.Typer(help="Look at the runs of a storage, check them, and clean up.", no_args_is_help=True)

Answer = TypeVar("Answer")

#: Runs looked at, at a time.
_THREADS = 16
#: Ancestors of a run that are shown to people.
_ANCESTORS = 3
_DAY_SECONDS = 86400.0

StorageArgument = Annotated[
    str,
    typer.Argument(
        help="A directory (./runs, /mnt/runs), a URL (s3://bucket/runs, with the ambient credentials), or a saved "
        "storage block (training-storage-s3/prod, or prod).",
        metavar="STORAGE",
    ),
]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")]
RunArguments = Annotated[list[str] | None, typer.Argument(help="Names of runs; default all.", metavar="[RUN]...")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("list")
def list_runs(storage: StorageArgument, as_json: Json = False) -> None:
    """List the runs: where each stands, how far it has come, what it holds."""
    with storage_errors():
        opened = _open(storage)
        now = time.time()
        summaries = _of_each(_summary, opened, opened.run_names())
        if as_json:
            _print_json({"storage": opened.uri, "runs": [_plain(summary) for summary in summaries]})
        elif summaries:
            headings = ["run", "state", "attempts", "reports", "metrics", "kept", "size", "last commit", "flow run"]
            rows = [_row(summary, now) for summary in summaries]
            print_table(headings, rows, right=["attempts", "reports", "kept", "size", "last commit"])
        else:
            console().print(f"no runs in {opened.uri}", markup=False)
        unreadable = [summary for summary in summaries if summary.state is RunState.UNREADABLE]
        if unreadable:
            fail(f"{len(unreadable)} of {len(summaries)} runs cannot be read: {unreadable[0].detail}")


@app.command("show")
def show_run(storage: StorageArgument, run: RunArgument, as_json: Json = False) -> None:
    """Show all about a run: identity, attempts, faults, checkpoints, result.

    Takes 15 s longer where only watching its heartbeat can tell whether it lives.
    """
    with storage_errors():
        opened = _open(storage)
        [name] = _chosen(opened, [run])
        details = describe(opened.run(name), name)
        if details is None:
            raise ConfigurationError(f"{opened.uri}/{name} is a folder without a run")
        details = details.model_copy(update={"ancestors": ancestors(opened, name)})
        if as_json:
            _print_json(_plain(details))
        else:
            _print_details(details, time.time())


@app.command("verify")
def verify_runs(storage: StorageArgument, runs: RunArguments = None, as_json: Json = False) -> None:
    """Check checkpoints and records, and say what a resume would do. Writes nothing.

    Exit code 1 if anything that a resume needs is damaged.
    """
    with storage_errors():
        opened = _open(storage)
        found = _of_each(verify, opened, _chosen(opened, runs))
    if as_json:
        _print_json({"storage": opened.uri, "runs": [_plain(one) for one in found]})
    else:
        for one in found:
            _print_verification(one)
        if not found:
            console().print(f"no runs in {opened.uri}", markup=False)
    if not all(one.whole for one in found):
        raise typer.Exit(1)


@app.command("prune")
def prune_runs(
    storage: StorageArgument,
    runs: RunArguments = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            min=0,
            metavar="DAYS",
            help="Delete also whole runs that nobody trains and whose last activity is so many days ago.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
) -> None:
    """Delete what no resume needs, of runs that nobody trains; with --older-than whole runs.

    That is interrupted uploads, and checkpoints that were given up or are no longer kept. A run that lives, or of
    which nothing tells whether it does, is left alone. What is deleted cannot be brought back.
    """
    with storage_errors():
        opened = _open(storage)
        seconds = None if older_than is None else older_than * _DAY_SECONDS
        plans = plan_runs(opened, _chosen(opened, runs), older_than_seconds=seconds)
        _print_plans(opened, plans)
        wanted = [one for one in plans if one.deletions or (one.uploads and _has_uploads(opened))]
        if dry_run or not wanted:
            return
        if not yes:
            typer.confirm("Delete this for good?", abort=True)
        _carry_out(opened, wanted, AwaitedSources(opened, seconds) if seconds is not None else None)


def _open(text: str) -> Storage:
    settings = storage_at(text) or _saved(text)
    if isinstance(settings, LocalStorageSettings) and not Path(settings.path).is_dir():
        raise ConfigurationError(f"there is no directory {settings.path}")
    return open_briefly(settings)


def _saved(name: str) -> StorageSettings:
    from prefect_elastic_train.blocks.lookup import storage_named

    with prefect_errors():
        return storage_named(name)


def _chosen(storage: Storage, runs: Sequence[str] | None) -> list[str]:
    """Give the names of the runs that are meant, in the order given."""
    known = storage.run_names()
    for run in runs or []:
        if run not in known:
            similar = difflib.get_close_matches(run, known, n=3)
            hint = f"; is {' or '.join(similar)} meant?" if similar else ""
            raise ConfigurationError(f"there is no run {run!r} in {storage.uri}{hint}")
    return list(dict.fromkeys(runs)) if runs else known


def _of_each(look: Callable[[RunStore, str], Answer | None], storage: Storage, names: Sequence[str]) -> list[Answer]:
    """Look at runs, several at a time; leave out the folders that hold none."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-train-look") as pool:
        found = pool.map(lambda name: look(storage.run(name), name), names)
        return [one for one in found if one is not None]


def _summary(store: RunStore, name: str) -> RunSummary | None:
    try:
        return summarize(store, name)
    except (AttemptFailedError, StorageFaultError) as error:
        if isinstance(error, StorageFaultError) and not error.permanent:
            raise
        return RunSummary(name=name, uri=store.uri, state=RunState.UNREADABLE, detail=str(error))


def _plain(model: BaseModel) -> Any:
    return json.loads(model.model_dump_json())


def _print_json(value: Any) -> None:
    # Not through the console, which would fold long lines.
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _state(summary: RunSummary) -> str:
    if summary.state is RunState.FAILED:
        return f"failed: {summary.outcome}"
    state: str = summary.state.value
    return "another program's" if summary.state is RunState.FOREIGN else state.replace("_", " ")


def _row(summary: RunSummary, now: float) -> list[str]:
    return [
        summary.name,
        _state(summary),
        str(summary.attempts),
        str(summary.reports),
        metrics_in_short(summary.metrics),
        str(summary.checkpoints),
        size(summary.size_bytes) if summary.size_bytes else "",
        age(summary.last_commit_at, now),
        summary.flow_run_name,
    ]


def _print_details(details: RunDetails, now: float) -> None:
    summary, accounts = details.summary, details.accounts
    creator = details.creator
    fingerprint = details.fingerprint
    print_pairs(
        [
            ("run", summary.name),
            ("where", summary.uri),
            ("state", _state(summary) + (f" ({summary.detail})" if summary.detail else "")),
            ("waits", details.waiting),
            ("created", f"{age(details.created_at, now)} ago" if details.created_at else ""),
            ("by", creator.describe() if creator is not None else ""),
            ("started from", _lineage(details)),
            ("train loop", f"{fingerprint.loop} ({fingerprint.framework})" if fingerprint is not None else ""),
            (
                "config",
                ", ".join(f"{key} #{value[:8]}" for key, value in fingerprint.config.items()) if fingerprint else "",
            ),
            ("versions", ", ".join(f"{name} {number}" for name, number in details.versions.items())),
            ("workers", " → ".join(str(world.size) for world in accounts.world_sizes)),
            (
                "faults",
                f"{accounts.worker_failures} worker failures, {accounts.preemptions} preemptions, {accounts.resizes} "
                f"resizes, {accounts.steps_lost} reports done again",
            ),
            ("goodput", _goodput(accounts.time) if accounts.world_sizes else ""),
            ("stopped", duration(accounts.time.stopped_seconds) if accounts.time.stopped_seconds else ""),
            ("storage waits", f"{accounts.storage_wait_seconds:.1f} s" if accounts.storage_wait_seconds else ""),
        ]
    )
    if details.attempts:
        console().print()
        rows = []
        for attempt in details.attempts:
            ended = attempt.outcome or ("record torn" if attempt.torn else "no end")
            notes = [*(["void"] if attempt.void else []), *attempt.repairs, attempt.verdict or attempt.message]
            until = attempt.ended_at or (now if summary.state is RunState.TRAINING else None)
            lasted = age(attempt.started_at, until) if until is not None else ""
            note = "; ".join(note.strip().partition("\n")[0] for note in notes if note)
            row = [str(attempt.attempt), age(attempt.started_at, now), lasted, ended, attempt.base or "the beginning"]
            rows.append([*row, attempt.host, attempt.flow_run_name, note])
        headings = ["attempt", "begun", "lasted", "end", "from commit", "host", "flow run", "notes"]
        print_table(headings, rows, right=["attempt", "begun", "lasted"])
    if details.checkpoints:
        console().print()
        rows = []
        for checkpoint in details.checkpoints:
            which = [word for word, is_it in (("latest", checkpoint.latest), ("best", checkpoint.best)) if is_it]
            row = [checkpoint.name, str(checkpoint.report_index), metrics_in_short(checkpoint.metrics, 6)]
            rows.append(
                [
                    *row,
                    str(checkpoint.files),
                    size(checkpoint.size_bytes),
                    age(checkpoint.committed_at, now),
                    ", ".join(which),
                ]
            )
        headings = ["checkpoint", "report", "metrics", "files", "size", "age", ""]
        print_table(headings, rows, right=["report", "files", "size", "age"])
    if details.result is not None:
        console().print()
        metrics = details.result.get("metrics") or {}
        print_pairs(
            [("result", metrics_in_short(metrics, 20)), ("checkpoint", str(details.result.get("checkpoint_uri") or ""))]
        )


def _lineage(details: RunDetails) -> str:
    """Give the checkpoints that a run comes from, the nearest first."""
    named = [f"{one.run}@{one.checkpoint}" + ("" if one.there else " (deleted)") for one in details.ancestors]
    more = [f"{len(named) - _ANCESTORS} more"] if len(named) > _ANCESTORS else []
    if not named and details.resume_from.partition("@")[0] == LATEST_RUN:
        return f"the beginning, since {details.resume_from} found no run"
    return ", which started from ".join([*named[:_ANCESTORS], *more]) or details.resume_from


def _goodput(account: TimeAccount) -> str:
    """Give the goodput, and what the rest of the wall time went into."""
    wall = account.wall_seconds
    parts = [(name, getattr(account, field)) for field, name in TIME_PARTS if getattr(account, field) > 0]
    words = [f"{name} {duration(seconds)} ({seconds / wall:.1%})" for name, seconds in parts]
    return f"{account.goodput:.1%} of {duration(wall)}: {', '.join(words)}" if wall else ""


def _print_verification(found: Verification) -> None:
    out = console()
    out.print(f"{found.name}: {'whole' if found.whole else 'DAMAGED'}", markup=False, style="bold")
    for checkpoint in found.checkpoints:
        what = "ok" if checkpoint.ok else "; ".join(checkpoint.problems)
        latest = ", latest" if checkpoint.latest else ""
        facts = f"{checkpoint.files} files, {size(checkpoint.size_bytes)}{latest}"
        out.print(f"  checkpoint {clean(checkpoint.name)}: {clean(what)} ({facts})", markup=False)
    out.print(f"  a resume {clean(found.resume)}", markup=False)
    for repair in found.repairs:
        out.print(f"    it would say: {clean(repair)}", markup=False)
    if found.snapshot and found.snapshot != "mirrors the newest commit":
        out.print(f"  Ray's snapshot: {found.snapshot}; a resume writes it anew", markup=False)
    older = [commit for commit in found.older_commits if commit.whole]
    if older:
        out.print(f"  older commits that are still whole: {', '.join(one.commit for one in older)}", markup=False)
    for commit in found.older_commits:
        if commit.problem:
            out.print(f"  commit {commit.commit}: {commit.problem}", markup=False)
    for record in found.torn_records:
        out.print(f"  {record}", markup=False)
    for left in found.leftovers:
        if left.there:
            out.print(
                f"  left over: {clean(left.folder)} ({size(left.size_bytes)}): {clean(left.reason)}", markup=False
            )


def _has_uploads(storage: Storage) -> bool:
    """Tell whether an interrupted upload can leave parts out of sight; in a directory its files are there to see."""
    return not isinstance(storage.settings, LocalStorageSettings)


def _print_plans(storage: Storage, plans: Sequence[RunPlan]) -> None:
    out = console()
    deletions = [deletion for one in plans for deletion in one.deletions]
    rows = [[one.run, one.folder or "the whole run", size(one.size_bytes), one.reason] for one in deletions]
    parts = [one.run for one in plans if one.uploads and one.whole is None] if _has_uploads(storage) else []
    rows += [[run, "parts of unfinished uploads", "unknown", "nobody will complete them"] for run in parts]
    if rows:
        print_table(["run", "what", "size", "why"], rows, right=["size"])
        out.print(f"{size(sum(deletion.size_bytes for deletion in deletions))} in all", markup=False)
    else:
        out.print(f"nothing to delete in {storage.uri}", markup=False)
    for one in plans:
        if one.kept:
            out.print(f"left alone: {one.run}: {clean(one.kept)}", markup=False)


def _carry_out(storage: Storage, plans: Sequence[RunPlan], awaited: AwaitedSources | None) -> None:
    out = console()
    gone: list[Deletion] = []
    try:
        for one in plans:
            try:
                for deletion in carry_out(storage.run(one.run), one, awaited):
                    gone.append(deletion)
                    out.print(f"deleted {deletion.run} {deletion.folder}".rstrip(), markup=False)
            except RunChangedError as error:
                out.print(f"left alone: {one.run}: {error}", markup=False)
    finally:
        out.print(f"{size(sum(deletion.size_bytes for deletion in gone))} deleted", markup=False)
