"""Finds loops that hang, by the phases of their sessions: the time limit of each is learned from its duration so far.

A limit alone would stop loops that are only slow. So when a rank exceeds one, its thread is observed from outside for
some time. It hangs if it is stopped, or if the kernel did not run it at all and it does not wait for other ranks.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.train import WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.core.events import Event, StallTimeoutLearned
from prefect_elastic_train.loop.phases import PhaseReport
from prefect_elastic_train.worker.loop_inspection import thread_stacks
from prefect_elastic_train.worker.thread_activity import ThreadActivity, observe_threads

from .failures import HungLoopError
from .worker_queries import finished_results

LEARNING_STEPS = 50
_STEP_SECONDS = 4.0  # shortest limit of a step
#: Shortest limits of the other phases, which differ more. A save also waits for uploads of earlier saves.
_PHASE_SECONDS = {"loading": 600.0, "evaluation": 600.0, "save": 3900.0}
_FACTOR = 15.0  # limit of a phase, as a multiple of its longest duration so far
#: Limit of a step that is not one of many, and the one after which a loop fails although its threads run.
_LAST_SECONDS = 1800.0
_OBSERVED_SECONDS = 6.0  # for the answers of all nodes


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


class _Rank(NamedTuple):
    """The current phase of a rank by its newest answer, and its begin by the controller's clock."""

    report: PhaseReport
    began: float


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
        self._alarms = 0

    def begin_group(self, workers: Sequence[Any]) -> None:
        """Begin to watch a new worker group. What was learned from earlier ones still holds."""
        self._workers = workers
        self._ranks: dict[int, _Rank] = {}
        self._observations: list[Any] = []
        self._stacks: dict[Any, int] = {}
        self._observed_at = 0.0  # begin of the current observation, or time before which no other one begins

    def check(self, statuses: Sequence[Any]) -> None:
        """Check the phases of the ranks by the status that a poll returned for each. Call it at each poll.

        Raises:
            WorkerGroupError: A rank hangs, or all ranks wait for each other.
        """
        now = time.monotonic()
        self._update(now, statuses)
        over = {rank for rank, phase in self._ranks.items() if now - phase.began > self._limit(phase)}
        if not over:
            self._observations = []
            return
        if not self._observations:
            if now >= self._observed_at:
                self._observe(now)
            return
        pending = ray.wait(self._observations, num_returns=len(self._observations), timeout=0)[1]
        if pending and now - self._observed_at < _OBSERVED_SECONDS:
            return
        self._judge(now, over)
        self._observations = []
        self._observed_at = now + max(now - self._ranks[rank].began for rank in over)

    def _update(self, now: float, statuses: Sequence[Any]) -> None:
        """Learn from the answers of a poll. A rank that did not answer is still in the phase that it had."""
        for rank, status in enumerate(statuses):
            report: PhaseReport | None = getattr(status, "phase", None)
            if report is not None and status.running:
                self._ranks[rank] = _Rank(report, now - report.seconds)
                self._steps = max(self._steps, report.steps)
                for phase, seconds in report.longest.items():
                    self._longest[phase] = max(self._longest[phase], seconds)
            elif hasattr(status, "phase") or not status.running:
                self._ranks.pop(rank, None)
        longest = self._longest["step"]
        limit = phase_limit("step", longest, self._steps)
        if self._steps >= LEARNING_STEPS and not self._published <= limit <= 1.5 * self._published:
            self._published = limit
            self._publish(StallTimeoutLearned(timeout_seconds=limit, longest_step_seconds=longest))

    def _limit(self, rank: _Rank) -> float:
        phase = rank.report.name
        return phase_limit(phase, self._longest[phase], self._steps) * 4.0**self._alarms

    def _observe(self, now: float) -> None:
        """Begin to observe the loops of all ranks, with a Ray task on each node."""
        self._observed_at = now
        self._stacks = {worker.execute_async(thread_stacks): rank for rank, worker in enumerate(self._workers)}
        threads: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for rank, phase in self._ranks.items():
            metadata = self._workers[rank].metadata
            threads[metadata.node_id][rank] = (metadata.pid, phase.report.thread_id)
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
        too_long = {rank for rank in over if now - self._ranks[rank].began > _LAST_SECONDS * 4.0**self._alarms}
        hung = find_hung_ranks(activities, over, len(self._workers)) or too_long
        if not hung:
            return
        self._alarms += 1
        report, began = self._ranks[min(hung)]
        problem = (
            f"no progress for {now - began:.1f} s in phase {report.name!r}, which has taken at most "
            f"{self._longest[report.name]:.2g} s before"
        )
        texts = {rank: activity.stack for rank, activity in activities.items() if activity.stack}
        texts |= {self._stacks[reference]: text for reference, text in finished_results(self._stacks)}
        failures: dict[int, Exception] = {}
        for rank in range(len(self._workers)):
            state = "is stopped (SIGSTOP) and " if rank in activities and activities[rank].is_stopped else ""
            failure = HungLoopError(f"{problem}; the rank {state}{texts.get(rank, 'does not answer')}")
            failure.is_consequence = rank not in hung
            failures[rank] = failure
        raise WorkerGroupError(problem, failures)


def find_hung_ranks(activities: Mapping[int, ThreadActivity], over: set[int], world_size: int) -> set[int]:
    """Return the ranks that hang; empty if the loop is only slow.

    Args:
        activities: What was observed of the loop's thread, by rank.
        over: Ranks that have exceeded the limit of their phase.
        world_size: Number of ranks.
    """
    hung = {
        rank
        for rank, activity in activities.items()
        if activity.is_stopped or (rank in over and not activity.has_run and not activity.waits)
    }
    is_deadlock = len(over) == len(activities) == world_size and not any(
        activity.has_run or activity.is_busy for activity in activities.values()
    )
    return hung or (over if is_deadlock else set())
