"""Values in words, for the report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

_MAX_CODE = 300


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds) // 60
    hours = minutes // 60
    parts = [(hours // 24, "d"), (hours % 24, "h")] if hours >= 48 else [(hours, "h"), (minutes % 60, "min")]
    parts = parts if hours else [(minutes, "min"), (round(seconds) % 60, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def clock(at: float, now: float | None = None) -> str:
    """A point in time in UTC, with its day unless that is the day of `now`."""
    moment = datetime.fromtimestamp(at, timezone.utc)
    is_today = now is not None and moment.date() == datetime.fromtimestamp(now, timezone.utc).date()
    return f"{moment:%H:%M:%S}" if is_today else f"{moment:%Y-%m-%d %H:%M:%S}"


def number(value: Any) -> str:
    """A metric's value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(str(value)[:60])
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def metrics_in_words(metrics: Mapping[str, Any], most: int, leave_out: frozenset[str] = frozenset()) -> str:
    """Up to so many metrics with their values."""
    shown = [(name, value) for name, value in metrics.items() if name not in leave_out]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(f"{plain(name[:40])} {number(value)}" for name, value in shown[:most]) + more


def size(size_bytes: float) -> str:
    """A size in its largest binary unit."""
    power = min(4, max(0, int(math.log2(size_bytes)) // 10)) if size_bytes >= 1 else 0
    return f"{size_bytes / 1024**power:.{min(1, power)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text[:1000]).split())


def plain(text: str) -> str:
    """Text that Markdown takes as it is, on one line, also in a table."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", _one_line(text))


def code(text: str) -> str:
    """Text as a code span, on one line, also in a table; nothing for no text."""
    # A backslash before the pipe's own would take its meaning away.
    text = re.sub(r"\\*\|", r"\\|", _one_line(text).replace("`", "'"))
    return f"`{text if len(text) <= _MAX_CODE else text[: _MAX_CODE - 1] + '…'}`" if text else ""
