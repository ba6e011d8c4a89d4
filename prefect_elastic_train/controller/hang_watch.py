"""Finds loops that hang, by the phases of their sessions: the time limit of each is learned from its duration so far.

A limit alone would stop loops that are only slow. So when a rank exceeds one, or its process does not answer, the
threads of all ranks are observed from outside. A rank hangs if it is stopped, or if the kernel does not run it for some
time and it does not wait for other ranks.
"""

import time
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence, Set
from typing import Any

import ray
from ray.train import WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.core.events import Publish, StallTimeoutLearned
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
#: Shortest limit of the first steps, and largest limit that is learned.
_LAST_SECONDS = 1800.0
_ANSWER_SECONDS = 30.0  # for the observations of all nodes
_STACKS_SECONDS = 1.0  # for the stacks that py-spy cannot read
_PAUSE_SECONDS = 15.0  # between two observations of a loop that runs
#: A hang of s seconds counts as a duration of s / 4, and of s from `_LAST_SECONDS` on, so that a phase that is only
#: slow is a hang a few times at most.
_ALARM_DIVISOR = 4.0


def phase_limit(phase: str, longest_seconds: float, steps: int) -> float:
    """Return the time limit of a phase in seconds.

    The limit is a multiple of the longest duration so far, and no quantile: durations may be heavy-tailed.

    Args:
        phase: Name of the phase.
        longest_seconds: Longest duration of this phase so far, on all ranks.
        steps: Steps of the worker group so far.
    """
    is_learned = phase == "step" and steps >= LEARNING_STEPS
    shortest = _STEP_SECONDS if is_learned else _PHASE_SECONDS.get(phase, _LAST_SECONDS)
    return max(shortest, min(_FACTOR * longest_seconds, max(_LAST_SECONDS, 2 * longest_seconds)))


class HangWatch:
    """Finds worker groups whose loop hangs, in the controller.

    Args:
        publish: Function that publishes an event.
    """

    _published = 0.0  # the limit of a step

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._longest = defaultdict[str, float](float)  # seconds, by phase

    def begin_group(self, workers: Sequence[Any]) -> None:
        """Begin to watch a new worker group. What was learned from earlier ones still holds."""
        self._workers = workers
        #: The phase of each rank by its newest answer; ``seconds`` is its begin by the clock of this process.
        self._ranks: dict[int, PhaseReport] = {}
        self._answered: dict[int, float] = {}  # time of each rank's newest answer
        self._observations: list[Any] = []
        self._observed_at = 0.0  # start of the current observation, or the earliest one of the next

    def check(self, statuses: Sequence[Any]) -> None:
        """Check the status of each rank after each poll.

        Begin to observe the ranks if one has exceeded the limit of its phase, or has not answered for as long as a step
        may take.

        Raises:
            WorkerGroupError: A rank hangs, or all ranks wait for each other.
        """
        now = time.monotonic()
        self._update(now, statuses)
        over = {
            rank
            for rank, phase in self._ranks.items()
            if now - phase.seconds > phase_limit(phase.name, self._longest[phase.name], phase.steps)
        }
        # A rank that does not answer may be stopped, in any phase.
        silence = phase_limit("step", self._longest["step"], LEARNING_STEPS)
        if not over and all(now - self._answered[rank] <= silence for rank in self._ranks):
            self._observations = []
        elif self._observations:
            self._judge(now, over)
        elif now >= self._observed_at:
            self._observe(now)

    def _update(self, now: float, statuses: Sequence[Any]) -> None:
        """Learn from the answers of a poll. A rank that did not answer is taken to be in its last known phase."""
        for rank, status in enumerate(statuses):
            report: PhaseReport | None = getattr(status, "phase", None)
            if report and status.running:
                self._answered[rank] = now
                self._ranks[rank] = report._replace(seconds=now - report.seconds)
                for phase, seconds in report.longest.items():
                    self._longest[phase] = max(self._longest[phase], seconds)
                longest = self._longest["step"]
                limit = phase_limit("step", longest, report.steps)
                if report.steps >= LEARNING_STEPS and limit != self._published:
                    self._published = limit
                    self._publish(StallTimeoutLearned(limit=f"{limit:.1f} s; the longest so far took {longest:.2g} s"))
            elif hasattr(status, "phase") or not status.running:
                self._ranks.pop(rank, None)

    def _observe(self, now: float) -> None:
        """Begin to observe the loops of all ranks, with a Ray task on each node."""
        self._observed_at = now
        threads: Any = defaultdict(dict)  # process and thread, by node and rank
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
        answers = [*finished_results(self._observations)]
        for _, answer in answers:
            activities |= answer
        hung = find_hung_ranks(activities, over, len(self._workers)) & self._ranks.keys()
        if not hung:
            if len(answers) == len(self._observations) or now - self._observed_at > _ANSWER_SECONDS:
                self._observations = []
                self._observed_at = now + _PAUSE_SECONDS
            return
        first = self._ranks[min(hung)]
        lasted = now - first.seconds
        problem = (
            f"no progress for {lasted:.1f} s in phase {first.name!r}, which has taken at most "
            f"{self._longest[first.name]:.2g} s before"
        )
        texts = query_workers(self._workers, thread_stacks, _STACKS_SECONDS)
        texts |= {rank: activity.stack for rank, activity in activities.items() if activity.stack}
        if not any(activity.is_stopped for activity in activities.values()):  # else it is certain
            if lasted < _LAST_SECONDS:
                lasted /= _ALARM_DIVISOR
            self._longest[first.name] = max(self._longest[first.name], lasted)
        raise hang_error(problem, texts, hung, len(self._workers))


def hang_error(problem: str, texts: Mapping[int, str], hung: Container[int], world_size: int) -> WorkerGroupError:
    """Return the error of a worker group that hangs.

    Args:
        problem: What lasts too long.
        texts: Position and stacks of the ranks that are known.
        hung: Ranks that hang; the others wait for them.
        world_size: Number of ranks.
    """
    failures = {}
    for rank in range(world_size):
        failures[rank] = failure = HungLoopError(f"{problem}; the rank {texts.get(rank, 'does not answer')}")
        failure.is_consequence = rank not in hung
    return WorkerGroupError(problem, failures)


def find_hung_ranks(activities: Mapping[int, ThreadActivity], over: Set[int], world_size: int) -> Set[int]:
    """Return the ranks that hang; empty if the loop is only slow.

    Args:
        activities: What was observed of the loop's thread, by rank.
        over: Ranks that have exceeded the limit of their phase.
        world_size: Number of ranks.
    """
    still = {rank for rank in over & activities.keys() if activities[rank].is_still}
    stopped = {rank for rank, activity in activities.items() if activity.is_stopped}
    stuck = {rank for rank in still if activities[rank].stack.startswith("is")}
    return stopped or stuck or (still if len(still) == world_size else set())
