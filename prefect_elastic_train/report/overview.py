"""The page of all trainings: one row for each, those in trouble first. Belongs to the flow process and the CLI."""

from collections.abc import Iterable
from itertools import pairwise

from pydantic import BaseModel

from .formats import clock, duration
from .markdown import escape, format_causes, headline, table
from .run_report import RunReport, remaining_seconds

#: Number of trainings on the page.
_MAX_ROWS = 100
#: Time without an update after which the flow process of a live training counts as lost. The longest between two
#: updates is a minute and a half.
_SILENT_SECONDS = 300.0
_DAY_SECONDS = 86400.0
_MAX_TEXT = 50  # characters of a name and of the failures: Prefect keeps 500 of a whole row
#: Rank on the page of a training that has failed or is lost.
_IN_TROUBLE = 3


class TrainingRow(BaseModel):
    """The row of a training on the page of all trainings.

    Attributes:
        cells: Texts by their headings.
        rank: Rank on the page: 3 for a failed training, 2 for a live one with failures, 1 for a live one, else 0.
        updated: Time of the last update, in seconds since the epoch.
        link: URL of the report; empty if it is unknown.
    """

    cells: dict[str, str]
    rank: int
    updated: float
    link: str = ""


def make_row(report: RunReport, now: float, link: str = "") -> TrainingRow:
    """Return the row of a training, from its report. The cost is the time of all workers together."""
    left = remaining_seconds(report)
    sizes = [*report.world_sizes, (now, 0)]
    worker_seconds = sum(size * (until - at) for (at, size), (until, _) in pairwise(sizes))
    causes = format_causes(report)
    cells = {
        "training": report.run_name[:_MAX_TEXT],
        "state": headline(report) + (f"; about {duration(left)} left" if left else ""),
        "failures": causes[:_MAX_TEXT] or "none",
        "size": str(report.world_size),
        "goodput": f"{report.tally.account(now).goodput:.0%}",
        "cost (h)": f"{worker_seconds / 3600:.2f}",
        "updated": clock(now)[5:16],
    }
    rank = _IN_TROUBLE if report.state in ("failed", "timed out") else report.is_live * (1 + bool(causes))
    return TrainingRow(cells=cells, rank=rank, updated=now, link=link)


def sort_rows(rows: Iterable[TrainingRow], now: float) -> list[TrainingRow]:
    """Return the rows that were updated last, those in trouble first.

    A live training whose flow process has written nothing for some minutes counts as failed.
    """
    newest = sorted(rows, key=lambda row: -row.updated)
    for row in newest:
        if row.rank and now - row.updated > _SILENT_SECONDS:
            row.rank = _IN_TROUBLE
    # For a day, trainings in trouble stay before those that are updated.
    newest.sort(key=lambda row: -(row.updated + _DAY_SECONDS * (row.rank == _IN_TROUBLE)))
    return sorted(newest[:_MAX_ROWS], key=lambda row: -row.rank)


def render_page(rows: list[TrainingRow], now: float) -> str:
    """Return the page of all trainings as Markdown, from sorted rows."""
    lines = []
    for row in rows:
        name, state, *rest = map(escape, row.cells.values())
        lines.append([f"[{name}]({row.link})", f"**{state}**" if row.rank == _IN_TROUBLE else state, *rest])
    return (
        f"The {_MAX_ROWS} trainings that were updated last, those that failed or are silent first. Cost: time of all "
        f"workers. Written {clock(now)} UTC.\n\n{table([*rows[0].cells], lines)}"
    )
