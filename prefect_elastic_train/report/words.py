"""Values in words, for the report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

_MAX_CODE = 300


def duration(seconds: float) -> str:
    """Give a time span in its two largest units."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def clock(at: float, now: float | None = None) -> str:
    """Give a point in time in UTC, with its day unless that is the day of `now`."""
    moment = datetime.fromtimestamp(at, timezone.utc)
    if now is not None and moment.date() == datetime.fromtimestamp(now, timezone.utc).date():
        return f"{moment:%H:%M:%S}"
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def number(value: Any) -> str:
    """Give a metric's value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(str(value)[:60])
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    try:
        value = float(value)
    except OverflowError:
        return "more than any float"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def metrics_in_words(metrics: Mapping[str, Any], most: int, leave_out: frozenset[str] = frozenset()) -> str:
    """Give up to so many metrics with their values."""
    shown = [(name, value) for name, value in metrics.items() if name not in leave_out]
    words = [f"{plain(name[:40])} {number(value)}" for name, value in shown[:most]]
    more = len(shown) - most
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def size(size_bytes: float) -> str:
    """Give a size in its largest binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"


def plain(text: str) -> str:
    """Give text that Markdown takes as it is, on one line, also in a table."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    for special in "\\`*_{}[]<>#|~":
        text = text.replace(special, f"\\{special}")
    return text


def code(text: str) -> str:
    """Give text as a code span, on one line, also in a table; nothing for no text."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    # A backslash before the pipe's own would take its meaning away.
    text = re.sub(r"\\*\|", r"\\|", text.replace("`", "'"))
    if len(text) > _MAX_CODE:
        text = f"{text[: _MAX_CODE - 1]}…"
    return f"`{text}`" if text else ""
