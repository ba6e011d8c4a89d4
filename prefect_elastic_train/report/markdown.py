"""The report as Markdown, complete also without its pictures. Belongs to the flow process."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.result import TimeAccount

from .formats import clock, duration, format_counts, format_metrics, size
from .run_report import (
    FAILURES,
    FAULTS,
    PACED,
    POSITIONS,
    TOTALS,
    Incident,
    RunReport,
    remaining_seconds,
)

_MAX_CAUSE = 80  # characters
_URL = re.compile(r"https?://[\w.:/?=&%+#~@-]{1,300}", re.ASCII)  # without characters of Markdown


def headline(report: RunReport) -> str:
    """Return the state of a run and its progress as text, such as ``Training: step 3 of 10 (30.0%)``."""
    state = report.state.capitalize()
    return f"{state}: {report.progress.text}" if report.progress else state


def summary_line(report: RunReport, now: float) -> str:
    """Return one line about a run: failures by cause, since a card shows no more, state, workers, metrics, goodput."""
    return " · ".join(filter(None, [escape(format_causes(report)), headline(report), *_facts(report, now)]))


def render(report: RunReport, now: float, picture: str = "") -> str:
    """Return the report of a run as Markdown, with a picture of it, which is a data URI."""
    sections = [
        f"## {escape(headline(report))}",
        " · ".join(_facts(report, now)),
        code(report.detail),
        f"**Failures:** {escape(format_causes(report) or 'none')}",
        f"![metrics and workers]({picture})" if picture else "",
        "### What happened",
        "\n".join(map(_incident, reversed(report.incidents))) or "Nothing yet.",
        "### Where the time went",
        _time(report.tally.account(now)),
        "### Checkpoints",
        f"The loop saves {escape(report.saves)}." if report.saves else "",
        f"The time limit of a step is {report.stall_timeout}." if report.stall_timeout else "",
        _checkpoints(report),
        _workers(report),
        "### Where",
        _locations(report),
        f"Written {clock(now)} UTC. Times are UTC.",
    ]
    return "\n\n".join(filter(None, sections))


def _facts(report: RunReport, now: float) -> Iterator[str]:
    if report.world_size:
        yield f"**{report.world_size} worker{'s' if report.world_size > 1 else ''}**"
    if report.attempt:
        yield f"attempt {report.attempt}"
    progress = report.progress
    tally = report.tally
    if report.state == "training":
        if left := remaining_seconds(report):
            yield f"about {duration(left)} left, until {clock(report.last_event_at + left)} UTC"
        for name in PACED:
            if rate := report.rates.get(name):
                size_before, rates_before = report.before
                before = rates_before.get(name)
                comparison = f" ({_rate(before)} with {size_before} workers before)" if before else ""
                yield f"{_rate(rate)} {name.replace('_', ' ').rstrip('s')}s a second{comparison}"
    if metrics := _metrics(report.metrics, POSITIONS if progress else TOTALS | {"samples"}):
        yield metrics
    if report.checkpoints:
        age = now - report.checkpoints[-1].at
        yield f"last checkpoint {duration(age)} ago" if report.is_live else f"{report.checkpoints_made} checkpoints"
    elif report.position:
        yield "no checkpoint yet"
    if tally.resizes:
        yield format_counts({"resize": tally.resizes})
    if tally.left and report.is_live:
        yield f"failures left: {format_counts(tally.left)}"
    yield f"goodput {tally.account(now).goodput:.1%}"


def format_causes(report: RunReport) -> str:
    """Return the number of failures in the report by cause as text, the most frequent first; empty for none."""
    reasons = [incident.reason or incident.message for incident in report.incidents if incident.kind in FAILURES]
    causes = Counter((reason.partition(": ")[2] or reason)[:_MAX_CAUSE] for reason in reasons)
    return "; ".join(f"{count} × {cause}" for cause, count in causes.most_common())


def _incident(incident: Incident) -> str:
    # A list, not a table: Prefect's page cuts off the last column of a wide table.
    message = escape(incident.message)
    reason = escape(incident.reason)
    if incident.kind in (*FAULTS, "end"):
        message = f"**{message}**"
    return f"- {clock(incident.at)} {message}" + (f"  \n  {reason}" if reason else "")


def _time(account: TimeAccount) -> str:
    rows = [
        (part.removesuffix("_seconds").replace("_", " "), duration(spent), f"{spent / account.wall_seconds:.1%}")
        for part, spent in account.model_dump(exclude={"wall_seconds", "stopped_seconds"}).items()
        if spent
    ]
    rows.append(("**wall time**", duration(account.wall_seconds), ""))
    if account.stopped_seconds:
        rows.append(("stopped, not counted", duration(account.stopped_seconds), ""))
    return table(["", "time", "share"], rows)


def _checkpoints(report: RunReport) -> str:
    lines = [
        f"- {clock(checkpoint.at)} "
        + (f"**step {checkpoint.step:,.0f}** " if checkpoint.step else "")
        + code(loop_name(checkpoint.name))
        + (f", {size(checkpoint.size_bytes)}, by attempt {checkpoint.attempt}" if checkpoint.attempt else "")
        + ("; **best**" if checkpoint is report.best else "")
        + (f"  \n  {metrics}" if (metrics := _metrics(checkpoint.metrics, TOTALS)) else "")
        for checkpoint in reversed(report.checkpoints)
    ]
    return "\n".join(lines) or "None yet."


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _workers(report: RunReport) -> str:
    rows = [
        (str(rank), f"{usage.cpu_percent:.0f} %", size(usage.memory_bytes), size(usage.gpu_bytes))
        for rank, usage in sorted(report.usage.items())
    ]
    return f"### Workers\n\n{table(['rank', 'CPU', 'memory', 'GPU memory'], rows)}" if rows else ""


def _locations(report: RunReport) -> str:
    locations = {
        "run": report.run_name,
        "flow run": report.flow_run_url,
        "run directory": report.run_uri,
        "started from": report.started_from,
        "errors and stacks of the last failure": report.details,
        "Ray dashboard": report.dashboard_url,
        **{f"run in {run.kind}": run.link for run in report.tracked},
    }
    return "\n".join(
        f"- {escape(name)} {f'<{location}>' if _URL.fullmatch(location) else code(location)}"
        for name, location in locations.items()
        if location
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The headings and the cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])


def _metrics(metrics: Mapping[str, Any], omitted: Collection[str]) -> str:
    """Return the first four metrics without those in ``omitted`` as Markdown, and the number of the rest."""
    return escape(format_metrics({name: metrics[name] for name in metrics if name not in omitted}, 4))


def one_line(text: str) -> str:
    """Return text on one line, without unprintable characters, shortened to 1,000 characters."""
    return " ".join("".join(character if character.isprintable() else " " for character in text[:1000]).split())


def escape(text: str) -> str:
    """Return text on one line with Markdown's special characters escaped, also for tables."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", one_line(text))


def code(text: str) -> str:
    """Return text as a code span on one line, also for tables; empty for no text."""
    # A backslash before that of a pipe would escape it.
    text = re.sub(r"\\*\|", r"\\|", one_line(text).replace("`", "'"))
    return f"`{text}`" if text else ""
