"""``elastic-train runs``: what a storage holds, whether it is whole, and what of it may go."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from prefect_elastic_train.cli.common import console, errors, fail, open_briefly
from prefect_elastic_train.cli.run_tables import print_details, print_plans, print_summaries, print_verification
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, StorageFaultError
from prefect_elastic_train.report.words import size
from prefect_elastic_train.runs.inspecting import RunState, RunSummary, describe, summarize, verify
from prefect_elastic_train.runs.pruning import RunChangedError, RunPlan, carry_out, plan_run
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

app = typer.Typer(help="Look at the runs of a storage, check them, and clean up.", no_args_is_help=True)

Answer = TypeVar("Answer")

#: Runs looked at, at a time.
_THREADS = 16
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
    with errors():
        opened = open_briefly(storage)
        summaries = _of_each(_summary, opened, opened.run_names())
        if as_json:
            _print_json({"storage": opened.uri, "runs": [_plain(summary) for summary in summaries]})
        elif summaries:
            print_summaries(summaries)
        else:
            console().print(f"no runs in {opened.uri}", markup=False)
        unreadable = [summary for summary in summaries if summary.state is RunState.UNREADABLE]
        if unreadable:
            fail(f"{len(unreadable)} of {len(summaries)} runs cannot be read: {unreadable[0].detail}")


@app.command("show")
def show_run(storage: StorageArgument, run: RunArgument, as_json: Json = False) -> None:
    """Show all about a run: identity, attempts, faults, checkpoints, result."""
    with errors():
        opened = open_briefly(storage)
        [name] = _chosen(opened, [run])
        details = describe(opened, name)
        if details is None:
            raise ConfigurationError(f"{opened.uri}/{name} is a folder without a run")
        if as_json:
            _print_json(_plain(details))
        else:
            print_details(details)


@app.command("verify")
def verify_runs(storage: StorageArgument, runs: RunArguments = None, as_json: Json = False) -> None:
    """Check checkpoints and records, and say what a resume would do. Writes nothing.

    Exit code 1 if anything that a resume needs is damaged.
    """
    with errors():
        opened = open_briefly(storage)
        found = _of_each(verify, opened, _chosen(opened, runs))
    if as_json:
        _print_json({"storage": opened.uri, "runs": [_plain(one) for one in found]})
    else:
        for one in found:
            print_verification(one)
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
    with errors():
        opened = open_briefly(storage)
        seconds = None if older_than is None else older_than * _DAY_SECONDS
        plans = _of_each(lambda store, name: plan_run(store, name, seconds), opened, _chosen(opened, runs))
        print_plans(opened.uri, plans)
        wanted = [one for one in plans if one.deletions]
        if dry_run or not wanted:
            return
        if not yes:
            typer.confirm("Delete this for good?", abort=True)
        _carry_out(opened, wanted)


def _chosen(storage: Storage, runs: Sequence[str] | None) -> list[str]:
    """Return the names of the runs that are meant, in the order given."""
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


def _carry_out(storage: Storage, plans: Sequence[RunPlan]) -> None:
    out = console()
    gone = 0
    try:
        for one in plans:
            try:
                for deletion in carry_out(storage.run(one.run), one):
                    gone += deletion.size_bytes
                    out.print(f"deleted {deletion.run} {deletion.folder}".rstrip(), markup=False)
            except RunChangedError as error:
                out.print(f"left alone: {one.run}: {error}", markup=False)
    finally:
        out.print(f"{size(gone)} deleted", markup=False)
