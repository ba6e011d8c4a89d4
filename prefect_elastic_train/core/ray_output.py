"""Ray's own output, told apart from that of the user's code, and kept for the run directory when something fails.

What happens is told by events, a line each. Of what Ray prints about the same, the log has nothing above DEBUG.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from prefect_elastic_train.core.rank_errors import ranks_in_words

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
#: What Ray's core and its Python parts, and the collectives of torch, begin a line with; and stacks of native code.
_RAYS_FORM = re.compile(
    r"\s*\[\d{4}-\d\d-\d\d [\d:,.]+ [A-Z] \d+ \d+\] |\(pid=(?:gcs_server|raylet)\) "
    r"|\d{4}-\d\d-\d\d [\d:,]+\s+[A-Z]+ \w+\.py:\d+ -- "
    r"|(?:\[rank\d+\]:)?\[[A-Z]\d{4} [\d:.]+ (?:\d+ )?\w*(?:socket|TCPStore|ProcessGroup|NCCL|[Gg]loo)\w*\.[ch]pp\b"
    r"|[A-Z]\d{4} [\d:.]+\s+\d+ \w*(?:coordination|[Gg]loo|grpc)\w*\.(?:cc|h):\d+\] "
    r"|\[(?:failure_signal_handler|symbolize)\w*\.cc ?: ?\d+\] "
    r"|\*\*\* (?:SIG[A-Z]+ received at|StackTrace Information)"
    r"|PC: @ +0x|    @ +0x|[^\s(]{1,200}\([^\s)]{0,200}\+0x[0-9a-f]+\) \[0x[0-9a-f]+\]"
    r"|Actor with class name: 'PreemptionWatcher' and ID: |Running entrypoint for job |-- Runtime env is setting up"
)
#: What a node says of itself that a person can act on.
_OF_USE = re.compile(r"low on memory|memory pressure|is over 9\d(?:\.\d+)?% full|Out of disk", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LINE, _MAX_LINES = 2000, 2000


def without_marks(text: str) -> str:
    """Return text without the terminal's colour codes and our tags."""
    return _COLOURS.sub("", text).replace(DETAIL_TAG, "", 1).replace(_TOLD_TAG, "", 1)


def is_detail(text: str) -> bool:
    """Return whether a line of output is Ray's own rather than the user's or ours."""
    text = _COLOURS.sub("", text)
    match = WORKER_LINE.match(text)
    said = text[match.end() :] if match else text
    if match is not None and _OF_RAY.fullmatch(match["actor"]):
        return not (said.startswith(_TOLD_TAG) or _OF_USE.search(said))
    return said.startswith(DETAIL_TAG) or bool(_RAYS_FORM.match(said))


def silence_ray_train() -> None:
    """Let Ray Train write to its files alone in this worker: it says each report, and what the loop raised."""
    logger = logging.getLogger("ray.train")
    for handler in [handler for handler in logger.handlers if hasattr(handler, "plain_handler")]:
        logger.removeHandler(handler)  # the root logger, which has the same one, keeps it for the loop


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
        """Take lines that the driver wrote at once and hand them on, marked where a record of Ray's own goes on."""
        of_ray = is_detail(lines.partition("\n")[0])
        tagged = [DETAIL_TAG + line if of_ray and not is_detail(line) else line for line in lines.splitlines(True)]
        self.keep("".join(filter(is_detail, tagged)))
        write("".join(tagged))

    def keep(self, text: str) -> None:
        """Keep text, and give up the oldest for it."""
        now = time.strftime("%H:%M:%S", time.gmtime())
        with self._lock:
            self._lines.extend(f"{now} {without_marks(line)[:_MAX_LINE]}\n" for line in text.splitlines())

    def keep_errors(self, errors: Mapping[str, str], also: Mapping[str, list[int]]) -> None:
        """Keep all that failed ranks say."""
        for rank, error in errors.items():
            self.keep(f"[{ranks_in_words([int(rank), *also.get(rank, [])])}] {error}")

    def content(self) -> bytes:
        """Return what is kept."""
        with self._lock:
            return "".join(self._lines).encode(errors="replace")
