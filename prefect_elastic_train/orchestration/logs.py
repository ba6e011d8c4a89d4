"""The run's events and output in the Prefect log, with a limit on the output."""

from __future__ import annotations

import logging
import time
from collections import Counter
from logging import DEBUG, INFO, WARNING

from prefect_elastic_train.core import ray_output
from prefect_elastic_train.core.causes import format_ranks, leading_causes
from prefect_elastic_train.core.events import (
    ALIVE_SECONDS,
    EVENT_TAG,
    ROUTINE,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ControllerAlive,
    Event,
    FirstStep,
    GroupFailed,
    Report,
    WorkerGroupResized,
    WorkerGroupStarted,
)
from prefect_elastic_train.core.size_limits import MAX_LOG_BYTES, truncate
from prefect_elastic_train.report.descriptions import Description, describe
from prefect_elastic_train.runs.layout import details_name

_MAX_LINE = 8000
#: Length of the window in which lines are counted.
_WINDOW_SECONDS = 10.0
#: Lines a second of rank 0, which is practically unlimited.
_RANK_0_RATE = 1000.0
#: Seconds between two lines about commits while nothing else happens, and between two states of a progress bar.
_COMMITS_SECONDS = 30.0
#: Seconds between two lines about the operation that a training waits for.
_WAITING_SECONDS = 60.0


class OutputLimits:
    """Limit of the lines of output that each source, such as a rank or the driver, may write to the log.

    The limit is an average over a window of 10 s. Rank 0 has a high one, and the ranks other than 0 share one.
    """

    def __init__(self, lines_per_second: float) -> None:
        self._rate = lines_per_second
        self._started_at = time.monotonic()
        self._lines = Counter[str]()
        self._omitted = Counter[str]()

    def admit_line(self, source: str) -> bool:
        """Count a line of output from a source, such as ``rank 3``. Return True if it is within the source's limit."""
        rate = _RANK_0_RATE if source == "rank 0" else self._rate
        share = "other ranks" if source.startswith(("rank ", "worker ")) and source != "rank 0" else source
        allowed = self._lines[share] < rate * _WINDOW_SECONDS  # always true for the first line
        self._lines[share] += 1
        self._omitted[source] += not allowed
        return allowed

    def end_window(self, at_once: bool = False) -> str:
        """Start a new window for counting lines of output if the current one is over, or with ``at_once``.

        Return a note with the number of lines that were left out in the ended window; empty if there are none.
        """
        if not at_once and time.monotonic() - self._started_at < _WINDOW_SECONDS:
            return ""
        omitted = +self._omitted
        self._started_at = time.monotonic()
        self._lines.clear()
        self._omitted.clear()
        most = ", ".join(f"{count} of {source}" for source, count in omitted.most_common(5))
        return f"[{omitted.total()} lines of output left out: {most}]" if omitted else ""


class RunLog:
    """Writes the events and the output of a training to a logger. :class:`OutputLimits` limits the output."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger], lines_per_second: float) -> None:
        self._logger = logger
        self._has_failed = False
        self._limits = OutputLimits(lines_per_second)
        self._progress_bar_at = 0.0
        #: Ranks by ``<node>:<process id>``, and by ``:<process id>``, as Ray omits the address of the driver's node.
        self._ranks: dict[str, int] = {}
        #: Process and node of each rank, as text.
        self._locations: dict[int, str] = {}
        self._attempt = 0
        self._run_uri = ""
        #: The exceptions that the loop raised in the last failure of the attempt, with tracebacks.
        self.loop_error = ""
        #: The checkpoint from which a restart would resume, as far as known.
        self._checkpoint = ""
        #: Time since when no worker trains; 0 while workers train.
        self._stopped_at = 0.0
        self._last_event_at = 0.0
        #: Lines about the commits that are not logged yet, and the time up to which commits are logged.
        self._commits: list[str] = []
        self._commits_logged_at = 0.0

    def line(self, source: str, text: str) -> None:
        """Log a line that a process of the training has printed.

        A worker's line is tagged with its rank, and a line of Ray's own output has level DEBUG.
        """
        if text.startswith(EVENT_TAG):
            self.note(f"An event of the driver cannot be read, and is lost: {text[:300]}", WARNING)
            return
        is_detail = ray_output.is_detail(text)
        text = ray_output.without_marks(text)
        if match := ray_output.WORKER_LINE.match(text):
            source = match["actor"]
            text = text[match.end() :]
            if source == "RayTrainWorker":
                rank = self._ranks.get(f"{match['ip'] or ''}:{match['pid']}")
                source = f"worker {match['pid']}" if rank is None else f"rank {rank}"
        *overwritten, text = text.rstrip("\r").split("\r")
        name, _, message = text.partition(": ")
        level = logging.getLevelName(name)
        if isinstance(level, int):  # the format that silence_ray_train() sets
            text = message
        else:
            level = INFO
        if is_detail:
            level = DEBUG
        if not self._logger.isEnabledFor(level) or not text.strip():
            return
        if overwritten:  # a state of a progress bar
            if time.monotonic() < self._progress_bar_at + _COMMITS_SECONDS:
                return
            self._progress_bar_at = time.monotonic()
        self.note(self._limits.end_window())
        if self._limits.admit_line(source):
            tag = f"attempt {self._attempt} {source}" if self._attempt else source
            self.note(truncate(f"[{tag}] {text}", _MAX_LINE), level)

    def note(self, text: str, level: int = INFO) -> None:
        """Log a message to users unless it is empty.

        Errors of log handlers do not end the training; the first one is logged.
        """
        try:
            if text:
                self._logger.log(level, "%s", truncate(text, MAX_LOG_BYTES))
        except SystemExit:
            # After the death of a runner the output of its flow processes has no reader. Then rich, behind Prefect's
            # console handler, raises SystemExit once, and writes nothing from then on.
            pass
        except Exception:  # whatever a handler raises
            if not self._has_failed:
                self._has_failed = True
                logging.getLogger(__name__).exception("some of the training's output cannot be written to its log")

    def event(self, event: Event, replayed: bool = False) -> None:
        """Log an event of the training. A replayed event only updates this object: an earlier process has logged it.

        Commits are collected, and logged together after 30 s or before the next event that is not routine.
        """
        match event:
            case AttemptStarted():
                self._attempt = event.attempt
                self._run_uri = event.run_uri
                self._checkpoint = event.checkpoint
                self.loop_error = ""
                self._stopped_at = (self._last_event_at or event.driver_started_at) if event.attempt > 1 else 0.0
            case CheckpointCommitted():
                self._checkpoint = event.checkpoint
            case GroupFailed() | WorkerGroupResized():
                self._stopped_at = event.at
            case WorkerGroupStarted():
                self._ranks = dict(event.ranks)
                self._locations = {}
                for process, rank in event.ranks.items():
                    node, _, pid = process.rpartition(":")
                    self._ranks.setdefault(f":{pid}", rank)
                    self._locations[rank] = f"pid {pid}, node {node}"
        recovery = ""
        if isinstance(event, FirstStep | Report) and self._stopped_at:
            recovery = f"Training again after {event.at - self._stopped_at:.1f} s; workers: {event.world_size}"
            self._stopped_at = 0.0
        self._last_event_at = max(self._last_event_at, event.at)
        if replayed:
            return
        is_routine = isinstance(event, ROUTINE)
        if not is_routine:
            self._log_commits()
        self.note(recovery)
        description = describe(event, self._checkpoint, self._locations) or Description("")
        if isinstance(event, CheckpointCommitted):
            self._commits.append(description.line)
        else:
            self._log_event(event, description)
        if is_routine and event.at - self._commits_logged_at >= _COMMITS_SECONDS:
            self._log_commits()

    def close(self) -> None:
        """Log the commits and the number of left-out lines that are not logged yet. Called after each attempt."""
        self._log_commits()
        self.note(self._limits.end_window(at_once=True))

    def _log_event(self, event: Event, description: Description) -> None:
        """Log an event of the training as a line, with details that only the log shows, such as tracebacks."""
        line = description.line
        level = WARNING if description.is_warning else INFO
        warnings: list[str] = []
        match event:
            case AttemptStarted():
                line += f"; run directory {event.run_uri}; its processes import the loop and its dependencies"
                if event.started_from:
                    line += f"; the run started from checkpoint {event.started_from} of another run"
                warnings = [f"Run {event.run_name}: {note}" for note in event.notes]
            case GroupFailed():
                self.loop_error = "".join(
                    f"\n[{format_ranks(cause.ranks)}] {cause.traceback.rstrip()}"
                    for cause in leading_causes(event.causes)
                    if not cause.is_death and "\n" in cause.traceback.strip()
                )
                if event.causes:
                    line += f"; details: {self._run_uri}/{details_name(self._attempt)}"
                line += self.loop_error
            # Once a minute while the driver is busy. Its operations are in lower case, controller states in upper case.
            case ControllerAlive() if (
                event.doing.islower() and event.seconds % _WAITING_SECONDS < ALIVE_SECONDS < event.seconds
            ):
                line = f"The training has been {event.doing} for {event.seconds:.0f} s"
                level = WARNING
            case AttemptEnded():
                warnings = [event.warning]
        self.note(line, level)
        for warning in warnings:
            self.note(warning, WARNING)

    def _log_commits(self) -> None:
        """Log one line: the newest commit, and the number of other commits since the last such line."""
        if not self._commits:
            return
        *others, newest = self._commits
        self._commits = []
        self._commits_logged_at = self._last_event_at
        self.note(newest + (f"; {len(others)} more since the last line" if others else ""))
