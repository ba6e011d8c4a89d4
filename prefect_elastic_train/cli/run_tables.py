"""What ``elastic-train runs`` prints for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prefect_elastic_train.cli.common import age, clean, console, metrics_in_short, print_pairs, print_table
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.markdown import TIME_PARTS
from prefect_elastic_train.report.words import duration, size
from prefect_elastic_train.runs.commits import commit_label
from prefect_elastic_train.runs.identity import LATEST_RUN
from prefect_elastic_train.runs.inspecting import RunDetails, RunState, RunSummary, Verification
from prefect_elastic_train.runs.model import Attempt
from prefect_elastic_train.runs.pruning import RunPlan

#: Ancestors of a run that are shown.
_ANCESTORS = 3

#: The columns of `runs list`.
_COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "state": lambda run: _state(run),
    "attempts": lambda run: str(run.attempts),
    "reports": lambda run: str(run.reports),
    "metrics": lambda run: metrics_in_short(run.metrics),
    "kept": lambda run: str(run.checkpoints),
    "size": lambda run: size(run.size_bytes) if run.size_bytes else "",
    "last commit": lambda run: age(run.last_commit_at, time.time()),
    "flow run": lambda run: run.flow_run_name,
}


def print_summaries(summaries: Sequence[RunSummary]) -> None:
    """Print a table of runs."""
    rows = [[cell(summary) for cell in _COLUMNS.values()] for summary in summaries]
    print_table(list(_COLUMNS), rows, right=["attempts", "reports", "kept", "size", "last commit"])


def print_details(details: RunDetails) -> None:
    """Print all about a run."""
    now = time.time()
    summary, accounts, run = details.summary, details.accounts, details.run
    config = run.fingerprint.config if run is not None else {}
    faults = (
        f"{accounts.worker_failures} worker failures, {accounts.preemptions} preemptions, {accounts.resizes} resizes, "
        f"{accounts.steps_lost} reports done again"
    )
    print_pairs(
        [
            ("run", summary.name),
            ("where", summary.uri),
            ("state", _state(summary) + (f" ({summary.detail})" if summary.detail else "")),
            ("created", f"{age(run.created_at, now)} ago" if run is not None else ""),
            ("by", run.creator.describe() if run is not None else ""),
            ("started from", _lineage(details)),
            ("train loop", f"{run.fingerprint.loop} ({run.fingerprint.framework})" if run is not None else ""),
            ("config", ", ".join(f"{key} #{value[:8]}" for key, value in config.items())),
            ("versions", ", ".join(f"{name} {number}" for name, number in run.versions.items()) if run else ""),
            ("workers", " → ".join(str(world.size) for world in accounts.world_sizes)),
            ("faults", faults),
            ("goodput", _goodput(accounts.time) if accounts.world_sizes else ""),
            ("stopped", duration(accounts.time.stopped_seconds) if accounts.time.stopped_seconds else ""),
            ("storage waits", f"{accounts.storage_wait_seconds:.1f} s" if accounts.storage_wait_seconds else ""),
        ]
    )
    if details.attempts:
        console().print()
        headings = ["attempt", "begun", "lasted", "end", "from commit", "host", "flow run", "notes"]
        lives = summary.state is RunState.TRAINING
        rows = [_attempt(attempt, now, lives) for attempt in details.attempts]
        print_table(headings, rows, right=["attempt", "begun", "lasted"])
    if details.checkpoints:
        console().print()
        rows = []
        for one in details.checkpoints:
            which = ", ".join(word for word, is_it in (("latest", one.latest), ("best", one.best)) if is_it)
            numbers = [str(one.files), size(one.size_bytes)]
            rows.append([one.name, str(one.report_index), metrics_in_short(one.metrics, 6), *numbers, which])
        headings = ["checkpoint", "report", "metrics", "files", "size", ""]
        print_table(headings, rows, right=["report", "files", "size"])
    if details.result is not None:
        console().print()
        metrics = metrics_in_short(details.result.get("metrics") or {}, 20)
        print_pairs([("result", metrics), ("checkpoint", str(details.result.get("checkpoint_uri") or ""))])


def print_verification(found: Verification) -> None:
    """Print what was found of a run."""
    out = console()
    out.print(f"{found.name}: {'whole' if found.whole else 'DAMAGED'}", markup=False, style="bold")
    lines = [f"a resume {found.resume}", *(f"  it would say: {repair}" for repair in found.repairs)]
    lines += [f"left over: {left.folder} ({size(left.size_bytes)}): {left.why}" for left in found.leftovers]
    for line in lines:
        out.print(f"  {clean(line)}", markup=False)


def print_plans(where: str, plans: Sequence[RunPlan]) -> None:
    """Print what would be deleted of the runs of a storage, and which are left alone."""
    out = console()
    deletions = [deletion for one in plans for deletion in one.deletions]
    if deletions:
        rows = [[one.run, one.folder or "the whole run", size(one.size_bytes), one.reason] for one in deletions]
        print_table(["run", "what", "size", "why"], rows, right=["size"])
        out.print(f"{size(sum(deletion.size_bytes for deletion in deletions))} in all", markup=False)
    else:
        out.print(f"nothing to delete in {where}", markup=False)
    for one in plans:
        if one.kept:
            out.print(f"left alone: {one.run}: {clean(one.kept)}", markup=False)


def _state(summary: RunSummary) -> str:
    if summary.state is RunState.FAILED:
        return f"failed: {summary.outcome}"
    state: str = summary.state.value
    return "another program's" if summary.state is RunState.FOREIGN else state.replace("_", " ")


def _attempt(attempt: Attempt, now: float, lives: bool) -> list[str]:
    record, ended = attempt.record, attempt.ended
    notes = [*(["void"] if ended and ended.void else []), *(record.repairs if record else [])]
    notes.append(ended.verdict or ended.message if ended else "")
    began, until = record.started_at if record else None, ended.at if ended else now if lives else None
    return [
        str(attempt.number),
        age(began, now),
        age(began, until) if until is not None else "",
        attempt.outcome or ("no end" if record else "record torn"),
        (commit_label(record.base) if record else "") or "the beginning",
        record.owner.host.partition("/")[0] if record else "",
        record.owner.flow_run_name if record else "",
        "; ".join(note.strip().partition("\n")[0] for note in notes if note),
    ]


def _lineage(details: RunDetails) -> str:
    """Return the checkpoints that a run comes from, the nearest first."""
    named = [f"{one.run}@{one.checkpoint}" + ("" if one.there else " (deleted)") for one in details.ancestors]
    more = [f"{len(named) - _ANCESTORS} more"] if len(named) > _ANCESTORS else []
    resume_from = details.run.resume_from if details.run is not None else ""
    if not named and resume_from.partition("@")[0] == LATEST_RUN:
        return f"the beginning, since {resume_from} found no run"
    return ", which started from ".join([*named[:_ANCESTORS], *more]) or resume_from


def _goodput(account: TimeAccount) -> str:
    """Return the goodput, and what the rest of the wall time went into."""
    wall = account.wall_seconds
    parts = [(name, getattr(account, field)) for field, name in TIME_PARTS if getattr(account, field) > 0]
    words = [f"{name} {duration(seconds)} ({seconds / wall:.1%})" for name, seconds in parts]
    return f"{account.goodput:.1%} of {duration(wall)}: {', '.join(words)}" if wall else ""
