"""The picture of a report as SVG, in colors for light and dark backgrounds. Needs matplotlib.

Belongs to the flow process.
"""

import base64
import io
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, whose state other code of this process may use
from matplotlib.ticker import MaxNLocator

from .markdown import one_line
from .run_report import FAULTS, Curve, RunReport

_GRAY = "#7a808b"
_BLUE = "#3b82f6"
_GREEN = "#30a46c"
#: Style of the bands of interruptions.
_BAND: dict[str, Any] = {"color": "#e5484d", "alpha": 0.3, "linewidth": 1.0}
#: Words that distinguish the metrics of training and validation, such as ``val_`` of ``val_loss``.
_SPLIT = re.compile(
    r"\b(train(ing)?|val(id(ation)?)?|eval|test)[_/. -]|[_/. -](train(ing)?|val(id(ation)?)?|eval|test)\b"
)
_MAX = 1e12  # more reports than a run has
_DAY_SECONDS = 86400.0  # matplotlib's times are days since the epoch


def draw(report: RunReport, now: float) -> str:
    """Return a picture of a run's metrics over its steps, and of its number of workers over time, as a data URI.

    Metrics that differ only by a word for training or validation share axes. It is empty before the first attempt.
    """
    if not report.world_sizes:
        return ""
    groups: defaultdict[str, dict[str, Curve]] = defaultdict(dict)
    for name, curve in report.curves.items():
        groups[_SPLIT.sub("", name)][name] = curve
    rows = (len(groups) + 1) // 2 + 1
    # The width in inches is that of the column with artifacts in Prefect's UI, at 1,280 pixels.
    figure = Figure(figsize=(6.1, 1.9 * rows), layout="constrained")
    for position, (title, curves) in enumerate(groups.items(), start=1):
        _draw_metrics(figure.add_subplot(rows, 2, position), title, curves, report)
    _draw_workers(figure.add_subplot(rows, 2, (2 * rows - 1, 2 * rows)), report, now)
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}"


def _draw_metrics(axes: Axes, title: str, curves: Mapping[str, Curve], report: RunReport) -> None:
    points = report.steps.points
    # A step that begins again in each epoch is no axis: then the number of the report is.
    has_steps = bool(points) and all(later[1] >= earlier[1] for earlier, later in pairwise(points))
    reports, steps = zip(*(points if has_steps else [(0.0, 0.0), (_MAX, _MAX)]), strict=True)
    for name, curve in curves.items():
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(
            np.interp(xs, reports, steps),
            ys,
            linewidth=1.3,
            marker="." if len(xs) == 1 else "",
            label=one_line(name),
        )
    low, high = axes.dataLim.intervaly
    if low > 0 and high > 10 * low:
        axes.set_yscale("log")
    for incident in report.incidents:
        if incident.redone:
            axes.axvspan(*np.interp(incident.redone, reports, steps), **_BAND)
    if has_steps:
        saved = [checkpoint.step for checkpoint in report.checkpoints if checkpoint.step]
        axes.plot(saved, [0.0] * len(saved), "^", color=_GREEN, markersize=4, transform=axes.get_xaxis_transform())
    if len(curves) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=_GRAY)
    _style(axes, title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_xlabel("step (triangles: checkpoints)" if has_steps else "report", fontsize=8, color=_GRAY)


def _draw_workers(axes: Axes, report: RunReport, now: float) -> None:
    end = max(now if report.is_live else report.last_event_at, report.world_sizes[-1][0] + 1)
    times, sizes = zip(*report.world_sizes, (end, report.world_size), strict=True)
    axes.fill_between([at / _DAY_SECONDS for at in times], sizes, step="post", color=_BLUE, alpha=0.4)
    faults = [incident for incident in report.incidents if incident.kind in FAULTS or incident.since]
    for fault in faults:
        until = fault.until or (end if fault.since else fault.at)
        axes.axvspan(fault.at / _DAY_SECONDS, until / _DAY_SECONDS, **_BAND)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.xaxis_date()
    _style(axes, "workers (red: failures, preemptions, warnings, until it trains again)" if faults else "workers")


def _style(axes: Axes, title: str) -> None:
    # Unprintable characters are invalid in XML.
    axes.set_title(one_line(title), fontsize=9, color=_GRAY, loc="left", parse_math=False)
    axes.tick_params(colors=_GRAY, labelsize=8)
    axes.grid(color=_GRAY, alpha=0.25, linewidth=0.5)
    axes.spines[:].set_color(_GRAY)
    axes.spines[["top", "right"]].set_visible(False)
