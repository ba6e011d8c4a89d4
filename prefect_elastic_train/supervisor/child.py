"""A driver as a child process of the flow's."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from prefect_elastic_train.core.bounds import whole_lines
from prefect_elastic_train.core.events import AttemptEnded, ClusterWanted, Event
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.spec import STOP_FILE, DriverSpec, write_spec
from prefect_elastic_train.supervisor.attempt import TURN_SECONDS, Driver, Follower
from prefect_elastic_train.supervisor.local_cluster import LocalCluster

#: How long a driver may take from its last word to its end, and the rest of a dead driver's output to come.
_LEAVE_SECONDS, _PIPE_SECONDS = 15.0, 2.0
_PIECE_BYTES = 64 * 1024
_OUTPUT_QUEUE = 10_000


def read_lines(stream: IO[bytes], source: str, into: queue.Queue[Any]) -> threading.Thread:
    """Read a child's stream in a thread, line by line, and put ``(source, line)`` into a queue; None at its end."""

    def run() -> None:
        with stream:
            for line in whole_lines(iter(partial(os.read, stream.fileno(), _PIECE_BYTES), b"")):
                into.put((source, line))
        into.put((source, None))

    thread = threading.Thread(target=run, name=f"elastic-train-{source}", daemon=True)
    thread.start()
    return thread


class ChildDriver(Driver):
    """A driver in a process of its own.

    Args:
        follower: Who follows it.
        command: What starts it; the path of its spec follows.
        environment: Its environment.
        spec: What it is told.
        folder: Private folder of the training, where it is told that.
        cluster: The local cluster that it may want, None for one that joins another.
    """

    def __init__(
        self,
        follower: Follower,
        command: Sequence[str],
        environment: Mapping[str, str],
        spec: DriverSpec,
        folder: Path,
        cluster: LocalCluster | None,
    ) -> None:
        super().__init__(follower)
        self._cluster = cluster
        self._gone_at = float("inf")
        self._spec_file, self._stop_file = folder / "spec", folder / STOP_FILE
        self._stop_file.unlink(missing_ok=True)
        write_spec(spec, self._spec_file)
        self._process = subprocess.Popen(
            [*command, str(self._spec_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._output: queue.Queue[tuple[str, bytes | None]] = queue.Queue(maxsize=_OUTPUT_QUEUE)
        self._open_streams = 2

    def start(self) -> None:
        """Begin to read its output."""
        for stream, source in ((self._process.stdout, "driver"), (self._process.stderr, "stderr")):
            assert stream is not None
            read_lines(stream, source, self._output)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """What comes within a turn."""
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

    def look(self) -> AttemptEnded | None:
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
            self._process.send_signal(signal.SIGINT)
            self._wait(self.follower.settings.stop_grace_seconds)
        self._spec_file.unlink(missing_ok=True)

    def tell(self, event: Event) -> None:
        """Hand an event on, and start the local cluster once it is wanted."""
        super().tell(event)
        if isinstance(event, ClusterWanted) and self._cluster is not None:
            self._cluster.start()

    def _outcome(self) -> AttemptEnded:
        code = self._wait(_LEAVE_SECONDS)
        if self._ended is not None or code == 0:
            return self._ended or self.lost_last_word()
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        said = self.last_error() if code != -signal.SIGKILL else ""
        message = f"the driver process (pid {self._process.pid}) was ended by {how}{said}"
        return self._cluster_lost() or self.lost(message)

    def _cluster_lost(self) -> AttemptEnded | None:
        if self._cluster is None or not self._cluster.is_dead():
            return None
        words = self._cluster.last_words(self.follower.on_line)
        return self.lost(f"the local Ray cluster has died: {words}", Outcome.CLUSTER_LOST)

    def _wait(self, seconds: float) -> int:
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(timeout=10)


def _signal_name(number: int) -> str:
    names = {int(one): f"{number} ({one.name})" for one in signal.Signals}
    return names.get(number, str(number))  # a real-time signal has none
