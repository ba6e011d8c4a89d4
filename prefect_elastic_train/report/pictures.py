"""Pictures of a report as SVG, in colors for light and dark backgrounds. Needs matplotlib.

Belongs to the flow process.
"""

from __future__ import annotations

import base64
import io
import math
from datetime import datetime, timezone
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure  # not pyplot, whose state other code of this process may use
from matplotlib.ticker import MaxNLocator

from prefect_elastic_train.report.markdown import one_line
from prefect_elastic_train.report.run_report import Curve, RunReport

_WIDTH = 6.9  # inches, the width of the column with artifacts in Prefect's UI
_GRAY = "#7a808b"
_BLUE = "#3b82f6"
_RED = "#e5484d"


def draw(report: RunReport, now: float) -> dict[str, str]:
    """Return plots of a run's metrics and of its number of workers over time, as data URIs by their titles.

    A plot without values is left out.
    """
    pictures = {}
    if report.curves:
        pictures["metrics"] = _uri(_draw_metrics(report.curves))
    if report.world_sizes:
        pictures["workers"] = _uri(_draw_workers(report, now))
    return pictures


def _uri(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}"


def _draw_metrics(curves: dict[str, Curve]) -> Figure:
    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(_WIDTH, 1.9 * rows), layout="constrained")
    for position, (name, curve) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(xs, ys, color=_BLUE, linewidth=1.3, marker="." if len(xs) == 1 else "")
        if min(ys) > 0 and max(ys) > 10 * min(ys):
            axes.set_yscale("log")
        _style(axes, name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("report", fontsize=8, color=_GRAY)
    return figure


def _draw_workers(report: RunReport, now: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, 1.9), layout="constrained")
    axes: Any = figure.add_subplot()  # its types do not include dates
    last = report.world_sizes[-1][0]
    changes = [*report.world_sizes, (max(now if report.is_live else report.last_event_at, last + 1), report.world_size)]
    times, sizes = zip(*((_time(at), size) for at, size in changes), strict=True)
    axes.fill_between(times, sizes, step="post", color=_BLUE, alpha=0.4)
    faults = [
        incident.at for incident in report.incidents if incident.kind in ("failure", "preemption", "driver", "loop")
    ]
    for at in faults:
        axes.axvline(_time(at), color=_RED, linewidth=0.8, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.xaxis.set_major_formatter(ConciseDateFormatter(axes.xaxis.get_major_locator()))  # type: ignore[no-untyped-call]
    axes.xaxis.get_offset_text().set(color=_GRAY, fontsize=8)
    _style(axes, "workers (red: a failure, a preemption, a new driver or a warning)" if faults else "workers")
    return figure


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)


def _style(axes: Axes, title: str) -> None:
    # Unprintable characters are invalid in XML, and a dollar sign would start a formula.
    axes.set_title(one_line(title).replace("$", r"\$"), fontsize=9, color=_GRAY, loc="left")
    axes.tick_params(colors=_GRAY, labelsize=8)
    axes.grid(color=_GRAY, alpha=0.25, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set(color=_GRAY, visible=side in ("left", "bottom"))
