"""The picture of a report as SVG, in colors for light and dark backgrounds. Needs matplotlib.

Belongs to the flow process.
"""

import base64
import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, whose state other code of this process may use
from matplotlib.ticker import MaxNLocator

from .markdown import one_line
from .run_report import FAULTS, RunReport

_GRAY = "#7a808b"
_BLUE = "#3b82f6"
_RED = "#e5484d"
_DAY_SECONDS = 86400.0  # matplotlib's times are days since the epoch


def draw(report: RunReport, now: float) -> str:
    """Return a picture of a run's metrics and number of workers over time, as a data URI.

    It is empty before the first attempt.
    """
    if not report.world_sizes:
        return ""
    rows = (len(report.curves) + 1) // 2 + 1
    # The width in inches is that of the column with artifacts in Prefect's UI.
    figure = Figure(figsize=(6.9, 1.9 * rows), layout="constrained")
    for position, (name, curve) in enumerate(report.curves.items(), start=1):
        _draw_metric(figure.add_subplot(rows, 2, position), name, curve.points)
    _draw_workers(figure.add_subplot(rows, 2, (2 * rows - 1, 2 * rows)), report, now)
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}"


def _draw_metric(axes: Axes, name: str, points: list[tuple[float, float]]) -> None:
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=_BLUE, linewidth=1.3, marker="." if len(xs) == 1 else "")
    if min(ys) > 0 and max(ys) > 10 * min(ys):
        axes.set_yscale("log")
    _style(axes, name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("report", fontsize=8, color=_GRAY)


def _draw_workers(axes: Axes, report: RunReport, now: float) -> None:
    end = max(now if report.is_live else report.last_event_at, report.world_sizes[-1][0] + 1)
    times, sizes = zip(*report.world_sizes, (end, report.world_size), strict=True)
    axes.fill_between([at / _DAY_SECONDS for at in times], sizes, step="post", color=_BLUE, alpha=0.4)
    faults = [incident.at for incident in report.incidents if incident.kind in FAULTS]
    for at in faults:
        axes.axvline(at / _DAY_SECONDS, color=_RED, linewidth=0.8, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.xaxis_date()
    _style(axes, "workers (red: a failure, a preemption, a new driver or a warning)" if faults else "workers")


def _style(axes: Axes, title: str) -> None:
    # Unprintable characters are invalid in XML.
    axes.set_title(one_line(title), fontsize=9, color=_GRAY, loc="left", parse_math=False)
    axes.tick_params(colors=_GRAY, labelsize=8)
    axes.grid(color=_GRAY, alpha=0.25, linewidth=0.5)
    axes.spines[:].set_color(_GRAY)
    axes.spines[["top", "right"]].set_visible(False)
