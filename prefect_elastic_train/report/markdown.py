"""The report as Markdown. It tells all without its pictures, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.run_report import COUNTERS, TOTALS, Incident, RunReport
from prefect_elastic_train.report.words import clock, code, duration, metrics_in_words, plain, size

#: What wall time goes into: the field of the account, and its name for people.
_TIME_PARTS: Sequence[tuple[str, str]] = (
    ("productive_seconds", "training that was kept"),
    ("startup_seconds", "start-up and wind-up"),
    ("waiting_for_capacity_seconds", "waiting for capacity"),
    ("restart_seconds", "restarts after failures"),
    ("resize_seconds", "resizes"),
    ("checkpoint_stall_seconds", "standing still for checkpoints"),
    ("lost_seconds", "training that was lost"),
)


def headline(report: RunReport) -> str:
    """What the run does and how far it is, in a few words."""
    words = report.state[:1].upper() + report.state[1:]
    if report.progress is not None:
        fraction = f" ({report.progress.fraction:.1%})"
        words += f": {report.progress.words}" + (fraction if report.is_live and "of" in report.progress.words else "")
    return words


def summary_line(report: RunReport, now: float) -> str:
    """Where the run stands, in one line of text."""
    return " · ".join([headline(report), *_facts(report, now)])


def render(report: RunReport, now: float, pictures: Mapping[str, str] | None = None) -> str:
    """The report as Markdown, with pictures as data URIs by what they show."""
    return "\n\n".join(_sections(report, now, pictures or {}))


def _sections(report: RunReport, now: float, pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"## {plain(headline(report))}"
    yield " · ".join(_facts(report, now))
    if report.detail:
        yield code(report.detail)
    for name, uri in pictures.items():
        yield f"![{name}]({uri})"
    incidents = [_incident(incident, now) for incident in reversed(report.incidents)] or ["Nothing yet."]
    yield "### What happened\n\n" + "\n".join(incidents)
    yield f"### Where the time went\n\n{_time(report.tally.account(now if report.is_live else None))}"
    yield f"### Checkpoints\n\n{_checkpoints(report, now)}"
    yield f"### Where\n\n{_places(report)}"
    yield f"Written {clock(now)} UTC. Times are UTC."


def _facts(report: RunReport, now: float) -> Iterator[str]:
    if report.world_size:
        yield f"**{report.world_size} worker{'s' if report.world_size > 1 else ''}**"
    if report.attempt:
        yield f"attempt {report.attempt}"
    progress, tally = report.progress, report.tally
    if progress is not None and progress.remaining_seconds is not None and report.state == "training":
        yield f"about {duration(progress.remaining_seconds)} left"
    told_by_progress = {"progress", *COUNTERS} if progress is not None else set()
    if metrics := metrics_in_words(report.metrics, 4, leave_out=TOTALS | told_by_progress):
        yield metrics
    if report.checkpoints:
        age = now - report.checkpoints[-1].at
        yield f"last checkpoint {duration(age)} ago" if report.is_live else f"{report.checkpoints_made} checkpoints"
    elif report.reports:
        yield "no checkpoint yet"
    names = ("worker failure", "preemption", "driver restart", "resize")
    counts = (tally.worker_failures, tally.preemptions, report.driver_restarts, tally.resizes)
    told = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in zip(names, counts, strict=True) if count]
    yield ", ".join(told) or "no failures"
    yield f"goodput {tally.account(now if report.is_live else None).goodput:.1%}"


def _incident(incident: Incident, now: float) -> str:
    """Return when, what and, on a line below, why: a page cuts off the last column of a wide table."""
    what, why = plain(incident.what), plain(incident.why)
    what = f"**{what}**" if incident.kind in ("failure", "preemption", "driver", "loop", "end") else what
    return f"- {clock(incident.at, now)} {what}" + (f"  \n  {why}" if why else "")


def _time(account: TimeAccount) -> str:
    parts = [(name, getattr(account, field)) for field, name in _TIME_PARTS]
    rows = [(name, duration(spent), f"{spent / account.wall_seconds:.1%}") for name, spent in parts if spent]
    rows.append(("**wall time**", duration(account.wall_seconds), ""))
    if account.stopped_seconds:
        rows.append(("beside that, stopped", duration(account.stopped_seconds), ""))
    return _table(["", "time", "share"], rows)


def _checkpoints(report: RunReport, now: float) -> str:
    shown, best = list(reversed(report.checkpoints)), report.best
    if not shown:
        return "None yet."
    if best is not None and all(made.name != best.name for made in shown):
        shown.append(best)
    rows = [
        (
            code(loop_name(made.name)),
            clock(made.at, now),
            str(made.attempt),
            metrics_in_words(made.metrics, 4, leave_out=TOTALS),
            size(made.size_bytes),
            "**best**" if best is not None and made.name == best.name else "",
        )
        for made in shown
    ]
    more = report.checkpoints_made - len(shown)
    table = _table(["checkpoint", "committed", "attempt", "metrics", "size", ""], rows)
    return table + (f"\n\nand {more} earlier ones" if more > 0 else "")


def _places(report: RunReport) -> str:
    url = report.dashboard_url
    places = {
        "run": code(report.run_name),
        "run directory": code(report.run_uri),
        "started from": code(report.started_from),
        "Ray dashboard": f"<{url}>" if re.fullmatch(r"https?://[\w.:/?=&%+-]{1,300}", url, re.ASCII) else code(url),
    }
    return "\n".join(f"- {name} {place}" for name, place in places.items() if place)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])
