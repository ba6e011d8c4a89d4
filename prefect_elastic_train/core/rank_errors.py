"""What failed ranks say: each error once, with its ranks, and in as few words as tell the cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby

from prefect_elastic_train.core.bounds import cut

#: A line that names an exception, possibly behind its module.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Killed|Fault|Failure|Timeout)\b|Fatal Python error"
)
#: How Ray's core begins an error of its own.
_OF_CORE = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,.]+ [EFC] \d+ \d+\] (?:\(\S+\) )?\S+ +")
#: How Ray says that a process is gone, rather than that its code failed.
_DEATH = re.compile(
    r"actor (?:is dead|died)|worker (?:is )?died|node \S+ (?:is dead|died)|Worker unexpectedly exits", re.I
)
#: What the survivors' collectives say when a rank is gone.
_CONSEQUENCE = re.compile(
    r"gloo|NCCL|ProcessGroup|DistBackendError|(?:closed|reset) by peer|connection (?:closed|reset)|coordination serv",
    re.I,
)
#: What Ray Train says of a worker that does not answer begins with this, whatever else it holds.
_NO_ANSWER = "WorkerHealthCheck"
_LOST_CONNECTION = "Worker unexpectedly exits with a connection error"
#: Where Ray says why a process is gone, the most telling first.
_REASONS = [
    re.compile(r"^(?:Worker exit detail: )?(.*low on memory.*)$", re.M),
    re.compile(r"Worker exit detail: (.+)"),
    re.compile(r"(The actor (?:died|is dead) because .+)"),
]
_FRAME = re.compile(r'\s+File "')
#: Process ids, addresses and the like differ where the error is the same.
_VARIABLE = re.compile(r"[0-9a-f]{8,}|\d+")
_MAX_CAUSES = 3
_MAX_CAUSE = 240
#: Bytes of an error, which is a log record, and of all errors of a failure, which are an event.
_MAX_ERROR = 100_000
_MAX_ERRORS = 200_000
_TINY = 200


def distinct(errors: Mapping[int, str]) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return the lowest rank of each different error with it, in a bounded size; and for such a rank the others."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks.setdefault(_VARIABLE.sub("#", text), []).append(rank)
    texts, room = dict[str, str](), _MAX_ERRORS
    for first, *_ in ranks.values():
        texts[str(first)] = cut(errors[first], min(_MAX_ERROR, room))
        room = max(_TINY, room - len(texts[str(first)].encode()))
    return texts, {str(first): others for first, *others in ranks.values() if others}


def _leading(errors: Mapping[str, str]) -> list[tuple[int, str, bool]]:
    """Return rank, cause, and whether it is a death, of what the others follow from: what is no broken collective."""
    found = sorted((int(rank), *_cause(text)) for rank, text in errors.items())
    return [error for error in found if error[2] or not _CONSEQUENCE.search(error[1])] or found


def causes(
    errors: Mapping[str, str],
    also: Mapping[str, Sequence[int]],
    named: Callable[[Sequence[int]], str] = lambda ranks: ranks_in_words(ranks),
) -> list[str]:
    """Return the causes of a failure in short, from what :func:`distinct` returned, with ranks as `named` has them.

    What the survivors' collectives report follows from them.
    """
    words = [f"{named([rank, *also.get(str(rank), [])])}: {said}" for rank, said, _ in _leading(errors)]
    left = len(words) - _MAX_CAUSES
    return words[:_MAX_CAUSES] + ([f"and {left} other errors"] if left > 0 else [])


def own_errors(errors: Mapping[str, str]) -> dict[str, str]:
    """Return those errors in full that the loop itself raised, by rank; what the others met is none."""
    return {str(rank): errors[str(rank)] for rank, _, is_death in _leading(errors) if not is_death}


def last_cause(lines: Sequence[str]) -> str:
    """Return in short which error a process has written last; empty if it has written none."""
    for line in reversed(lines):
        core = _OF_CORE.match(line)
        if core or _EXCEPTION.match(line):
            return line[core.end() if core else 0 :].split(". ")[0][:_MAX_CAUSE]
    return ""


def cause(text: str) -> str:
    """Return the line of an error or a traceback that tells its cause."""
    return _cause(text)[0]


def all_ranks(errors: Mapping[str, str], also: Mapping[str, Sequence[int]]) -> list[int]:
    """Return all ranks that failed."""
    return sorted({int(rank) for rank in errors} | {rank for ranks in also.values() for rank in ranks})


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks in short, such as ``ranks 0-3, 7``."""
    runs = groupby(enumerate(sorted(ranks)), lambda place: place[1] - place[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    words = ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans[:10])
    more = f" and {len(spans) - 10} more" if len(spans) > 10 else ""
    return f"{'rank' if words.isdecimal() else 'ranks'} {words}{more}"


def _cause(text: str) -> tuple[str, bool]:
    """Return the line that tells the cause, and whether it is the death of a process."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    is_silent, found = text.startswith(_NO_ANSWER), lines[0]
    is_raised = "Traceback (most recent call last)" in text and not is_silent
    is_death = not is_raised and (is_silent or bool(_DEATH.search(text)))
    if is_raised:
        after = max((place for place, line in enumerate(lines) if _FRAME.match(line)), default=0) + 1
        found = next((line for line in lines[after:] if not line[0].isspace()), lines[-1])
    elif _LOST_CONNECTION in text and is_death:
        found = "its process was killed or has crashed"
    elif is_death:
        reasons = (match[1] for pattern in _REASONS if (match := pattern.search(text)))
        found = next(chain(reasons, filter(_DEATH.search, lines)), lines[0])
    return found.strip()[:_MAX_CAUSE], is_death
