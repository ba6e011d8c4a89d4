"""Finds loops that hang, by the phases of their sessions: the time limit of each is learned from its duration so far.

A limit alone would stop loops that are only slow. So when a rank exceeds one, its thread is observed from outside. It
hangs if it is stopped, or if the kernel does not run it for some time and it does not wait for other ranks.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import ray
from ray.train import WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.core.events import Event, StallTimeoutLearned
from prefect_elastic_train.loop.phases import PhaseReport
from prefect_elastic_train.worker.loop_inspection import thread_stacks
from prefect_elastic_train.worker.thread_activity import ThreadActivity, observe_threads

from .failures import HungLoopError
from .worker_queries import finished_results, query_workers

LEARNING_STEPS = 50
_STEP_SECONDS = 4.0  # shortest limit of a step
#: Shortest limits of the other phases, which differ more. A save also waits for uploads of earlier saves.
_PHASE_SECONDS = {"loading": 600.0, "evaluation": 600.0, "save": 3900.0}
_FACTOR = 15.0  # limit of a phase, as a multiple of its longest duration so far
#: Limit of a step that is not one of many, and the one after which a loop fails although its threads run.
_LAST_SECONDS = 1800.0
_ANSWER_SECONDS = 30.0  # for the observations of all nodes
_STACKS_SECONDS = 1.0  # for the stacks that py-spy may not read
_PAUSE_SECONDS = 15.0  # between two observations of a loop that runs
_STILL_SECONDS = 10.0  # for which a thread must not run. One that waits for a DataLoader runs every 5 s.
#: Part of its duration for which a phase with a hang counts, so that one that was only slow ends after some restarts.
_ALARM_DIVISOR = 4.0
_SETTLED_STEPS = 5  # of a worker group: the first ones compile and fill caches


def phase_limit(phase: str, longest_seconds: float, steps: int) -> float:
    """Return the time limit of a phase in seconds.

    The limit is a multiple of the longest duration so far, and no quantile: durations may be heavy-tailed.

    Args:
        phase: Name of the phase.
        longest_seconds: Longest duration of this phase so far, on all ranks.
        steps: Steps so far.
    """
    shortest = _PHASE_SECONDS.get(phase, _LAST_SECONDS)
    if phase == "step" and steps >= LEARNING_STEPS:
        shortest = _STEP_SECONDS
    return max(shortest, min(_FACTOR * longest_seconds, max(_LAST_SECONDS, 2 * longest_seconds)))


class HangWatch:
    """Finds worker groups whose loop hangs, in the controller.

    Args:
        publish: Function that publishes an event.
    """

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._longest: defaultdict[str, float] = defaultdict(float)  # seconds, by phase
        self._steps = 0
        self._published = 0.0  # the limit of a step

    def begin_group(self, workers: Sequence[Any]) -> None:
        """Begin to watch a new worker group. What was learned from earlier ones still holds."""
        self._workers = workers
        #: The phase of each rank by its newest answer; ``seconds`` is its begin by the clock of this process.
        self._ranks: dict[int, PhaseReport] = {}
        self._observations: list[Any] = []
        self._observed_at = 0.0  # begin of the current observation, or time before which no other one begins
        #: Time since which a rank's thread does not run, by the rank and the kernel's record of its runs.
        self._still: dict[tuple[int, str], float] = {}

    def check(self, statuses: Sequence[Any]) -> None:
        """Check the phases of the ranks by the status that a poll returned for each. Call it at each poll.

        Raises:
            WorkerGroupError: A rank hangs, or all ranks wait for each other.
        """
        now = time.monotonic()
        self._update(now, statuses)
        over = {rank for rank, phase in self._ranks.items() if now - phase.seconds > self._limit(phase)}
        if not over:
            self._observations = []
            self._still = {}
            return
        if not self._observations:
            if now >= self._observed_at:
                self._observe(now)
            return
        pending = ray.wait(self._observations, num_returns=len(self._observations), timeout=0)[1]
        if pending and now - self._observed_at < _ANSWER_SECONDS:
            return
        self._judge(now, over)
        self._observations = []
        self._observed_at = now + (0.0 if self._still else _PAUSE_SECONDS)

    def _update(self, now: float, statuses: Sequence[Any]) -> None:
        """Learn from the answers of a poll. A rank that did not answer is still in the phase that it had."""
        for rank, status in enumerate(statuses):
            report: PhaseReport | None = getattr(status, "phase", None)
            if report is not None and status.running:
                self._ranks[rank] = report._replace(seconds=now - report.seconds)
                self._steps = max(self._steps, report.steps)
                for phase, seconds in report.longest.items():
                    self._longest[phase] = max(self._longest[phase], seconds)
            elif hasattr(status, "phase") or not status.running:
                self._ranks.pop(rank, None)
        longest = self._longest["step"]
        limit = phase_limit("step", longest, self._steps)
        if self._steps >= LEARNING_STEPS and limit != self._published:
            self._published = limit
            self._publish(StallTimeoutLearned(limit=f"{limit:.1f} s; the longest so far took {longest:.2g} s"))

    def _limit(self, rank: PhaseReport) -> float:
        steps = self._steps if rank.steps >= _SETTLED_STEPS else rank.steps
        return phase_limit(rank.name, self._longest[rank.name], steps)

    def _observe(self, now: float) -> None:
        """Begin to observe the loops of all ranks, with a Ray task on each node."""
        self._observed_at = now
        threads: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for rank, phase in self._ranks.items():
            metadata = self._workers[rank].metadata
            threads[metadata.node_id][rank] = (metadata.pid, phase.thread_id)
        self._observations = [
            ray.remote(observe_threads)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(of_node)
            for node, of_node in threads.items()
        ]

    def _judge(self, now: float, over: set[int]) -> None:
        """Decide by the observation if a rank hangs.

        Args:
            now: Time of the monotonic clock.
            over: Ranks that have exceeded the limit of their phase.

        Raises:
            WorkerGroupError: A rank hangs, or all ranks wait for each other.
        """
        activities: dict[int, ThreadActivity] = {}
        for _, answer in finished_results(self._observations):
            activities |= answer
        self._still = {
            (rank, activity.runs): self._still.get((rank, activity.runs), self._observed_at)
            for rank, activity in activities.items()
            if activity.is_still
        }
        still = {rank for (rank, _), began in self._still.items() if now - began >= _STILL_SECONDS}
        in_step = {rank for rank in over if self._ranks[rank].name.endswith("step")}
        too_long = {rank for rank in in_step if now - self._ranks[rank].seconds > _LAST_SECONDS}
        hung = find_hung_ranks(activities, over, still, len(self._workers)) or too_long
        if not hung:
            return
        first = self._ranks[min(hung)]
        problem = (
            f"no progress for {now - first.seconds:.1f} s in phase {first.name!r}, which has taken at most "
            f"{self._longest[first.name]:.2g} s before"
        )
        texts = query_workers(self._workers, thread_stacks, _STACKS_SECONDS)
        texts |= {rank: activity.stack for rank, activity in activities.items() if activity.stack}
        failures: dict[int, Exception] = {}
        for rank in range(len(self._workers)):
            failures[rank] = failure = HungLoopError(f"{problem}; the rank {texts.get(rank, 'does not answer')}")
            failure.is_consequence = rank not in hung
        if not any(activity.is_stopped for activity in activities.values()):  # else it is certain
            self._longest[first.name] = max(self._longest[first.name], (now - first.seconds) / _ALARM_DIVISOR)
        raise WorkerGroupError(problem, failures)


def find_hung_ranks(
    activities: Mapping[int, ThreadActivity], over: Set[int], still: Set[int], world_size: int
) -> Set[int]:
    """Return the ranks that hang; empty if the loop is only slow.

    Args:
        activities: What was observed of the loop's thread, by rank.
        over: Ranks that have exceeded the limit of their phase.
        still: Ranks whose thread has not run for some time.
        world_size: Number of ranks.
    """
    stopped = {rank for rank, activity in activities.items() if activity.is_stopped}
    stuck = {rank for rank in over & still if not activities[rank].waits}
    is_deadlock = len(over & still) == world_size
    return stopped or stuck or (over if is_deadlock else set())
