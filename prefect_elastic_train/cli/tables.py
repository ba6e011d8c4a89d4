"""Values as people read them, and tables of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Width of what is not printed to a terminal, where nothing needs to be folded.
_WIDE = 400
_METRICS = 3


def console() -> Console:
    """Give the console of standard output as it is now."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, soft_wrap=True, width=width)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and their values, one a line; those without a value are left out."""
    for name, value in pairs:
        if value:
            console().print(f"{name + ':':<14}{clean(value)}", markup=False)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table without frames.

    Args:
        headings: Of the columns.
        rows: Their values.
        right: Columns of numbers.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(value)) for value in row))
    console().print(table, soft_wrap=False)


def clean(text: str) -> str:
    """Leave out what could steer the terminal: a run holds what its loop has put there."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


def age(at: float | None, now: float) -> str:
    """Give how long ago something was; empty if it was not."""
    if at is None:
        return ""
    seconds = max(0.0, now - at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def metrics_in_short(metrics: dict[str, Any], limit: int = _METRICS) -> str:
    """Give the first metrics that are numbers or short words."""
    shown = []
    for name, value in metrics.items():
        if isinstance(value, float):
            shown.append(f"{name}={value:.4g}")
        elif isinstance(value, int | str) and len(str(value)) <= 20:
            shown.append(f"{name}={value}")
    return " ".join(shown[:limit]) + (" …" if len(shown) > limit else "")
