"""What a report takes from a loop's metrics: numbers, a bounded number of them, and how far the training is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Metrics that tell how far the training is rather than how good, in the order in which they are asked, with those
#: that tell the whole: a ``step`` beside a ``global_step`` begins anew with each epoch.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "global_step": ("total_steps", "max_steps", "num_steps"),
    "iteration": ("total_iterations", "max_iterations", "num_iterations"),
    "step": ("total_steps", "max_steps", "num_steps"),
    "epoch": ("total_epochs", "max_epochs", "num_epochs"),
}
TOTALS = frozenset(name for names in COUNTERS.values() for name in names)
_MAX_NAME = 60


def number(value: Any) -> float | None:
    """Return a metric as a number, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def bounded(metrics: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return so many metrics, their names and texts cut."""
    return {
        name[:_MAX_NAME]: value if value is None or number(value) is not None else str(value)[:_MAX_NAME]
        for name, value in list(metrics.items())[:most]
    }


def fraction(metrics: Mapping[str, Any]) -> tuple[float, str] | None:
    """Find how far a training is, from 0 to 1 and in words: ``progress``, or a counter with its total."""
    progress = number(metrics.get("progress"))
    if progress is not None and 0 <= progress <= 1:
        return progress, f"{progress:.1%}"
    for counter, totals in COUNTERS.items():
        done = number(metrics.get(counter))
        total = next((found for name in totals if (found := number(metrics.get(name)))), None)
        if done is not None and total is not None and math.isfinite(done) and total > 0 and math.isfinite(total):
            return min(1.0, max(0.0, done / total)), f"{counter.replace('_', ' ')} {done:,.0f} of {total:,.0f}"
    return None
