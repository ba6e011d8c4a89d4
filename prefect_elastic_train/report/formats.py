"""Formats of values for users. Belongs to the flow process and the CLI."""

from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial

from humanize import naturalsize

#: Returns a size in bytes as text, such as ``3.0 MiB`` or ``6 Bytes``.
size = partial(naturalsize, binary=True)


def duration(seconds: float) -> str:
    """Return a time span as text in the largest unit that it fills, such as ``1.5 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.1f} s"


def clock(at: float) -> str:
    """Return a time (seconds since the epoch) as text in UTC, such as ``2026-07-14 09:30:00``."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S}"


def format_counts(counts: Mapping[str, int]) -> str:
    """Return counts with their names, such as ``1 resize, 2 preemptions``; empty for none."""
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items())


def format_metrics(metrics: Mapping[str, object], limit: int = 20) -> str:
    """Return the first ``limit`` metrics as text, such as ``loss=0.1235, step=7 and 2 more``. Long texts are cut."""
    texts = [
        f"{name[:40]}={value:.4g}" if isinstance(value, float) else f"{name[:40]}={str(value)[:40]}"
        for name, value in metrics.items()
    ]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
