"""What Ray and failed ranks say: Ray's own output told apart from that of the user's code, and errors in short.

What happens is told by events, a line each. Of what Ray prints about the same, the log has nothing above DEBUG.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, dropwhile, groupby

from prefect_elastic_train.core.bounds import cut

#: Begins a line of Ray's own that nothing else marks as such, and a line of ours in the output of an actor of Ray's.
DETAIL_TAG = "@elastic-train-detail "
_TOLD_TAG = "@elastic-train-told "
#: Ray's prefix of a line from another process: actor, process id and, for another node, its address.
WORKER_LINE = re.compile(
    r"^\((?P<actor>raylet|gcs_server|\w+(?= pid=))(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\d.]+))?\) ?"
)
#: Processes in which nothing of the user's prints, at least nothing that is not told otherwise.
_OF_RAY = re.compile(
    r"ActorLocationTracker|AutoscalingRequester|DatasetManager|PlacementGroupCleaner|PreemptionWatcher|SplitCoordinator"
    r"|SynchronizationActor|TrainController|TrainStateActor|_AutoscalingCoordinatorActor|_StatsActor|gcs_server|raylet"
)
#: What Ray's core and its Python parts, the collectives of torch and JAX, and the stacks of both begin a line with.
_RAYS_FORM = re.compile(
    r"\s*\[\d{4}-\d\d-\d\d [\d:,.]+ [A-Z] \d+ \d+\] |\d{4}-\d\d-\d\d [\d:,]+\s+[A-Z]+ \w+\.py:\d+ -- "
    r"|\(pid=(?:gcs_server|raylet)\) |Actor with class name: 'PreemptionWatcher' and ID: "
    r"|Running entrypoint for job |-- Runtime env is setting up"
    r"|(?:\[rank\d+\]:)?\[?[A-Z]\d{4} [\d:.]+\s+(?:\d+ )?"
    r"\w*(?:socket|TCPStore|ProcessGroup|NCCL|[Gg]loo|coordination|grpc)\w*\.(?:cc|[ch]pp|h):\d+\] "
    r"|\[Gloo\] Rank \d+ is connected to |(?:Starting|Connecting to) JAX distributed service on "
    r"|(?:PC:|   ) @ +0x|\*\*\* SIG[A-Z]+ received at "
)
#: Lines of Ray that the user can act on: a node is short of memory or disk.
_OF_USE = re.compile(r"low on memory|memory pressure|is over 9\d(?:\.\d+)?% full|Out of disk", re.I)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LINE, _MAX_LINES = 2000, 2000

#: A line that names an exception, possibly behind its module, or an error of Ray's core.
_ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Killed|Fault|Failure|Timeout)\b|Fatal Python error"
    r"|\[\d{4}-\d\d-\d\d [\d:,.]+ [EFC] \d+ \d+\] "
)
#: How Ray says that a process is gone, rather than that its code failed.
_DEATH = re.compile(
    r"actor (?:is dead|died)|worker (?:is )?died|node \S+ (?:is dead|died)|Worker unexpectedly exits", re.I
)
#: Errors of collectives on the surviving ranks when a rank is lost. Python's ConnectionError is not one of them.
_CONSEQUENCE = re.compile(
    # An error of a store or the network is always that. The others are known by their text; NCCL's has several lines.
    r"Dist(?:Network|Store)Error:|(?:Runtime|DistBackend)Error: (?=[^\n]*(?:gloo|unbound_buffer|nccl|c10d|tcpstore"
    r"|processgroup|coordination serv|heartbeat|watchdog|collective|barrier))[\s\S]{0,500}?"
    r"(?:(?:closed|reset) by (?:remote )?peer|connection (?:closed|reset)|broken pipe|remote (?:peer|process)"
    r"|coordination serv|heartbeat|watchdog|nccl(?:Remote|System)Error|unhandled system error"
    r"|communicator was aborted|time[d ]*-?out)",
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
#: Lines of an exception group's traceback that are messages of the group or of the exceptions in it.
_OF_GROUP = re.compile(r"^ +\| (?!.*Traceback \(|The above |During )(\S.*)", re.M)
_VARIABLE = re.compile(r"[0-9a-f]{8,}|\d+")  # process ids, addresses and the like differ where the error is the same
_MAX_CAUSES = 3
_MAX_CAUSE = 240
#: Bytes of an error, which is a log record, and of all errors of a failure, which are an event.
_MAX_ERROR = 100_000
_MAX_ERRORS = 200_000


def without_marks(text: str) -> str:
    """Return text without the terminal's colour codes and our tags."""
    return _COLOURS.sub("", text).replace(DETAIL_TAG, "").replace(_TOLD_TAG, "")


def is_detail(text: str) -> bool:
    """Return whether a line of output is Ray's own rather than the user's or ours."""
    text = _COLOURS.sub("", text)
    match = WORKER_LINE.match(text)
    said = text[match.end() :] if match else text
    if match is not None and _OF_RAY.fullmatch(match["actor"]):
        return not (said.startswith(_TOLD_TAG) or _OF_USE.search(said))
    return said.startswith(DETAIL_TAG) or bool(_RAYS_FORM.match(said))


def silence_ray_train() -> None:
    """Let Ray Train log only warnings in this worker, to its files, and print the loop's log records with their level.

    By default it logs each report and the loop's exceptions, and prints log records without their level.
    """
    for handler in logging.root.handlers:
        if hasattr(handler, "plain_handler"):
            handler.plain_handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("ray.train")
    logger.setLevel(logging.WARNING)
    # The root logger, which has the same one for the console, keeps it for the loop.
    logger.handlers = [handler for handler in logger.handlers if not hasattr(handler, "plain_handler")]
    for name, other in list(logging.root.manager.loggerDict.items()):
        if "/ray/train/" in name and isinstance(other, logging.Logger):
            other.parent = logger  # named by its file rather than its module, it would be heard as the root's


def mark_told() -> None:
    """Mark what we log in this actor of Ray's, line by line: the stack of an error of ours is a detail, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{_TOLD_TAG}%(message)s"))
    logging.getLogger("prefect_elastic_train").handlers = [handler]


class Details:
    """The newest of what Ray says itself, in a bounded size; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)

    def take(self, write: Callable[[str], object], lines: str) -> None:
        """Take lines that the driver wrote at once and hand them on, marked if they are a record of Ray's own."""
        if is_detail(lines):
            self.keep(lines)
            lines = "".join(DETAIL_TAG + line for line in lines.splitlines(True))
        write(lines)

    def keep(self, text: str) -> None:
        """Keep text, and give up the oldest for it."""
        now = time.strftime("%H:%M:%S", time.gmtime())
        with self._lock:
            self._lines.extend(f"{now} {without_marks(line)[:_MAX_LINE]}\n" for line in text.splitlines())

    def content(self) -> bytes:
        """Return what is kept."""
        with self._lock:
            return "".join(self._lines).encode(errors="replace")


def distinct(errors: Mapping[int, str]) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return the lowest rank of each different error with it, in a bounded size; and for such a rank the others."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks.setdefault(_VARIABLE.sub("#", text), []).append(rank)
    most = min(_MAX_ERROR, _MAX_ERRORS // max(1, len(ranks)))
    return {str(first): cut(errors[first], most) for first, *_ in ranks.values()}, {
        str(first): others for first, *others in ranks.values() if others
    }


def _leading(errors: Mapping[str, str]) -> list[tuple[int, str, bool]]:
    """Return rank, cause, and whether it is a death, of what the others follow from: what is no broken collective."""
    found = sorted((int(rank), *_cause(text)) for rank, text in errors.items())
    return [error for error in found if error[2] or not is_consequence(error[1])] or found


def is_consequence(text: str) -> bool:
    """True for the error of a collective whose peer or connection was lost."""
    return _CONSEQUENCE.search(text) is not None


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks in short, such as ``ranks 0-3, 7``."""
    runs = groupby(enumerate(sorted(ranks)), lambda place: place[1] - place[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    words = ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans[:10])
    more = f" and {len(spans) - 10} more" if len(spans) > 10 else ""
    return f"{'rank' if words.isdecimal() else 'ranks'} {words}{more}"


def causes(
    errors: Mapping[str, str], also: Mapping[str, Sequence[int]], named: Callable[[Sequence[int]], str] = ranks_in_words
) -> list[str]:
    """Return the causes of a failure in short, from what :func:`distinct` returned, with ranks as `named` has them."""
    words = [f"{named([rank, *also.get(str(rank), [])])}: {said}" for rank, said, _ in _leading(errors)]
    left = len(words) - _MAX_CAUSES
    return words[:_MAX_CAUSES] + ([f"and {left} other errors"] if left > 0 else [])


def own_errors(errors: Mapping[str, str]) -> dict[str, str]:
    """Return those errors in full that the loop itself raised, by rank; what the others met is none."""
    return {str(rank): errors[str(rank)] for rank, _, is_death in _leading(errors) if not is_death}


def last_cause(lines: Sequence[str]) -> str:
    """Return in short which error a process has written last; empty if it has written none."""
    for line in reversed(lines):
        if _ERROR.match(line):
            return line.split(". ")[0][:_MAX_CAUSE]
    return ""


def cause(text: str) -> str:
    """Return the line of an error or a traceback that tells its cause."""
    return _cause(text)[0]


def _cause(text: str) -> tuple[str, bool]:
    """Return the line that tells the cause, and whether it is the death of a process."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    is_silent, found = text.startswith(_NO_ANSWER), lines[0]
    is_raised = "Traceback (most recent call last)" in text and not is_silent
    is_death = not is_raised and (is_silent or bool(_DEATH.search(text)))
    if is_raised:
        after = max((place for place, line in enumerate(lines) if _FRAME.match(line)), default=0) + 1
        message = " ".join(dropwhile(lambda line: line[0].isspace(), lines[after:]))
        found = message or "; ".join(_OF_GROUP.findall(text)) or lines[-1]
    elif _LOST_CONNECTION in text and is_death:
        found = "its process was killed or has crashed"
    elif is_death:
        reasons = (match[1] for pattern in _REASONS if (match := pattern.search(text)))
        found = next(chain(reasons, filter(_DEATH.search, lines)), lines[0])
    return " ".join(found.split())[:_MAX_CAUSE], is_death
