"""Causes of failures: the errors of ranks and processes, deduplicated and shortened for people.

Belongs to all processes: the controller deduplicates, the driver and the flow process shorten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, dropwhile, groupby
from typing import NamedTuple

from prefect_elastic_train.core.size_limits import truncate

#: A line that names an exception, possibly behind its module, or an error of Ray's core.
_ERROR_LINE = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Killed|Fault|Failure|Timeout)\b|Fatal Python error"
    r"|\[\d{4}-\d\d-\d\d [\d:,.]+ [EFC] \d+ \d+\] "
)
#: Ray's texts for a process that died, as opposed to code that raised.
_DEATH = re.compile(
    r"actor (?:is dead|died)|worker (?:is )?died|node \S+ (?:is dead|died)|Worker unexpectedly exits", re.I
)
#: Errors of collectives on the surviving ranks when a rank is lost. Python's ConnectionError is not one of them.
_CONSEQUENCE = re.compile(
    # Errors of a store or the network always count. The others are recognized by their text; NCCL's has several lines.
    r"Dist(?:Network|Store)Error:|(?:Runtime|DistBackend)Error: (?=[^\n]*(?:gloo|unbound_buffer|nccl|c10d|tcpstore"
    r"|processgroup|coordination serv|heartbeat|watchdog|collective|barrier))[\s\S]{0,500}?"
    r"(?:(?:closed|reset) by (?:remote )?peer|connection (?:closed|reset)|broken pipe|remote (?:peer|process)"
    r"|coordination serv|heartbeat|watchdog|nccl(?:Remote|System)Error|unhandled system error"
    r"|communicator was aborted|time[d ]*-?out)",
    re.I,
)
#: Begins Ray Train's message about a worker that does not answer.
_NO_ANSWER = "WorkerHealthCheck"
_LOST_CONNECTION = "Worker unexpectedly exits with a connection error"
#: Ray's reasons for the death of a process, the most specific first.
_REASONS = [
    re.compile(r"^(?:Worker exit detail: )?(.*low on memory.*)$", re.M),
    re.compile(r"Worker exit detail: (.+)"),
    re.compile(r"(The actor (?:died|is dead) because .+)"),
]
_FRAME = re.compile(r'\s+File "')
#: Lines of an exception group's traceback that are messages of the group or of the exceptions in it.
_GROUP_MESSAGE = re.compile(r"^ +\| (?!.*Traceback \(|The above |During )(\S.*)", re.M)
#: Process ids, addresses and the like, which differ between ranks with the same error.
_VARIABLE = re.compile(r"[0-9a-f]{8,}|\d+")
_MAX_CAUSES = 3
_MAX_CAUSE = 240
#: Bytes of one error, which becomes a log record, and of all errors of a failure, which become one event.
_MAX_ERROR = 100_000
_MAX_ERRORS = 200_000


class DistinctErrors(NamedTuple):
    """Errors of a worker group, each different error once.

    ``errors`` maps the lowest rank with an error to the error's text; ``also`` maps that rank to the other ranks with
    it.
    """

    errors: dict[str, str]
    also: dict[str, list[int]]


class _Cause(NamedTuple):
    rank: int
    message: str
    is_death: bool


def distinct_errors(errors: Mapping[int, str]) -> DistinctErrors:
    """Return each different error of a worker group's ranks once, in a bounded size.

    Errors that differ only in numbers, such as process ids, count as the same.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        groups.setdefault(_VARIABLE.sub("#", text), []).append(rank)
    limit = min(_MAX_ERROR, _MAX_ERRORS // max(1, len(groups)))
    return DistinctErrors(
        {str(first): truncate(errors[first], limit) for first, *_ in groups.values()},
        {str(first): others for first, *others in groups.values() if others},
    )


def causes(
    errors: Mapping[str, str], also: Mapping[str, Sequence[int]], locations: Mapping[int, str] | None = None
) -> list[str]:
    """Return the causes of a worker group's failure as short lines, such as ``ranks 0-3: <message>``, at most three.

    If there are more causes, one more line has their number.

    Args:
        errors: Text of each different error, by the lowest rank that has it, as in :class:`DistinctErrors`.
        also: The other ranks with the same error, by that lowest rank.
        locations: Process and node of ranks, shown for a cause that has a single rank.
    """
    lines = []
    for cause in _leading(errors):
        ranks = [cause.rank, *also.get(str(cause.rank), [])]
        location = (locations or {}).get(cause.rank) if len(ranks) == 1 else None
        lines.append(f"{format_ranks(ranks)}{f' ({location})' if location else ''}: {cause.message}")
    more = len(lines) - _MAX_CAUSES
    return lines[:_MAX_CAUSES] + ([f"and {more} other errors"] if more > 0 else [])


def loop_errors(errors: Mapping[str, str]) -> dict[str, str]:
    """Return the full text of each error that the train loop raised, by rank.

    Left out are deaths of processes, and errors of collectives that only follow from an error on another rank.
    """
    return {str(cause.rank): errors[str(cause.rank)] for cause in _leading(errors) if not cause.is_death}


def is_consequence(text: str) -> bool:
    """Return True for the text of a collective's error (NCCL, Gloo, …) that follows from a lost rank or connection."""
    return _CONSEQUENCE.search(text) is not None


def format_ranks(ranks: Iterable[int]) -> str:
    """Return numbers of ranks as text with spans, such as ``ranks 0-3, 7``."""
    consecutive = groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    spans = [[rank for _, rank in items] for _, items in consecutive]
    text = ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans[:10])
    more = f" and {len(spans) - 10} more" if len(spans) > 10 else ""
    return f"{'rank' if text.isdecimal() else 'ranks'} {text}{more}"


def last_error_line(lines: Sequence[str]) -> str:
    """Return the last line of a process's output that names an error, in short; empty if no line does."""
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return line.split(". ")[0][:_MAX_CAUSE]
    return ""


def short_message(text: str) -> str:
    """Return the message of an error in one short line: that of the exception, or Ray's reason why a process died.

    ``text`` is an error message or a traceback.
    """
    return _find_cause(0, text).message


def _leading(errors: Mapping[str, str]) -> list[_Cause]:
    """Return the causes of a worker group's failure, by rank: all errors except those of collectives.

    An error of a collective follows from the error of another rank. If there are no other errors, return all.
    """
    every = sorted(_find_cause(int(rank), text) for rank, text in errors.items())
    return [cause for cause in every if cause.is_death or not is_consequence(cause.message)] or every


def _find_cause(rank: int, text: str) -> _Cause:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    is_silent = text.startswith(_NO_ANSWER)
    is_raised = "Traceback (most recent call last)" in text and not is_silent
    is_death = not is_raised and (is_silent or bool(_DEATH.search(text)))
    message = lines[0]
    if is_raised:
        end = max((number for number, line in enumerate(lines) if _FRAME.match(line)), default=0) + 1
        message = " ".join(dropwhile(lambda line: line[0].isspace(), lines[end:]))
        message = message or "; ".join(_GROUP_MESSAGE.findall(text)) or lines[-1]
    elif is_death and _LOST_CONNECTION in text:
        message = "its process was killed or has crashed"
    elif is_death:
        reasons = (match[1] for pattern in _REASONS if (match := pattern.search(text)))
        message = next(chain(reasons, filter(_DEATH.search, lines)), message)
    return _Cause(rank, " ".join(message.split())[:_MAX_CAUSE], is_death)
