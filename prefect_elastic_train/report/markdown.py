"""The report as Markdown, for an artifact of a bounded size. It tells all without its pictures, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.metrics import COUNTERS, TOTALS
from prefect_elastic_train.report.run_report import Checkpoint, Incident, RunReport
from prefect_elastic_train.report.words import clock, code, duration, metrics_in_words, plain, size

#: A report is never longer; pictures that do not fit are left out.
MAX_BYTES = 290_000
_MAX_ADDRESS = 300
_OLD_PICTURE_SECONDS = 15.0

#: What wall time goes into: the field of the account, and its name for people.
TIME_PARTS: Sequence[tuple[str, str]] = (
    ("productive_seconds", "training that was kept"),
    ("startup_seconds", "start-up and wind-up"),
    ("waiting_for_capacity_seconds", "waiting for capacity"),
    ("restart_seconds", "restarts after failures"),
    ("resize_seconds", "resizes"),
    ("checkpoint_stall_seconds", "standing still for checkpoints"),
    ("lost_seconds", "training that was lost"),
)


def headline(report: RunReport) -> str:
    """Say in a few words what the run does and how far it is."""
    words = report.state[:1].upper() + report.state[1:]
    if report.progress is not None:
        fraction = f"{report.progress.fraction:.1%}"
        words += f": {report.progress.words}"
        words += f" ({fraction})" if report.progress.words != fraction and report.is_live else ""
    return words


def summary_line(report: RunReport, now: float) -> str:
    """Say in one line of text where the run stands."""
    return " · ".join([headline(report), *_facts(report, now)])


def render(
    report: RunReport, now: float, pictures: Mapping[str, str] | None = None, drawn_at: float | None = None
) -> str:
    """Give the report.

    Args:
        report: What it shows.
        now: Seconds since the epoch.
        pictures: Data URIs of pictures by what they show, in their order.
        drawn_at: When they were drawn, in seconds since the epoch; default now.
    """
    shown = dict(pictures or {})
    while True:
        text = "\n\n".join(_sections(report, now, shown, now if drawn_at is None else drawn_at))
        if len(text.encode()) <= MAX_BYTES or not shown:
            return text
        shown.popitem()


def _sections(report: RunReport, now: float, pictures: Mapping[str, str], drawn_at: float) -> Iterator[str]:
    yield f"## {plain(headline(report))}"
    yield " · ".join(_facts(report, now))
    if report.detail:
        yield code(report.detail)
    for name, uri in pictures.items():
        yield f"![{name}]({uri})"
    notes = [
        *(["Shaded and dashed: steps that were done again."] if pictures and report.tally.steps_lost else []),
        *([f"Drawn at {clock(drawn_at, now)}."] if pictures and now - drawn_at > _OLD_PICTURE_SECONDS else []),
    ]
    if notes:
        yield " ".join(notes)
    yield f"### What happened\n\n{_incidents(report, now)}"
    yield f"### Where the time went\n\n{_time(report.tally.meter.account(now if report.is_live else None))}"
    yield f"### Checkpoints\n\n{_checkpoints(report, now)}"
    yield f"### Where\n\n{_places(report)}"
    yield f"Written {clock(now)} UTC. Times are UTC."


def _facts(report: RunReport, now: float) -> Iterator[str]:
    if report.world_size:
        yield f"**{report.world_size} worker{'s' if report.world_size > 1 else ''}**"
    if report.attempt:
        yield f"attempt {report.attempt}"
    progress = report.progress
    if progress is not None and progress.remaining_seconds is not None and report.state == "training":
        yield f"about {duration(progress.remaining_seconds)} left"
    told_by_progress = TOTALS | ({"progress", *COUNTERS} if progress is not None else set())
    metrics = metrics_in_words(report.metrics, 4, leave_out=told_by_progress)
    if metrics:
        yield metrics
    if report.checkpoints:
        age = now - report.checkpoints[-1].at
        yield f"last checkpoint {duration(age)} ago" if report.is_live else f"{report.checkpoints_made} checkpoints"
    elif report.reports:
        yield "no checkpoint yet"
    tally = report.tally
    counts = [
        (tally.worker_failures, "worker failure"),
        (tally.preemptions, "preemption"),
        (report.driver_restarts, "driver restart"),
        (tally.resizes, "resize"),
    ]
    told = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    yield ", ".join(told) if told else "no failures"
    yield f"goodput {tally.meter.account(now if report.is_live else None).goodput:.1%}"


def _incidents(report: RunReport, now: float) -> str:
    if not report.incidents:
        return "Nothing yet."
    items = [_incident(incident, now) for incident in reversed(report.incidents)]
    if report.incidents_left_out:
        items.insert(-10, f"- … {report.incidents_left_out} more are left out")
    return "\n".join(items)


def _incident(incident: Incident, now: float) -> str:
    """Return when, what and, on a line below, why: a page cuts off the last column of a wide table."""
    what, why = plain(incident.what), plain(incident.why)
    what = f"**{what}**" if incident.kind in ("failure", "preemption", "driver", "loop", "end") else what
    return f"- {clock(incident.at, now)} {what}" + (f"  \n  {why}" if why else "")


def _time(account: TimeAccount) -> str:
    rows = []
    for field, name in TIME_PARTS:
        seconds = getattr(account, field)
        if seconds or field == "productive_seconds":
            share = seconds / account.wall_seconds if account.wall_seconds else 0.0
            rows.append([name, duration(seconds), f"{share:.1%}"])
    rows.append(["**wall time**", duration(account.wall_seconds), ""])
    if account.stopped_seconds:
        rows.append(["beside that, stopped", duration(account.stopped_seconds), ""])
    return _table(["", "time", "share"], rows, right=(1, 2))


def _checkpoints(report: RunReport, now: float) -> str:
    if not report.checkpoints:
        return "None yet."
    shown = list(reversed(report.checkpoints))
    best = report.best
    if best is not None and all(made.name != best.name for made in shown):
        shown.append(best)
    rows = [_checkpoint(made, best, now) for made in shown]
    more = report.checkpoints_made - len(shown)
    table = _table(["checkpoint", "committed", "attempt", "metrics", "size", ""], rows, right=(2, 4))
    return table + (f"\n\nand {more} earlier ones" if more > 0 else "")


def _checkpoint(made: Checkpoint, best: Checkpoint | None, now: float) -> list[str]:
    is_best = best is not None and made.name == best.name
    metrics = metrics_in_words(made.metrics, 4, leave_out=TOTALS)
    when = clock(made.at, now)
    best_word = "**best**" if is_best else ""
    return [code(loop_name(made.name)), when, str(made.attempt), metrics, size(made.size_bytes), best_word]


def _places(report: RunReport) -> str:
    lines = [f"- run {code(report.run_name)}"]
    if report.run_uri:
        lines.append(f"- run directory {code(report.run_uri)}")
    if report.started_from:
        lines.append(f"- started from {code(report.started_from)}")
    if report.dashboard_url:
        url = report.dashboard_url[:_MAX_ADDRESS]
        is_link = url.startswith(("http://", "https://")) and url.isprintable() and not set(url) & set('<> "`')
        lines.append(f"- Ray dashboard <{url}>" if is_link else f"- Ray dashboard {code(url)}")
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    lines = [
        f"| {' | '.join(headings)} |",
        f"|{'|'.join('--:' if column in right else '---' for column in range(len(headings)))}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)
