"""Drivers that are child processes of the flow process, and what they share with those that run as Ray jobs."""

import os
import queue
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import last_error_line
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import WORKER_LINE, without_marks
from prefect_elastic_train.core.request import STOP_FILE
from prefect_elastic_train.core.size_limits import whole_lines
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.driver.termination_signals import count_signals

from .follower import Follower
from .local_cluster import LocalCluster
from .processes import ChildProcess, complete, kill, start_process

#: Longest time for which a handle waits for output in one call of `read_output`.
POLL_SECONDS = 0.2
NO_FINAL_EVENT = "the driver exited with code 0, but its final event was lost; the next driver finds the result"
_RECENT_LINES = 30
_RECENT_LINE_CHARACTERS = 1000
#: Longest time from a driver's final event to its exit.
_DRIVER_EXIT_SECONDS = 15.0
#: Time for which the output of a dead driver is still read: a process that it started may hold it open.
_PIPE_SECONDS = 2.0
#: Time for which a killed process that hangs in the kernel is waited for.
_REAP_SECONDS = 10.0
_OUTPUT_QUEUE = 10_000
_CHUNK_BYTES = 64 * 1024
#: Time after a driver's start at which the next driver is pre-started. Its imports take CPU time, and short trainings
#: do not need it.
_PRESTART_SECONDS = 60.0


@dataclass
class DriverHandle:
    """A running driver. Reads the driver's output, and keeps what its events report about the attempt."""

    follower: Follower
    settings: ElasticTrainSettings

    # Without annotations, which would make them parameters.
    _attempt = 0  # number of the attempt in the run directory; 0 before `AttemptStarted`
    _final_event_at = float("inf")
    _exited_at = float("inf")  # time at which the driver was first known to have exited
    _activity = "starting"  # the driver's at its last heartbeat
    _has_session = False  # True while a session trains
    _is_replay = False  # True while the output is one that an earlier process of the flow run has already received

    def __post_init__(self) -> None:
        self._final_event: ev.AttemptEnded | None = None
        #: Start of the time without a heartbeat.
        self._heartbeat_at = time.monotonic()
        self._liveness_checked_at = self._heartbeat_at
        self._recent_lines: deque[str] = deque(maxlen=_RECENT_LINES)

    def close(self) -> None:
        """Release what is held for the driver. A Ray job holds nothing."""

    def process_line(self, source: str, line: bytes) -> None:
        """Handle a line of the driver's output: process it if it is an event, else pass it to the follower as text."""
        text = line.decode(errors="replace")
        event = ev.decode_event(text[len(ev.EVENT_TAG) :]) if text.startswith(ev.EVENT_TAG) else None
        if event:
            self.process_event(event)
            return
        plain_text = without_marks(text)
        if plain_text and not WORKER_LINE.match(plain_text):
            self._recent_lines.append(plain_text[:_RECENT_LINE_CHARACTERS])
        if plain_text and not self._is_replay:
            self.follower.on_line(source, text)

    def process_event(self, event: ev.Event) -> None:
        """Record an event, which counts as a heartbeat, and pass it to the follower."""
        self._heartbeat_at = time.monotonic()
        if isinstance(event, ev.AttemptStarted):
            self._attempt = event.attempt
        elif isinstance(event, ev.ControllerAlive):
            self._activity = event.doing
        elif isinstance(event, ev.SESSION_EVENTS):
            self._has_session = isinstance(event, ev.FirstStep)
        elif isinstance(event, ev.AttemptEnded):
            self._final_event = event
            self._final_event_at = time.monotonic()
        self.follower.on_event(event, self._is_replay)

    def check_liveness(self) -> ev.AttemptEnded | None:
        """Return a final event, ``driver_lost``, if no heartbeat came for ``liveness_timeout_seconds``, else None."""
        limit = self.settings.liveness_timeout_seconds
        now = time.monotonic()
        if now - self._liveness_checked_at > limit / 2:  # this process was suspended: heartbeats are unread
            self._heartbeat_at = now
        self._liveness_checked_at = now
        if now - self._heartbeat_at <= limit:
            return None
        return self.final_event(
            f"the driver and Ray Train's controller sent no heartbeat for {limit:g} s, last {self._activity}"
        )

    def final_event(self, message: str, outcome: Outcome = Outcome.DRIVER_LOST) -> ev.AttemptEnded:
        """Return a final event for an attempt whose driver sent none, or sent one that does not hold."""
        return ev.AttemptEnded(attempt=self._attempt, outcome=outcome, message=message)

    def last_error(self) -> str:
        """Return the last error in the driver's output as the end of a message, ``: <error>``; empty without one."""
        cause = last_error_line(self._recent_lines)
        return f": {cause}" if cause else ""


@dataclass
class DriverStarter:
    """Starts the drivers of a training as child processes, one after the other.

    Attributes:
        prestarted: The pre-started driver, which waits for the path of its spec file; None without one.
    """

    prestarted: ChildProcess | None = None
    _due_at: float = float("inf")
    _command: Sequence[str] = ()
    _environment: dict[str, str] = field(default_factory=dict)

    def start(
        self, command: Sequence[str], environment: dict[str, str], prestart_command: Sequence[str]
    ) -> ChildProcess:
        """Return a driver process: the pre-started driver if its environment fits, or a new one.

        Args:
            command: Command of a new driver, which ends with the path of the spec file.
            environment: Environment of the driver.
            prestart_command: Command of the next pre-started driver; empty for none.
        """
        if environment != self._environment:
            self.close()
        process = self.prestarted
        self.prestarted = None
        self._command = prestart_command
        self._environment = environment
        self._due_at = time.monotonic() + _PRESTART_SECONDS
        if process and process.stdin:
            with suppress(OSError):  # it has exited
                process.stdin.write(f"{command[-1]}\n".encode())
                process.stdin.close()
                return process
        return start_process(command, environment, subprocess.DEVNULL, subprocess.PIPE)

    def start_if_due(self) -> None:
        """Start the pre-started driver if one is wanted and its time has come."""
        if self._command and time.monotonic() > self._due_at:
            self._due_at = float("inf")
            with suppress(OSError):  # the next driver is started when it is needed
                self.prestarted = start_process(self._command, self._environment, subprocess.PIPE, subprocess.PIPE)

    def close(self) -> None:
        """Kill the pre-started driver, if there is one."""
        if self.prestarted:
            kill(self.prestarted)
            self.prestarted = None


@dataclass
class ChildDriver(DriverHandle):
    """A driver that is a child process of the flow process.

    Args:
        _spec_file: The file that the driver reads its spec from.
        _cluster: The local cluster to start when the driver requests it; None if the driver joins another.
    """

    _process: ChildProcess
    _spec_file: Path
    _cluster: LocalCluster | None

    _open_streams = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent: set[signal.Signals] = set()  # signals to the driver
        self._output: queue.Queue[tuple[str, bytes | None]] = queue.Queue(maxsize=_OUTPUT_QUEUE)

    def start(self) -> None:
        """Start to read the driver's output."""
        for stream, source in ((self._process.stdout, "driver"), (self._process.stderr, "stderr")):
            assert stream
            start_thread(self._read, stream, source)

    def read_output(self) -> Iterator[tuple[str, bytes]]:
        """Yield ``(source, line)`` for each new line of the driver's output. Waits a short time for lines."""
        deadline = time.monotonic() + POLL_SECONDS
        while self._open_streams and (left := deadline - time.monotonic()) > 0:
            try:
                source, line = self._output.get(timeout=left)
            except queue.Empty:
                return
            if line is None:
                self._open_streams -= 1
            else:
                yield source, line

    def poll(self) -> ev.AttemptEnded | None:
        """Return the attempt's final event, or None while the driver runs.

        The event comes once the driver has exited and its output is read, once it hangs, or once its local cluster has
        died.
        """
        now = time.monotonic()
        if self._process.poll() is not None:
            self._exited_at = min(self._exited_at, now)
        if not self._open_streams or (now - self._exited_at > _PIPE_SECONDS and self._output.empty()):
            return self._end_of_exited()
        if self._final_event:
            return self._final_event if now - self._final_event_at > _DRIVER_EXIT_SECONDS else None
        return self._check_cluster() or self.check_liveness()

    def prepare_stop(self, reason: BaseException) -> None:
        """Write the outcome, ``timed_out`` or ``cancelled``, into a file that the driver reads when it is stopped.

        If a session saves first, wait until the driver exits after it, or for another signal.
        """
        outcome = Outcome.TIMED_OUT if isinstance(reason, TimeoutError) else Outcome.CANCELLED
        self._spec_file.with_name(STOP_FILE).write_text(outcome.value)
        if not self._has_session or self._sent or not self.follower.saves_first(reason):
            return
        signals = count_signals()
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + self.settings.termination_grace_seconds
        while self._open_streams and time.monotonic() < deadline and count_signals() == signals:
            for source, line in self.read_output():
                self.process_line(source, line)

    def close(self) -> None:
        """Stop a running driver with SIGINT, and with SIGKILL after ``stop_grace_seconds``. Delete its spec file."""
        if self._process.poll() is None:
            complete(self._stop)
        self._spec_file.unlink(missing_ok=True)

    def process_event(self, event: ev.Event) -> None:
        super().process_event(event)
        if isinstance(event, ev.ClusterWanted) and self._cluster:
            self._cluster.start()

    def _read(self, stream: IO[bytes], source: str) -> None:
        """Put ``(source, line)`` into the queue for each line of a stream of the driver; None is the stream's end."""
        with stream:
            for line in whole_lines(iter(partial(os.read, stream.fileno(), _CHUNK_BYTES), b"")):
                self._output.put((source, line))
        self._output.put((source, None))

    def _end_of_exited(self) -> ev.AttemptEnded:
        code = self._wait(_DRIVER_EXIT_SECONDS)
        if self._final_event:
            return self._final_event
        if code == 0:
            return self.final_event(NO_FINAL_EVENT)
        error = self.last_error() if code != -signal.SIGKILL else ""
        exit_reason = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        return self._check_cluster() or self.final_event(
            f"the driver process (pid {self._process.pid}) was ended by {exit_reason}{error}"
        )

    def _check_cluster(self) -> ev.AttemptEnded | None:
        if not self._cluster or not self._cluster.is_dead():
            return None
        reason = self._cluster.log_failure(self.follower)
        return self.final_event(f"the local Ray cluster has died: {reason}", Outcome.CLUSTER_LOST)

    def _stop(self) -> None:
        if signal.SIGINT not in self._sent:
            self._send(signal.SIGINT)
        self._wait(self.settings.stop_grace_seconds)

    def _send(self, number: signal.Signals) -> None:
        self._sent.add(number)  # before the signal: another one may raise here
        self._process.send_signal(number)

    def _wait(self, seconds: float) -> int:
        for timeout in (seconds, _REAP_SECONDS):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout)
            self._process.kill()
        return -signal.SIGKILL
