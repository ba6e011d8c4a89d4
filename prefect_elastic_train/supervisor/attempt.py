"""An attempt as its supervisor sees it: what is heard of its driver, and following it to its end.

A driver is a child process of the flow's, here, or a :mod:`job <prefect_elastic_train.supervisor.job>`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import cut, whole_lines
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import WORKER_LINE, last_cause, without_marks
from prefect_elastic_train.core.request import STOP_FILE, DriverSpec, write_spec

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.runtime import LocalCluster, Runtime

#: How often a follower looks after everything but the driver's output.
TURN_SECONDS = 0.2
NO_LAST_WORD = "the driver ended well, but its last word was lost: the next one finds the result"
_LAST_WORDS = 30
_LAST_WORD_BYTES = 1000
#: How long a driver may take from its last word to its end, and the rest of a dead driver's output to come.
_LEAVE_SECONDS = 15.0
_PIPE_SECONDS = 2.0
_PIECE_BYTES = 64 * 1024
_OUTPUT_QUEUE = 10_000


class Driver(ABC):
    """A driver, wherever it runs, who follows it, and what is known of its attempt from its output so far."""

    def __init__(self, follower: Runtime) -> None:
        self.follower = follower
        #: Its number in the run directory, 0 until it is begun.
        self._attempt = 0
        self._ended: ev.AttemptEnded | None = None
        self._ended_at = float("inf")
        #: From when the time without a sign of life counts, and what was done then.
        self._alive_at = self._looked_at = time.monotonic()
        self._doing = "starting"
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        #: What comes now was told by an earlier process of the flow run.
        self._is_past = False

    @abstractmethod
    def start(self) -> None:
        """Have it run, and be ready for its output."""

    @abstractmethod
    def lines(self) -> Iterator[tuple[str, bytes]]:
        """What it has written since the last time, with where it came from; a little while is waited for it."""

    @abstractmethod
    def look(self) -> ev.AttemptEnded | None:
        """How the attempt ended, once the driver has gone and its output was taken, or it has to be given up."""

    @abstractmethod
    def leave(self, reason: BaseException) -> None:
        """Prepare for the end of the following, by what was raised, before the driver has gone."""

    def close(self) -> None:  # noqa: B027 - a driver that runs elsewhere holds nothing here
        """Follow it no longer."""

    def take(self, source: str, line: bytes) -> None:
        """Take a line in, and tell the event that it is, or its text."""
        text = line.decode(errors="replace").rstrip("\n")
        event = ev.decode_event(text[len(ev.EVENT_TAG) :]) if text.startswith(ev.EVENT_TAG) else None
        if event is None:
            words = without_marks(text)
            if words and not WORKER_LINE.match(words):
                self._last_words.append(cut(words, _LAST_WORD_BYTES))
            if words and not self._is_past:
                self.follower.on_line(source, text)
            return
        if isinstance(event, ev.AttemptStarted):
            self._attempt = event.attempt
            self._alive_at = time.monotonic()
        elif isinstance(event, ev.ControllerAlive):
            self._doing = event.doing
            self._alive_at = time.monotonic()
        elif isinstance(event, ev.AttemptEnded):
            self._ended = event
            self._ended_at = time.monotonic()
        self.tell(event)

    def tell(self, event: ev.Event) -> None:
        """Hand an event on."""
        (self.follower.on_past_event if self._is_past else self.follower.on_event)(event)

    def hung(self) -> ev.AttemptEnded | None:
        """The end of an attempt that gave no sign of life for too long, else None."""
        limit = self.follower.settings.liveness_timeout_seconds
        now = time.monotonic()
        if now - self._looked_at > limit / 2:  # this process was suspended: heartbeats are still unread
            self._alive_at = now
        self._looked_at = now
        if now - self._alive_at <= limit:
            return None
        return self.lost(
            f"the driver and Ray Train's controller gave no sign of life for {limit:g} s, last {self._doing}"
        )

    def lost(self, message: str, outcome: Outcome = Outcome.DRIVER_LOST) -> ev.AttemptEnded:
        """The end of an attempt that did not say how it ended."""
        return ev.AttemptEnded(attempt=self._attempt, outcome=outcome, message=message)

    def last_error(self) -> str:
        """Return the error that the driver itself wrote last, as the end of a message; empty if it wrote none."""
        cause = last_cause(self._last_words)
        return f": {cause}" if cause else ""


def in_one_go(act: Callable[[], object]) -> None:
    """Do what is not to be cut short by a runner's signal, which comes at any time; it is raised afterwards."""
    try:
        act()
    except BaseException as reason:
        if not isinstance(reason, Exception | KeyboardInterrupt):
            act()
        raise


def read_lines(stream: IO[bytes], source: str, into: queue.Queue[Any]) -> None:
    """Read a child's stream in a thread, line by line, and put ``(source, line)`` into a queue; None at its end."""

    def run() -> None:
        with stream:
            for line in whole_lines(iter(partial(os.read, stream.fileno(), _PIECE_BYTES), b"")):
                into.put((source, line))
        into.put((source, None))

    threading.Thread(target=run, name=f"elastic-train-{source}", daemon=True).start()


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    output: int | IO[bytes],
    **more: Any,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; standard output and standard error are both ``output`` unless told.

    ``more`` are further arguments of :class:`subprocess.Popen`.
    """
    more = {"stdin": stdin, "stdout": output, "stderr": output, **more}
    return subprocess.Popen(command, env=environment, start_new_session=True, **more)


class ChildDriver(Driver):
    """A driver in a process of its own, which is told its spec in the private folder of the training.

    The cluster is the local one that it may want, else None. Without a ``spare`` to tell the spec, one is started.
    """

    def __init__(
        self,
        follower: Runtime,
        environment: Mapping[str, str],
        spec: DriverSpec,
        folder: Path,
        cluster: LocalCluster | None,
        spare: subprocess.Popen[bytes] | None,
    ) -> None:
        super().__init__(follower)
        self._cluster = cluster
        self._gone_at = float("inf")
        self._is_told = False
        self._spec_file = folder / "spec"
        self._stop_file = folder / STOP_FILE
        self._stop_file.unlink(missing_ok=True)
        write_spec(spec, self._spec_file)
        told = [*follower.driver_command, str(self._spec_file)]
        self._process = spare or start_process(told, environment, subprocess.DEVNULL, subprocess.PIPE)
        if spare is not None and spare.stdin is not None:
            with suppress(OSError), spare.stdin as stream:  # one that has died this moment is a lost driver
                stream.write(f"{self._spec_file}\n".encode())
        self._output: queue.Queue[tuple[str, bytes | None]] = queue.Queue(maxsize=_OUTPUT_QUEUE)
        self._open_streams = 2

    def start(self) -> None:
        for stream, source in ((self._process.stdout, "driver"), (self._process.stderr, "stderr")):
            assert stream is not None
            read_lines(stream, source, self._output)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        until = time.monotonic() + TURN_SECONDS
        while self._open_streams and (left := until - time.monotonic()) > 0:
            try:
                source, line = self._output.get(timeout=left)
            except queue.Empty:
                return
            if line is None:
                self._open_streams -= 1
            else:
                yield source, line

    def look(self) -> ev.AttemptEnded | None:
        """How the attempt ended: the driver has gone, hangs, or has lost its cluster."""
        now = time.monotonic()
        if self._process.poll() is not None:
            self._gone_at = min(self._gone_at, now)
        # A process that a dead driver has left behind may still hold its output.
        if not self._open_streams or (now - self._gone_at > _PIPE_SECONDS and self._output.empty()):
            return self._outcome()
        if self._ended is not None:
            return self._ended if now - self._ended_at > _LEAVE_SECONDS else None
        return self._cluster_lost() or self.hung()

    def leave(self, reason: BaseException) -> None:
        """Have the driver know that its end is meant."""
        outcome = Outcome.TIMED_OUT if isinstance(reason, TimeoutError) else Outcome.CANCELLED
        self._stop_file.write_text(outcome.value)

    def close(self) -> None:
        """End it: SIGINT, and SIGKILL after a grace."""
        if self._process.poll() is None:
            in_one_go(self._end)
        self._spec_file.unlink(missing_ok=True)

    def tell(self, event: ev.Event) -> None:
        """Hand an event on, and start the local cluster once it is wanted."""
        super().tell(event)
        if isinstance(event, ev.ClusterWanted) and self._cluster is not None:
            self._cluster.start()
        elif isinstance(event, ev.WorkerGroupStarted):
            self.follower.want_spare()

    def _outcome(self) -> ev.AttemptEnded:
        code = self._wait(_LEAVE_SECONDS)
        if self._ended is not None or code == 0:
            return self._ended or self.lost(NO_LAST_WORD)
        names = {-one: f" ({one.name})" for one in signal.Signals}  # a real-time signal has none
        how = f"signal {-code}{names.get(code, '')}" if code < 0 else f"exit code {code}"
        said = self.last_error() if code != -signal.SIGKILL else ""
        return self._cluster_lost() or self.lost(
            f"the driver process (pid {self._process.pid}) was ended by {how}{said}"
        )

    def _cluster_lost(self) -> ev.AttemptEnded | None:
        if self._cluster is None or not self._cluster.is_dead():
            return None
        words = self._cluster.last_words(self.follower.on_line)
        return self.lost(f"the local Ray cluster has died: {words}", Outcome.CLUSTER_LOST)

    def _end(self) -> None:
        if not self._is_told:
            self._is_told = True  # before, since the driver's answer may raise here
            os.kill(self._process.pid, signal.SIGINT)
        self._wait(self.follower.settings.stop_grace_seconds)

    def _wait(self, seconds: float) -> int:
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in a driver of the kernel, and ends by itself or never
                return self._process.wait(timeout=10)
            return -signal.SIGKILL
