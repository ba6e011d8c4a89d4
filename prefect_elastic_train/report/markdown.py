"""The report as Markdown, which tells all without its pictures, too, and values in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from humanize import naturalsize

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.accounts import counts_in_words
from prefect_elastic_train.report.run_report import PACED, POSITIONS, TOTALS, Incident, RunReport, is_link

#: What wall time goes into: the field of the account, and its name for people.
_TIME_PARTS = {
    "productive_seconds": "training that was kept",
    "startup_seconds": "start-up and wind-up",
    "waiting_for_capacity_seconds": "waiting for capacity",
    "restart_seconds": "restarts after failures",
    "resize_seconds": "resizes",
    "checkpoint_stall_seconds": "standing still for checkpoints",
    "lost_seconds": "training that was lost",
}
_MAX_CODE = 300

#: Returns a size in bytes as text, such as ``3.0 MiB`` or ``6 Bytes``.
size = partial(naturalsize, binary=True)


def headline(report: RunReport) -> str:
    """What the run does and how far it is, in a few words."""
    words = report.state.capitalize()
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
    account = report.tally.account(now if report.is_live else None)
    yield f"### Where the time went\n\n{_time(account)}"
    saves = f"The loop saves {plain(report.saves)}.\n\n" if report.saves else ""
    yield f"### Checkpoints\n\n{saves}{_checkpoints(report, now)}"
    yield f"### Where\n\n{_places(report)}"
    yield f"Written {clock(now)} UTC. Times are UTC."


def _facts(report: RunReport, now: float) -> Iterator[str]:
    if report.world_size:
        yield f"**{report.world_size} worker{'s' if report.world_size > 1 else ''}**"
    if report.attempt:
        yield f"attempt {report.attempt}"
    progress, tally = report.progress, report.tally
    if progress is not None and progress.remaining_seconds is not None and report.state == "training":
        left = progress.remaining_seconds
        yield f"about {duration(left)} left, until {clock(report.last_event_at + left, now)} UTC"
    if report.state == "training":
        for name in PACED:
            if rate := report.rates.get(name):
                words = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
                yield f"{words} {name.replace('_', ' ').rstrip('s')}s a second"
    leave_out = POSITIONS if progress is not None else TOTALS | {"samples"}
    if metrics := metrics_in_words(report.metrics, 4, leave_out):
        yield metrics
    if report.checkpoints:
        age = now - report.checkpoints[-1].at
        yield f"last checkpoint {duration(age)} ago" if report.is_live else f"{report.checkpoints_made} checkpoints"
    elif report.reports:
        yield "no checkpoint yet"
    counts = {
        "worker failure": tally.worker_failures,
        "preemption": tally.preemptions,
        "driver restart": report.driver_restarts,
        "resize": tally.resizes,
    }
    yield counts_in_words({name: count for name, count in counts.items() if count}) or "no failures"
    if tally.left and report.is_live:
        yield f"may still fail: {counts_in_words(tally.left)}"
    yield f"goodput {tally.account(now if report.is_live else None).goodput:.1%}"


def _incident(incident: Incident, now: float) -> str:
    """Return when, what and, on a line below, why: a page cuts off the last column of a wide table."""
    what, why = plain(incident.what), plain(incident.why)
    what = f"**{what}**" if incident.kind in ("failure", "preemption", "driver", "loop", "end") else what
    return f"- {clock(incident.at, now)} {what}" + (f"  \n  {why}" if why else "")


def _time(account: TimeAccount) -> str:
    parts = [(name, getattr(account, field)) for field, name in _TIME_PARTS.items()]
    rows = [(name, duration(spent), f"{spent / account.wall_seconds:.1%}") for name, spent in parts if spent]
    rows.append(("**wall time**", duration(account.wall_seconds), ""))
    if account.stopped_seconds:
        rows.append(("beside that, stopped", duration(account.stopped_seconds), ""))
    return table(["", "time", "share"], rows)


def _checkpoints(report: RunReport, now: float) -> str:
    shown, best = list(reversed(report.checkpoints)), report.best
    if not shown:
        return "None yet."
    if best is not None and all(made.name != best.name for made in shown):
        shown.append(best)
    lines = [
        f"- {clock(made.at, now)} {code(loop_name(made.name))}, {size(made.size_bytes)}, by attempt {made.attempt}"
        + ("; **best**" if best is not None and made.name == best.name else "")
        + (f"  \n  {words}" if (words := metrics_in_words(made.metrics, 4, TOTALS)) else "")
        for made in shown
    ]
    return "\n".join(lines)


def _places(report: RunReport) -> str:
    places = {
        "run": report.run_name,
        "flow run": report.flow_run_url,
        "run directory": report.run_uri,
        "started from": report.started_from,
        "Ray dashboard": report.dashboard_url,
        **report.links,
    }
    shown = {name: f"<{place}>" if is_link(place) else code(place) for name, place in places.items() if place}
    return "\n".join(f"- {plain(name)} {place}" for name, place in shown.items())


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])


def duration(seconds: float) -> str:
    """A time span in the largest unit that it fills."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.1f} s"


def clock(at: float, now: float | None = None) -> str:
    """A point in time in UTC, with its day unless that is the day of `now`."""
    moment = datetime.fromtimestamp(at, timezone.utc)
    is_today = now is not None and moment.date() == datetime.fromtimestamp(now, timezone.utc).date()
    return f"{moment:%H:%M:%S}" if is_today else f"{moment:%Y-%m-%d %H:%M:%S}"


def number(value: Any) -> str:
    """A metric's value, as a report keeps it."""
    if not isinstance(value, int | float):
        return plain(str(value))
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else f"{value:.4g}"


def metrics_in_words(metrics: Mapping[str, Any], most: int, leave_out: frozenset[str]) -> str:
    """Up to so many metrics with their values."""
    shown = [(name, value) for name, value in metrics.items() if name not in leave_out]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(f"{plain(name[:40])} {number(value)}" for name, value in shown[:most]) + more


def one_line(text: str) -> str:
    """Text without line ends and letters that cannot be printed, cut to 1,000 letters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text[:1000]).split())


def plain(text: str) -> str:
    """Text that Markdown takes as it is, on one line, also in a table."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", one_line(text))


def code(text: str) -> str:
    """Text as a code span, on one line, also in a table; nothing for no text."""
    # A backslash before the pipe's own would take its meaning away.
    text = re.sub(r"\\*\|", r"\\|", one_line(text).replace("`", "'"))
    return f"`{text if len(text) <= _MAX_CODE else text[: _MAX_CODE - 1] + '…'}`" if text else ""
