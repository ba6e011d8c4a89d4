"""Causes of failures: the errors of ranks and processes, shortened for people.

Belongs to all processes: the controller makes the causes, and the driver and the flow process format them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile, groupby

#: A line that names an exception, possibly behind its module, or an error of Ray's core.
_ERROR_LINE = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Killed|Fault|Failure|Timeout)\b|Fatal Python error"
    r"|\[\d{4}-\d\d-\d\d [\d:,.]+ [EFC] \d+ \d+\] "
)
_LOST_CONNECTION = "Worker unexpectedly exits with a connection error"
#: Ray's reasons for the death of a process, the most specific first.
_REASONS = (
    re.compile(r"^(?:Worker exit detail: )?(.*low on memory.*)$", re.M),
    re.compile(r"Worker exit detail: (.+)"),
    re.compile(r"(The actor (?:died|is dead) because .+)"),
    re.compile(r"^(.*(?:actor (?:is dead|died)|worker (?:is )?died|node \S+ (?:is dead|died)).*)$", re.I | re.M),
)
_MAX_CAUSES = 3
#: Maximum number of characters of an error's message.
MAX_CAUSE = 240


@dataclass(frozen=True)
class Cause:
    """An error of a worker group.

    Attributes:
        ranks: The ranks that have it. Empty: unknown.
        message: The error in one short line.
        is_death: True if the processes or nodes of the ranks died, False if their train loops failed.
        is_consequence: True for the error of a collective, which follows from the error of another rank.
        traceback: The whole text of the error, with the traceback if it has one.
    """

    ranks: list[int]
    message: str
    is_death: bool = False
    is_consequence: bool = False
    traceback: str = ""


def leading_causes(causes: Sequence[Cause]) -> Sequence[Cause]:
    """Return the causes of a failure that are not consequences of others; all causes if each is a consequence."""
    return [cause for cause in causes if not cause.is_consequence] or causes


def describe_causes(causes: Sequence[Cause], locations: Mapping[int, str] | None = None) -> list[str]:
    """Return the leading causes as short lines, such as ``ranks 0-3: <message>``, at most three.

    If there are more causes, one more line has their number.

    Args:
        causes: The causes of a worker group's failure.
        locations: Process and node of ranks, shown for a cause that has a single rank.
    """
    lines = []
    for cause in leading_causes(causes):
        location = (locations or {}).get(cause.ranks[0]) if len(cause.ranks) == 1 else None
        lines.append(f"{format_ranks(cause.ranks)}{f' ({location})' if location else ''}: {cause.message}")
    more = len(lines) - _MAX_CAUSES
    return lines[:_MAX_CAUSES] + ([f"and {more} other errors"] if more > 0 else [])


def format_ranks(ranks: Iterable[int]) -> str:
    """Return numbers of ranks as text with spans, such as ``ranks 0-3, 7``."""
    consecutive = groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    spans = [[rank for _, rank in items] for _, items in consecutive]
    text = ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans[:10])
    more = f" and {len(spans) - 10} more" if len(spans) > 10 else ""
    return f"{'rank' if text.isdecimal() else 'ranks'} {text}{more}" if text else "the worker group"


def last_error_line(lines: Sequence[str]) -> str:
    """Return the last line of a process's output that names an error, in short; empty if no line does."""
    return next(filter(_ERROR_LINE.match, reversed(lines)), "").split(". ")[0][:MAX_CAUSE]


def short_message(text: str) -> str:
    """Return an error message of Ray in one short line.

    It is the message of the exception if there is a traceback, as of a failed task or constructor; else the reason why
    a process died; else the first line.
    """
    if _LOST_CONNECTION in text:
        return "its process was killed or has crashed"
    _, has_traceback, rest = text.rpartition('\n  File "')
    if has_traceback:
        text = " ".join(dropwhile(lambda line: line[:1] in " ", rest.splitlines()[1:])) or text
    reasons = (match[1] for pattern in _REASONS if (match := pattern.search(text)))
    message = next(chain(reasons, filter(str.strip, text.splitlines())), "no reason given")
    return " ".join(message.split())[:MAX_CAUSE]
