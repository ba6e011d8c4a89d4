"""The run's output and events as lines of a log, as many as a person can read."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from logging import DEBUG, INFO, WARNING

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core import ray_output
from prefect_elastic_train.core.bounds import MAX_LOG_BYTES, cut
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.report.markdown import size
from prefect_elastic_train.report.run_report import WORTH_TELLING_SECONDS
from prefect_elastic_train.runs.layout import details_name

_MAX_LINE = 8000
#: Lines are counted for so many seconds, then anew.
_WINDOW_SECONDS = 10.0
#: Lines a second of rank 0, which is to be read in full.
_IN_FULL = 1000.0
#: Seconds between two lines about checkpoints, unless something happens, and between two states of a progress bar.
_COMMITS_SECONDS = 30.0
#: Seconds between two lines about the operation that a training waits for.
_STANDING_SECONDS = 60.0


class OutputLimits:
    """Decides for each line: what each source may print on average over a window, ranks other than 0 together."""

    def __init__(self, lines_per_second: float) -> None:
        self._rate = lines_per_second
        self._begin()

    def _begin(self) -> None:
        self._began, self._lines, self._left_out = time.monotonic(), Counter[str](), Counter[str]()

    def lets_through(self, source: str) -> bool:
        """Whether the next line of a source, such as ``rank 3`` or ``driver``, is let through."""
        rate = _IN_FULL if source == "rank 0" else self._rate
        share = "other ranks" if source.startswith(("rank ", "worker ")) and source != "rank 0" else source
        let = self._lines[share] < rate * _WINDOW_SECONDS  # so the first line always is
        self._lines[share] += 1
        self._left_out[source] += not let
        return let

    def notice(self, at_once: bool = False) -> str:
        """Count anew if it is time, and return what was left out, of five sources at most; empty if nothing was."""
        if not at_once and time.monotonic() - self._began < _WINDOW_SECONDS:
            return ""
        left_out = +self._left_out
        self._begin()
        most = ", ".join(f"{count} of {source}" for source, count in left_out.most_common(5))
        return f"[{left_out.total()} lines of output left out: {most}]" if left_out else ""


class RunLog(ev.EventHandler):
    """Writes events and output to a logger, output within :class:`OutputLimits`."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger], lines_per_second: float) -> None:
        self._logger, self._has_failed = logger, False
        self._limits = OutputLimits(lines_per_second)
        self._bar_told_at = 0.0
        #: By node and process id, and by ":" and the latter alone, as Ray leaves out the address of the driver's node.
        self._ranks: dict[str, int] = {}
        self._attempt, self._run_uri = 0, ""
        self.raised = ""  # the loop's exceptions in the attempt's last failure, with tracebacks, by rank
        #: Where a restart begins, as far as is known, and since when there is nobody to train; 0: somebody does.
        self._checkpoint, self._stopped_at, self._last_at = "", 0.0, 0.0
        #: The commits that no line has told of, and when the newest was that a line has told of.
        self._commits: list[ev.CheckpointCommitted] = []
        self._commit_told_at = 0.0

    def line(self, source: str, text: str) -> None:
        """Write a line of output; a worker's is tagged with its rank, and Ray's own is a detail."""
        if text.startswith(ev.EVENT_TAG):
            self.note(f"An event of the driver cannot be read, and what it told is lost: {cut(text, 300)}", WARNING)
            return
        detail = ray_output.is_detail(text)
        who, rest = self._source(source, text)
        *overwritten, rest = rest.rstrip("\r").split("\r")
        name, _, message = rest.partition(": ")
        level = logging.getLevelName(name)
        if isinstance(level, int):  # the format that silence_ray_train() sets
            rest = message
        else:
            level = INFO
        if (detail and not self._logger.isEnabledFor(DEBUG)) or not rest.strip():
            return
        if overwritten:  # a state of a progress bar
            if time.monotonic() < self._bar_told_at + _COMMITS_SECONDS:
                return
            self._bar_told_at = time.monotonic()
        self.note(self._limits.notice())
        if self._limits.lets_through(who):
            tag = f"attempt {self._attempt} {who}" if self._attempt else who
            self.note(cut(f"[{tag}] {rest}", _MAX_LINE), DEBUG if detail else level)

    def note(self, text: str, level: int = INFO) -> None:
        """Write a text if there is one. That this cannot be done is said once, and harms nothing."""
        try:
            if text:
                self._logger.log(level, "%s", cut(text, MAX_LOG_BYTES))
        except SystemExit:
            # When a runner dies, nobody reads what its flow processes print. Behind Prefect's console handler, rich
            # answers that with SystemExit, once, and writes nowhere from then on.
            pass
        except Exception:  # whatever a handler raises
            if not self._has_failed:
                self._has_failed = True
                logging.getLogger(__name__).exception("some of the training's output cannot be written to its log")

    def event(self, event: ev.Event, told: bool = False) -> None:
        """Write an event that a person wants to know of; one that was told before counts for what comes only."""
        if isinstance(event, ev.AttemptStarted):
            self._attempt, self._run_uri, self._checkpoint = event.attempt, event.run_uri, event.checkpoint
            self.raised = ""
            self._stopped_at = (self._last_at or event.driver_started_at) if event.attempt > 1 else 0.0
        elif isinstance(event, ev.CheckpointCommitted):
            self._checkpoint = event.checkpoint
        elif isinstance(event, ev.GroupFailed | ev.WorkerGroupResized):
            self._stopped_at = event.at
        elif isinstance(event, ev.WorkerGroupStarted):
            by_pid = {f":{worker.rpartition(':')[2]}": rank for worker, rank in reversed(event.ranks.items())}
            self._ranks = {**event.ranks, **by_pid}
        again = ""
        if isinstance(event, ev.FirstStep | ev.Report) and self._stopped_at:
            who = "1 worker trains" if event.world_size == 1 else f"{event.world_size} workers train"
            again, self._stopped_at = f"{who} again after {event.at - self._stopped_at:.1f} s", 0.0
        self._last_at = max(self._last_at, event.at)
        if not told:
            is_steady = isinstance(event, ev.STEADY)
            if not is_steady:
                self._tell_commits()
            self.note(again)
            self.handle(event)
            if is_steady and event.at - self._commit_told_at >= _COMMITS_SECONDS:
                self._tell_commits()

    def close(self) -> None:
        """Say at the end what was not said, and how many lines were left out."""
        self._tell_commits()
        self.note(self._limits.notice(at_once=True))

    def on_cluster_wanted(self, _: ev.ClusterWanted) -> None:
        if not self._attempt:  # later ones find it there
            self.note("Starting or joining the Ray cluster")

    def on_cluster_connected(self, event: ev.ClusterConnected) -> None:
        cpus, gpus = event.resources.get("CPU", 0), event.resources.get("GPU", 0)
        self.note(f"The Ray cluster is there, at {event.address} ({cpus:g} CPUs, {gpus:g} GPUs)")

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        where = f"from checkpoint {loop_name(event.checkpoint)}" if event.checkpoint else "from the beginning"
        places = f"run directory {event.run_uri}; its processes import the loop and what that needs"
        self.note(f"Attempt {event.attempt} of run {event.run_name} starts {where}; {places}")
        if event.started_from:
            self.note(f"Run {event.run_name} started from checkpoint {event.started_from} of another run")
        for note in event.notes:
            self.note(f"Run {event.run_name}: {note}", WARNING)

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        where = f"; checkpoint {loop_name(event.checkpoint)} is offered" if event.checkpoint else ""
        who = "1 worker starts" if event.world_size == 1 else f"{event.world_size} workers start"
        self.note(f"{who} the loop{where}")

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        self.note(event.message[:1].upper() + event.message[1:], WARNING)

    def on_saves_planned(self, event: ev.SavesPlanned) -> None:
        self.note(f"The loop saves {event.words}")

    def on_standbys_parked(self, event: ev.StandbysParked) -> None:
        self.note(event.words)

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
        lost = f"; reports that are done again: {event.reports_lost}" if event.reports_lost else ""
        waited = f"{event.waited_seconds:.0f} s after the decision ({event.reason})"
        self.note(f"The worker group is resized from {event.old_size} to {event.new_size} workers, {waited}{lost}")

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        """Say in a line what failed and what is done about it, and below it what the loop raised, each error once."""
        then = f"{event.gives_up}; reports since the last checkpoint: {event.reports_lost}"
        if event.retried:
            where = f"checkpoint {loop_name(self._checkpoint)}" if self._checkpoint else "the beginning"
            again = f"; reports since then, which are done again: {event.reports_lost}" if event.reports_lost else ""
            then = f"the worker group is restarted from {where}{again}"
        what = "Preemption" if isinstance(event, ev.WorkersPreempted) else "Worker failure"
        why = "; ".join(ray_output.causes(event.errors, event.also, self._named)) or "a node was drained or reclaimed"
        self.raised = "".join(
            f"\n[{ray_output.ranks_in_words([int(rank), *event.also.get(rank, [])])}] {error.rstrip()}"
            for rank, error in ray_output.own_errors(event.errors).items()
            if "\n" in error.strip()
        )
        details = f"; details: {self._run_uri}/{details_name(self._attempt)}" if event.errors else ""
        self.note(f"{what}: {why}; {then}{details}{self.raised}", WARNING)

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> None:
        seconds = max(0.0, event.at - event.since) if event.since else 0.0
        needed = f"at least {event.min_workers} are needed with {event.resources_per_worker} each"
        fit = f"{event.possible_workers} workers fit, {needed}; lacking: {event.missing or 'more of them'}"
        self.note(f"Waiting for capacity for {seconds:.0f} s: {fit}", WARNING)

    def on_storage_waited(self, event: ev.StorageWaited) -> None:
        if event.seconds >= WORTH_TELLING_SECONDS:
            tries = f"in which {event.tries} requests failed and were repeated; last: {event.last}"
            self.note(f"The {event.who} waited {event.seconds:.1f} s for the storage, {tries}", WARNING)

    def on_controller_alive(self, event: ev.ControllerAlive) -> None:
        # Operations of the driver are in lower case, states of Ray's controller in capitals.
        if event.doing.islower() and event.seconds % _STANDING_SECONDS < ev.ALIVE_SECONDS < event.seconds:
            self.note(f"The training has been {event.doing} for {event.seconds:.0f} s", WARNING)

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self._commits.append(event)

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        if event.already_finished:
            self.note(f"Nothing to train: {event.message}")
            self.note(event.warning, WARNING)

    def _tell_commits(self) -> None:
        """Tell of the newest commit, unless a line has, and of how many were before it."""
        if not self._commits:
            return
        *others, event = self._commits
        self._commits = []
        self._commit_told_at = event.at
        metrics = (f"{name}={one:{'.4g' if isinstance(one, float) else ''}}" for name, one in event.metrics.items())
        said = f": {cut(', '.join(metrics), 500)}" if event.metrics else ""
        more = f"; {len(others)} more since the last line" if others else ""
        self.note(f"Checkpoint {loop_name(event.checkpoint)} is committed ({size(event.size_bytes)}){said}{more}")

    def _named(self, ranks: Sequence[int]) -> str:
        """Return ranks in words; a single one with its process."""
        words = ray_output.ranks_in_words(ranks)
        places = [place.rpartition(":") for place, rank in self._ranks.items() if [rank] == list(ranks)]
        return f"{words} (pid {places[0][2]}, node {places[0][0]})" if places else words

    def _source(self, source: str, text: str) -> tuple[str, str]:
        """Return who prints a line, and what it says."""
        text = ray_output.without_marks(text)
        match = ray_output.WORKER_LINE.match(text)
        if match is None:
            return source, text
        rest = text[match.end() :]
        if match["actor"] != "RayTrainWorker":
            return match["actor"], rest
        rank = self._ranks.get(f"{match['ip'] or ''}:{match['pid']}")
        return (f"rank {rank}" if rank is not None else f"worker {match['pid']}"), rest
