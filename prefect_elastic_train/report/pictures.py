"""Pictures of a report as SVG, in colours that are readable on light and on dark ground. Needs matplotlib."""

from __future__ import annotations

import base64
import io
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from prefect_elastic_train.report.curves import Curve, Point
from prefect_elastic_train.report.markdown import TIME_PARTS
from prefect_elastic_train.report.run_report import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Coordinates of a path, and what of one is less than a tenth of a dot.
_PATH = re.compile(r' d="[^"]*"')
_FRACTION = re.compile(r"(\.\d)\d+")
#: Of the column that Prefect's UI shows an artifact in, at 100 dots an inch.
_WIDTH = 6.9
_COLUMNS = 2
_INK = "#7a808b"
_LINE = "#3b82f6"
_REDONE = "#e5842f"
_BAD = "#e5484d"
#: What is larger cannot be drawn.
_LARGEST = 1e300
_PARTS = ("#2f9e6e", "#8b5cf6", "#d6a419", "#e5484d", "#3b82f6", "#14a3b8", "#e5842f")


def load() -> None:
    """Import what drawing needs, once.

    Raises:
        ImportError: matplotlib is not installed, or broken.
    """
    import matplotlib.backends.backend_svg
    import matplotlib.dates
    import matplotlib.figure  # noqa: F401


def draw(report: RunReport, now: float) -> dict[str, str]:
    """Draw what there is to draw, as data URIs by what they show.

    Args:
        report: What is shown.
        now: Seconds since the epoch.
    """
    pictures = {}
    curves = {name: curve for name, curve in report.curves.items() if curve.stretches}
    if curves:
        pictures["metrics"] = _uri(_draw_metrics(curves, report.axis or "report"))
    if report.world_sizes.changes:
        pictures["workers and time"] = _uri(_draw_life(report, now))
    return pictures


def _figure(height: float) -> Figure:
    # Not through pyplot: its state belongs to whoever else draws in this process.
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), dpi=100, layout="constrained")


def _uri(figure: Figure) -> str:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_usetex(False)  # whatever the user's own plots are set to
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _PATH.sub(lambda path: _FRACTION.sub(r"\1", path[0]), out.getvalue().decode())
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _draw_metrics(curves: dict[str, Curve], axis: str) -> Figure:
    columns = min(_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure = _figure(1.9 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, (name, curve) in zip(grid.flat, curves.items(), strict=False):
        _draw_curve(place, curve)
        _title(place, name)
        place.set_xlabel(_clean(axis), fontsize=8, color=_INK)
    for place in list(grid.flat)[len(curves) :]:
        place.set_axis_off()
    return figure


def _draw_curve(place: Axes, curve: Curve) -> None:
    """Draw the segments; what a later one did again is dashed on a shaded ground."""
    segments = list(curve.segments().items())
    redone_from = float("inf")
    parts: list[tuple[list[Point], list[Point]]] = []
    for _, points in reversed(segments):
        kept = [point for point in points if point[0] < redone_from]
        parts.append((kept, points[max(0, len(kept) - 1) :] if len(kept) < len(points) else []))
        redone_from = min(redone_from, points[0][0])
    for kept, redone in reversed(parts):
        if len(redone) > 1:
            place.axvspan(redone[0][0], redone[-1][0], color=_REDONE, alpha=0.2, linewidth=0)
        _draw_points(place, redone, color=_REDONE, linestyle=(0, (2, 1.5)), linewidth=1.1)
        _draw_points(place, kept, color=_LINE, linewidth=1.3)
    _style(place)


def _draw_points(place: Axes, points: list[Point], **style: Any) -> None:
    points = [(x, y) for x, y in points if abs(x) < _LARGEST and abs(y) < _LARGEST]
    if len(points) == 1:
        place.plot(*points[0], marker=".", markersize=4, color=style["color"])
    elif points:
        place.plot([x for x, _ in points], [y for _, y in points], **style)


def _draw_life(report: RunReport, now: float) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure = _figure(2.7)
    sizes, spent = figure.subplots(2, 1, height_ratios=[2.2, 1])
    points = list(report.world_sizes.changes)
    end = now if report.is_live else max(report.last_event_at, points[-1][0])
    points.append((max(end, points[-1][0] + 1.0), report.world_size))
    times = [datetime.fromtimestamp(at, timezone.utc) for at, _ in points]
    sizes.step(times, [size for _, size in points], where="post", color=_LINE, linewidth=1.3)
    sizes.fill_between(times, [size for _, size in points], step="post", color=_LINE, alpha=0.15, linewidth=0)
    bad = [incident.at for incident in report.incidents if incident.kind in ("failure", "preemption", "driver", "loop")]
    for at in bad:
        sizes.axvline(datetime.fromtimestamp(at, timezone.utc), color=_BAD, linewidth=0.8, linestyle=(0, (3, 2)))
    sizes.set_ylim(bottom=0)
    sizes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _title(sizes, "workers (red: a failure, a preemption, a new driver or a loop gone wrong)" if bad else "workers")
    _style(sizes)
    _use_times(sizes)
    _draw_time(spent, report, now)
    return figure


def _use_times(place: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(tz=timezone.utc, minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
    place.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, tz=timezone.utc)  # type: ignore[no-untyped-call]
    place.xaxis.set_major_formatter(formatter)
    place.xaxis.get_offset_text().set(color=_INK, fontsize=8)


def _draw_time(place: Axes, report: RunReport, now: float) -> None:
    account = report.tally.meter.account(now if report.is_live else None)
    wall = account.wall_seconds or 1.0
    left = 0.0
    for (field, name), colour in zip(TIME_PARTS, _PARTS, strict=True):
        share = getattr(account, field) / wall
        if share > 0:
            place.barh([0], [share], left=[left], height=0.9, color=colour, label=f"{name} {share:.0%}")
        left += share
    place.set_xlim(0, 1)
    place.set_ylim(-0.5, 0.5)
    place.set_axis_off()
    _title(place, f"goodput {account.goodput:.1%}")
    if left:
        place.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.02),
            ncols=3,
            fontsize=7,
            frameon=False,
            labelcolor=_INK,
            handlelength=1.0,
            columnspacing=1.0,
        )


def _title(place: Axes, text: str) -> None:
    place.set_title(_clean(text), fontsize=9, color=_INK, loc="left")


def _clean(text: str) -> str:
    """Leave out what XML does not take, and what would begin a formula."""
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("$", r"\$")


def _style(place: Axes) -> None:
    place.tick_params(colors=_INK, labelsize=8)
    place.grid(color=_INK, alpha=0.25, linewidth=0.5)
    for side, spine in place.spines.items():
        spine.set_color(_INK)
        spine.set_visible(side in ("left", "bottom"))
