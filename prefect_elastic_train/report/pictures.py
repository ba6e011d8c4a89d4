"""Pictures of a report as SVG, in colours that are readable on light and on dark ground. Needs matplotlib."""

from __future__ import annotations

import base64
import io
import math
from datetime import datetime, timezone

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure  # not pyplot, whose state belongs to whoever else draws in this process
from matplotlib.ticker import MaxNLocator

from prefect_elastic_train.report.markdown import TIME_PARTS
from prefect_elastic_train.report.run_report import Curve, RunReport

#: Inches of the column that Prefect's UI shows an artifact in, at 100 dots each.
_WIDTH = 6.9
_INK = "#7a808b"
_LINE = "#3b82f6"
_BAD = "#e5484d"
_PARTS = ("#2f9e6e", "#8b5cf6", "#d6a419", "#e5484d", "#3b82f6", "#14a3b8", "#e5842f")


def draw(report: RunReport, now: float) -> dict[str, str]:
    """Return pictures of what there is to draw as data URIs, by what they show."""
    pictures = {}
    if report.curves:
        pictures["metrics"] = _uri(_draw_metrics(report.curves))
    if report.world_sizes:
        pictures["workers and time"] = _uri(_draw_life(report, now))
    return pictures


def _uri(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}"


def _draw_metrics(curves: dict[str, Curve]) -> Figure:
    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(_WIDTH, 1.9 * rows), dpi=100, layout="constrained")
    for place, (name, curve) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(xs, ys, color=_LINE, linewidth=1.3, marker="." if len(xs) == 1 else "")
        _style(axes, name)
        axes.set_xlabel("report", fontsize=8, color=_INK)
    return figure


def _draw_life(report: RunReport, now: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, 2.7), dpi=100, layout="constrained")
    workers, spent = figure.subplots(2, 1, height_ratios=[2.2, 1])
    last = report.world_sizes[-1][0]
    changes = [*report.world_sizes, (max(now if report.is_live else report.last_event_at, last + 1), report.world_size)]
    times = [datetime.fromtimestamp(at, timezone.utc) for at, _ in changes]
    workers.fill_between(times, [size for _, size in changes], step="post", color=_LINE, alpha=0.4)
    bad = [incident.at for incident in report.incidents if incident.kind in ("failure", "preemption", "driver", "loop")]
    for at in bad:
        workers.axvline(datetime.fromtimestamp(at, timezone.utc), color=_BAD, linewidth=0.8, linestyle="--")
    workers.set_ylim(bottom=0)
    workers.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    locator = AutoDateLocator(tz=timezone.utc, minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
    workers.xaxis.set_major_locator(locator)
    workers.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=timezone.utc))  # type: ignore[no-untyped-call]
    workers.xaxis.get_offset_text().set(color=_INK, fontsize=8)
    _style(workers, "workers (red: a failure, a preemption, a new driver or a loop gone wrong)" if bad else "workers")
    account = report.tally.account(now if report.is_live else None)
    left = 0.0
    for (field, name), colour in zip(TIME_PARTS, _PARTS, strict=True):
        share = getattr(account, field) / (account.wall_seconds or 1.0)
        spent.barh([0], [share], left=[left], color=colour, label=f"{name} {share:.0%}" if share else None)
        left += share
    _style(spent, f"goodput {account.goodput:.1%}")
    spent.set(xlim=(0, 1))
    spent.set_axis_off()
    if left:
        spent.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=7, frameon=False, labelcolor=_INK)
    return figure


def _style(axes: Axes, title: str) -> None:
    # Without what XML does not take, and what would begin a formula.
    shown = "".join(letter if letter.isprintable() else " " for letter in title).replace("$", r"\$")
    axes.set_title(shown, fontsize=9, color=_INK, loc="left")
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(color=_INK, alpha=0.25, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set(color=_INK, visible=side in ("left", "bottom"))
