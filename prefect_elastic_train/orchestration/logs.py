"""The run's output and events as lines of a log, as many as a person can read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prefect_elastic_train.core.bounds import MAX_LOG_BYTES, cut
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointTaken,
    ClusterConnected,
    Event,
    LoopWarned,
    StateChanged,
    StorageWaited,
    WaitingForCapacity,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
)
from prefect_elastic_train.core.rank_errors import causes, own_errors, ranks_in_words
from prefect_elastic_train.core.ray_output import DETAIL_TAG, WORKER_LINE, is_detail, without_marks
from prefect_elastic_train.orchestration.log_limits import OutputLimits
from prefect_elastic_train.orchestration.rates import TokenBucket
from prefect_elastic_train.report.run_report import WORTH_TELLING_SECONDS
from prefect_elastic_train.report.words import size
from prefect_elastic_train.runs.layout import details_name

__all__ = ["RunLog"]

_MAX_LINE = 8000
#: Different errors of a failure that are told in full.
_MAX_ERRORS = 5
#: Commits that are told of.
_COMMITS_PER_SECOND = 0.5
_COMMITS_AT_ONCE = 100.0


class _SteadyLogger:
    """A logger that outlives its reader.

    When a runner dies, nobody reads what its flow processes print. Behind Prefect's console handler, rich answers
    that with SystemExit, once, and writes nowhere from then on. The training is not to end of that.
    """

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        self._logger = logger

    def debug(self, message: str, *arguments: object) -> None:
        self._log(logging.DEBUG, message, *arguments)

    def info(self, message: str, *arguments: object) -> None:
        self._log(logging.INFO, message, *arguments)

    def warning(self, message: str, *arguments: object) -> None:
        self._log(logging.WARNING, message, *arguments)

    @property
    def tells_details(self) -> bool:
        return self._logger.isEnabledFor(logging.DEBUG)

    def _log(self, level: int, message: str, *arguments: object) -> None:
        try:
            self._logger.log(level, "%s", cut(message % arguments, MAX_LOG_BYTES))
        except SystemExit:
            pass


class RunLog:
    """Writes events and output to a logger, output at a limited rate with a count of what was left out.

    Args:
        logger: Where to, such as Prefect's run logger.
        lines_per_second: Lines of output that each source may print; see :class:`OutputLimits`.
    """

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger], lines_per_second: float) -> None:
        self._logger = _SteadyLogger(logger)
        self._limits = OutputLimits(lines_per_second)
        self._ranks: dict[str, int] = {}
        #: The same by the process id alone, for workers on the driver's node, whose address Ray leaves out.
        self._ranks_by_pid: dict[str, int] = {}
        self._commits = TokenBucket(_COMMITS_PER_SECOND, _COMMITS_AT_ONCE)
        self._commits_left_out = 0
        self._attempt = 0
        self._run_uri = ""
        #: Where a restart begins, as far as is known.
        self._checkpoint = ""
        #: What the loops raised in the failure before, which was told in full.
        self._told: set[str] = set()
        #: Waits for the storage that are not told yet: how many, their seconds and failed requests.
        self._waits, self._waited, self._tries = 0, 0.0, 0

    def line(self, source: str, text: str) -> None:
        """Write a line of output; a worker's is tagged with its rank, and Ray's own is a detail."""
        if text.startswith(EVENT_TAG):
            self._logger.warning("An event of the driver cannot be read, and what it told is lost: %s", cut(text, 300))
            return
        detail = is_detail(text)
        if (detail and not self._logger.tells_details) or not text.replace(DETAIL_TAG, "").strip():
            return
        who, rest = self._source(source, text)
        let_through = self._limits.lets_through(who, rest)
        notice = self._limits.notice()
        if notice:
            self._logger.info("%s", notice)
        if let_through:
            tag = f"attempt {self._attempt} {who}" if self._attempt else who
            tell = self._logger.debug if detail else self._logger.info
            tell("%s", cut(f"[{tag}] {rest}", _MAX_LINE))

    def event(self, event: Event) -> None:
        """Write an event that a person wants to know of."""
        log = self._logger
        if isinstance(event, ClusterConnected):
            cpus = event.resources.get("CPU", 0)
            log.info(
                "Joined the Ray cluster at %s (%g CPUs, %g GPUs)", event.address, cpus, event.resources.get("GPU", 0)
            )
        elif isinstance(event, AttemptStarted):
            self._begin(event)
            where = f"from checkpoint {loop_name(event.checkpoint)}" if event.checkpoint else "from the beginning"
            log.info(
                "Attempt %d of run %s starts %s; run directory %s", event.attempt, event.run_name, where, event.run_uri
            )
            if event.started_from:
                log.info("Run %s started from checkpoint %s of another run", event.run_name, event.started_from)
            for note in event.notes:
                log.warning("Run %s: %s", event.run_name, note)
        elif isinstance(event, WorkerGroupStarted):
            self._know(event.ranks)
            name = loop_name(event.checkpoint)
            where = f"; checkpoint {name} is offered" if name else " from the beginning"
            log.info("%d workers train%s", event.world_size, where)
        elif isinstance(event, CheckpointTaken):
            where = f"; its first report is {event.where}" if event.where else ""
            log.info("The loop goes on from checkpoint %s%s", event.checkpoint, where)
        elif isinstance(event, LoopWarned):
            log.warning("%s", event.message[:1].upper() + event.message[1:])
        elif isinstance(event, WorkerGroupResized):
            cost = f"{event.reports_lost} reports ({event.seconds_lost:.1f} s) since the last checkpoint are done again"
            when = {"commit": "at a checkpoint", "patience": f"without a checkpoint, which did not come; {cost}"}
            log.info(
                "The worker group is resized from %d to %d workers, %.0f s after the decision%s",
                event.old_size,
                event.new_size,
                event.waited_seconds,
                f", {when[event.reason]}" if event.reason in when else "",
            )
        elif isinstance(event, WorkerFailed | WorkersPreempted):
            self._fail(event)
        elif isinstance(event, WaitingForCapacity):
            log.warning(
                "Waiting for capacity for %.0f s: %d workers fit, at least %d are needed with %s each; lacking: %s",
                max(0.0, event.at - event.since) if event.since else 0.0,
                event.possible_workers,
                event.min_workers,
                event.resources_per_worker,
                event.missing or "more of them",
            )
        elif isinstance(event, StorageWaited):
            self._wait(event)
        elif isinstance(event, CheckpointCommitted):
            self._commit(event)
        elif isinstance(event, AttemptEnded) and event.already_finished:
            log.info("Nothing to train: %s", event.message)
        elif isinstance(event, StateChanged):
            log.debug("Ray Train is %s", event.state)

    def _begin(self, event: AttemptStarted) -> None:
        self._attempt, self._run_uri, self._checkpoint = event.attempt, event.run_uri, event.checkpoint

    def _fail(self, event: WorkerFailed | WorkersPreempted) -> None:
        """Tell in a line what failed and what is done about it, and below it what the loop raised, each error once."""
        then = f"{event.gives_up}; {event.reports_lost} reports since the last checkpoint"
        if event.retried:
            where = f"checkpoint {loop_name(self._checkpoint)}" if self._checkpoint else "the beginning"
            again = f"{event.reports_lost} reports since then are" if event.reports_lost else "nothing is"
            then = f"the worker group is restarted from {where}, {again} done again"
        why = "; ".join(causes(event.errors, event.also, self._named)) or "a node was drained or reclaimed"
        own = own_errors(event.errors)
        texts = [
            f"\n[{ranks_in_words([int(rank), *event.also.get(rank, [])])}] {error.rstrip()}"
            for rank, error in own.items()
            if "\n" in error.strip() and error not in self._told
        ]
        self._told = set(own.values())
        more = len(texts) - _MAX_ERRORS
        self._logger.warning(
            "%s: %s; %s; details: %s%s%s",
            "Preemption" if isinstance(event, WorkersPreempted) else "Worker failure",
            why,
            then,
            f"{self._run_uri}/{details_name(self._attempt)}",
            "".join(texts[:_MAX_ERRORS]),
            f"\nand {more} other errors of other ranks" if more > 0 else "",
        )

    def _named(self, ranks: Sequence[int]) -> str:
        """Return ranks in words; a single one with its process."""
        words = ranks_in_words(ranks)
        places = [place.rpartition(":") for place, rank in self._ranks.items() if [rank] == list(ranks)]
        return f"{words} (pid {places[0][2]}, node {places[0][0]})" if places else words

    def _wait(self, event: StorageWaited) -> None:
        """Tell of a wait that is worth it, and of others when they add up to one."""
        self._waits, self._waited, self._tries = (
            self._waits + 1,
            self._waited + event.seconds,
            self._tries + event.tries,
        )
        if self._waited < WORTH_TELLING_SECONDS:
            return
        self._logger.warning(
            "The %s waited %.1f s for the storage%s, in which %d requests failed and were repeated; last: %s",
            event.who,
            self._waited,
            f" together with {self._waits - 1} waits before" if self._waits > 1 else "",
            self._tries,
            event.last,
        )
        self._waits, self._waited, self._tries = 0, 0.0, 0

    def _commit(self, event: CheckpointCommitted) -> None:
        self._checkpoint = event.checkpoint
        if not self._commits.take():
            self._commits_left_out += 1
            return
        before = f"; {self._commits_left_out} before it are not told" if self._commits_left_out else ""
        metrics = _short(event.metrics)
        self._logger.info(
            "Checkpoint %s is committed (%s): %s%s",
            loop_name(event.checkpoint),
            size(event.size_bytes),
            metrics,
            before,
        )
        self._commits_left_out = 0

    def _know(self, ranks: dict[str, int]) -> None:
        self._ranks, self._ranks_by_pid = ranks, {}
        for worker, rank in ranks.items():
            self._ranks_by_pid.setdefault(worker.rpartition(":")[2], rank)

    def note(self, text: str) -> None:
        """Write what the supervisor has to say itself."""
        self._logger.info("%s", text)

    def past_event(self, event: Event) -> None:
        """Take in an event that was told before, for what comes."""
        if isinstance(event, AttemptStarted):
            self._begin(event)
        elif isinstance(event, WorkerGroupStarted):
            self._know(event.ranks)
        elif isinstance(event, CheckpointCommitted):
            self._checkpoint = event.checkpoint

    def close(self) -> None:
        """Tell how many lines were left out at the end."""
        notice = self._limits.notice(at_once=True)
        if notice:
            self._logger.info("%s", notice)

    def _source(self, source: str, text: str) -> tuple[str, str]:
        """Give who prints a line, and what it says."""
        text = without_marks(text)
        match = WORKER_LINE.match(text)
        if match is None:
            return source, text
        rest = text[match.end() :]
        if match["actor"] != "RayTrainWorker":
            return match["actor"], rest
        ip, pid = match["ip"], match["pid"] or ""
        rank = self._ranks.get(f"{ip}:{pid}") if ip else self._ranks_by_pid.get(pid)
        return (f"rank {rank}" if rank is not None else f"worker {pid}"), rest


def _short(metrics: dict[str, object]) -> str:
    parts = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items()
    ]
    return cut(", ".join(parts), 500)
