"""Output of a training's processes: lines that Ray prints are separated from those of the user's code and of ours.

Belongs to all processes. Events report what happens, one line each; what Ray prints about it is logged at DEBUG.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable

#: Begins a line of Ray that has no mark of its own, and a line of ours in the output of a Ray actor.
DETAIL_TAG = "@elastic-train-detail "
_OWN_TAG = "@elastic-train-own "
#: Ray's prefix of a line from another process: actor, process id and, for another node, its address.
WORKER_LINE = re.compile(
    r"^\((?:pid=)?(?P<actor>raylet|gcs_server|\w+(?= pid=))(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\d.]+))?\) ?"
)
#: Processes that run no user code.
_RAY_PROCESS = re.compile(
    r"ActorLocationTracker|AutoscalingRequester|DatasetManager|PlacementGroupCleaner|PreemptionWatcher|SplitCoordinator"
    r"|SynchronizationActor|TrainController|TrainStateActor|_AutoscalingCoordinatorActor|_StatsActor|gcs_server|raylet"
)
#: Beginnings of lines that Ray and the collectives print in processes with user code.
_RAY_LINE = re.compile(
    # Lines with a source: Ray's C++ and Python logs, and C++ logs of the collectives by file name and line.
    r"\s*\[\d{4}-\d\d-\d\d [\d:,.]+ [A-Z] \d+ \d+\] |\d{4}-\d\d-\d\d [\d:,]+\s+[A-Z]+ \w+\.py:\d+ -- "
    r"|(?:\[rank\d+\]:)?\[?[A-Z]\d{4} [\d:.]+\s+(?:\d+ )?"
    r"\w*(?:socket|TCPStore|ProcessGroup|NCCL|[Gg]loo|coordination|grpc)\w*\.(?:cc|[ch]pp|h):\d+\] |\[Gloo\] "
    # Lines without one, which only their text shows: Ray's and JAX's start-up, and stacks of C++ code.
    r"|Actor with class name: 'PreemptionWatcher' and ID: |Running entrypoint for job |-- Runtime env is setting up"
    r"|(?:Starting|Connecting to) JAX distributed service on |(?:PC:|   ) @ +0x|\*\*\* SIG[A-Z]+ received at "
)
#: Lines of Ray that the user can act on: a node is short of memory or disk.
_ACTIONABLE = re.compile(r"low on memory|memory pressure|is over 9\d(?:\.\d+)?% full|Out of disk", re.I)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LINE = 2000
_MAX_LINES = 2000


def without_marks(text: str) -> str:
    """Return lines of output without the terminal's color codes and without the tags of this package."""
    return _COLORS.sub("", text).replace(DETAIL_TAG, "").replace(_OWN_TAG, "")


def is_detail(text: str) -> bool:
    """Return True for a line of output that Ray printed, False for a line of the user's code or of this package.

    A line of Ray's own processes about too little memory or disk is False, too: the user can act on it.
    """
    text = _COLORS.sub("", text)
    match = WORKER_LINE.match(text)
    content = text[match.end() :] if match else text
    if match and _RAY_PROCESS.fullmatch(match["actor"]):
        return not (content.startswith(_OWN_TAG) or _ACTIONABLE.search(content))
    return content.startswith(DETAIL_TAG) or bool(_RAY_LINE.match(content))


def tag_own_records() -> None:
    """Tag the first line of each log record of this package in this Ray actor, so that it does not count as Ray's.

    The stack of an error stays untagged and counts as Ray's output.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{_OWN_TAG}%(message)s"))
    logging.getLogger("prefect_elastic_train").handlers = [handler]


class Details:
    """The newest lines of output that Ray printed in an attempt, in a bounded size. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)

    def write(self, write: Callable[[str], object], lines: str) -> None:
        """Pass the text of one write of the driver to the function ``write``. If Ray wrote it, tag and keep it."""
        if is_detail(lines):
            self.add(lines)
            lines = "".join(DETAIL_TAG + line for line in lines.splitlines(True))
        write(lines)

    def add(self, text: str) -> None:
        """Keep the lines of ``text``, each with the time. Beyond the limit, the oldest lines are dropped."""
        now = time.strftime("%H:%M:%S", time.gmtime())
        with self._lock:
            self._lines.extend(f"{now} {without_marks(line)[:_MAX_LINE]}\n" for line in text.splitlines())

    def content(self) -> bytes:
        """Return all lines of output that are kept, as the content of a file."""
        with self._lock:
            return "".join(self._lines).encode(errors="replace")
