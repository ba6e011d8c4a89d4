"""The page of all trainings: one row for each, those in trouble first. Belongs to the flow process and the CLI."""

import uuid
from collections.abc import Collection

from pydantic import BaseModel

from .formats import clock, duration
from .markdown import escape, format_causes, headline, one_line, table
from .run_report import RunReport, remaining_seconds

#: Number of trainings on the page.
_MAX_ROWS = 100
#: Time without an update after which the flow process of a live training counts as lost. With ``_MAX_ROWS`` live
#: trainings, the longest time between two updates is three and a half minutes, and another process may overwrite one.
_SILENT_SECONDS = 600.0
_DAY_SECONDS = 86400.0
# Characters of the texts of a row. Prefect keeps 500 of a whole row, as JSON.
_MAX_TEXT = 50
_MAX_STATE = 90
#: Rank on the page of a training that has failed or is lost.
_IN_TROUBLE = 3


class TrainingRow(BaseModel):
    """The row of a training on the page of all trainings.

    Attributes:
        key: Digest of the URI of the run directory. Runs of one name in several storages have several rows.
        cells: Texts by their headings.
        rank: Rank on the page: 3 for a failed training, 2 for a live one with failures, 1 for a live one, else 0.
        updated: Time of the last update, in seconds since the epoch.
        artifact: Id of the artifact with the report; empty if there is none yet.
    """

    key: str
    cells: dict[str, str]
    rank: int
    updated: float
    artifact: str = ""


def make_row(report: RunReport, now: float, artifact: str = "") -> TrainingRow:
    """Return the row of a training, from its report. The cost is the time of all workers together."""
    left = remaining_seconds(report)
    worker_seconds = report.worker_seconds + report.current_worker_seconds(now)
    causes = one_line(format_causes(report))
    cells = {
        "training": report.run_name[:_MAX_TEXT],
        "state": (headline(report) + (f"; about {duration(left)} left" if left else ""))[:_MAX_STATE],
        "failures": causes[:_MAX_TEXT] or "none",
        "size": str(report.world_size),
        "goodput": f"{report.tally.account(now).goodput:.0%}",
        "cost (h)": f"{worker_seconds / 3600:.2f}",
        "updated": clock(now)[5:16],
    }
    rank = _IN_TROUBLE if report.state in ("failed", "timed out") else report.is_live * (1 + bool(causes))
    key = uuid.uuid5(uuid.NAMESPACE_URL, report.run_uri).hex[:12]
    return TrainingRow(key=key, cells=cells, rank=rank, updated=round(now), artifact=artifact)


def sort_rows(rows: Collection[TrainingRow], now: float) -> list[TrainingRow]:
    """Return the rows that were updated last, those in trouble first.

    A live training whose flow process has written nothing for some minutes counts as failed.
    """
    for row in rows:
        if row.rank and now - row.updated > _SILENT_SECONDS:
            row.rank = _IN_TROUBLE
    # For a day, trainings in trouble stay before those that are updated.
    newest = sorted(rows, key=lambda row: -(row.updated + _DAY_SECONDS * (row.rank == _IN_TROUBLE)))
    return sorted(newest[:_MAX_ROWS], key=lambda row: -row.rank)


def render_page(rows: list[TrainingRow], now: float, artifacts_url: str) -> str:
    """Return the page of all trainings as Markdown, from sorted rows. ``artifacts_url`` begins the links to reports."""
    lines = []
    for row in rows:
        name, state, *rest = map(escape, row.cells.values())
        lines.append(
            [f"[{name}]({artifacts_url}{row.artifact})", f"**{state}**" if row.rank == _IN_TROUBLE else state, *rest]
        )
    return (
        f"The {_MAX_ROWS} trainings that were updated last, those that failed or are silent first. Cost: time of all "
        f"workers. Written {clock(now)} UTC.\n\n{table([*rows[0].cells], lines)}"
    )
