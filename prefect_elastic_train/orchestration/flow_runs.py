"""The flow runs around a training: which of them it is for, and whether one of them has come to an end.

It is for the root of the flow runs that call each other, which a retry starts again. Prefect makes a new flow run for
a subflow when its parent is retried. What stays is the root's id, and the call of the subflow in its parent.

Python shows signals to the main thread only, and nobody signals a flow that runs without a runner. Without a look at
the flow runs, a cancelled flow would wait for a training in another thread, perhaps for weeks.
"""

from __future__ import annotations

import contextvars
import logging
import multiprocessing
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from multiprocessing.process import BaseProcess
from typing import TypeVar
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import LogSort
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events.filters import EventFilter, EventNameFilter, EventRelatedFilter, EventResourceFilter
from prefect.events.related import object_as_related_resource, tags_as_related_resources
from prefect.states import Cancelled

from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.orchestration.publisher import OF_ATTEMPTS, PREFIX
from prefect_elastic_train.runs.identity import Call

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: How long the Prefect API is asked for the parents of a flow run, and for the name of its deployment.
_LOOK_UP_SECONDS = 30.0

# Calls of the user's own flows are all that this package sees of a flow run, so what tells its trainings apart has to
# outlive them: how many there were, and where a flow run stands, which an API that is away later must not change.
_places: dict[str, Place] = {}
_counts: defaultdict[tuple[str, ...], Iterator[int]] = defaultdict(lambda: count(1))
_kept_numbers: dict[tuple[str, ...], int] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Place:
    """Where a flow run stands, and which of its trainings one is."""

    #: The root, which its trainings belong to. Outside of flows a made-up one.
    owner: Owner
    #: The flow run, the one that called it, and so on up to the root; none outside of flows.
    flow_run_ids: tuple[str, ...] = ()
    #: The calls of subflows that lead from the root to it; none for the root.
    calls: tuple[Call, ...] = ()
    #: What the events of a subflow's training relate to besides what Prefect finds itself: the root and its own.
    related: tuple[dict[str, str], ...] = ()
    #: Name of the flow itself, and which training of the flow run it is, counted from 1.
    flow_name: str = ""
    number: int = 1
    #: The flow run, or the root that it belongs to, ran before, perhaps in another process.
    resumed: bool = False


def ask_prefect(question: Callable[[SyncPrefectClient], _T], seconds: float) -> _T | None:
    """Ask the Prefect API in a thread, since its client repeats a question for a minute; None without an answer."""
    answers: list[_T] = []

    def ask() -> None:
        try:
            with get_client(sync_client=True) as client:
                answers.append(question(client))
        except Exception as error:  # noqa: BLE001 - no answer, whatever the reason
            logger.warning("the Prefect API gave no answer: %s", error)

    context = contextvars.copy_context()  # Prefect's settings and client
    thread = threading.Thread(target=context.run, args=(ask,), name="elastic-train-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def last_told_at(client: SyncPrefectClient, run_name: str, flow_run_ids: Sequence[str]) -> float | None:
    """When an earlier task run of a run's training last logged something, less 2 s: rather told twice than never."""
    # It was of one of these flow runs or of a subflow of theirs; others may have runs of that name in other storages.
    own, ids = TaskRunContext.get(), {"any_": flow_run_ids}
    flows = FlowRunFilter.model_validate({"operator": "or_", "id": ids, "parent_flow_run_id": ids})
    named = TaskRunFilter.model_validate({"name": {"any_": [run_name]}})
    tasks = client.read_task_runs(flow_run_filter=flows, task_run_filter=named)
    earlier = [task.id for task in tasks if own is None or task.id != own.task_run.id]
    logs = LogFilter.model_validate({"task_run_id": {"any_": earlier}})
    newest = client.read_logs(logs, limit=1, sort=LogSort.TIMESTAMP_DESC) if earlier else []
    return newest[0].timestamp.timestamp() - 2.0 if newest else None


def has_begun(client: SyncPrefectClient, run_name: str, flow_run_id: str) -> bool:
    """True if Prefect has events of an attempt of the run that belongs to the flow run."""
    found = client.read_events(
        EventFilter(
            event=EventNameFilter(name=OF_ATTEMPTS),
            resource=EventResourceFilter(id=[f"{PREFIX}{run_name}"]),
            related=EventRelatedFilter(id=[f"prefect.flow-run.{flow_run_id}"]),
        ),
        limit=1,
    )
    return bool(found.events)


def this_training() -> Place:
    """Find the place of the training that is asked for just now, and count it among those of its flow run."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return Place(Owner(flow_run_id=uuid4().hex))
    flow_run_id, executions = str(context.flow_run.id), context.flow_run.run_count or 0
    number = _numbered(("training", flow_run_id, str(executions)), flow_run_id)
    place = current_place(context)
    return replace(place, number=number, resumed=place.resumed or executions > 1)


def current_place(context: FlowRunContext) -> Place:
    """Return the place of a flow run that this process executes. Found once, it stays."""
    flow_run, flow_name = context.flow_run, context.flow.name if context.flow else ""
    assert flow_run is not None
    own_id = str(flow_run.id)
    if own_id in _places:
        return _places[own_id]
    place = Place(_owner(flow_run, flow_name), (own_id,))
    if not is_root(flow_run) or flow_run.deployment_id is not None:
        found = ask_prefect(lambda client: _climb(client, flow_run, flow_name), _LOOK_UP_SECONDS)
        if found is None and not is_root(flow_run):
            logger.warning(
                "cannot ask the Prefect API which flow run calls %r: a retry of that one will not go on with "
                "its trainings",
                flow_run.name,
            )
        place = found or place
    return _places.setdefault(own_id, replace(place, flow_name=flow_name))


def is_root(flow_run: FlowRun) -> bool:
    """Whether a flow run has a life of its own: what a person or a runner has started can be started again."""
    return (
        flow_run.parent_task_run_id is None
        or flow_run.deployment_id is not None
        or flow_run.work_pool_name is not None
        or os.environ.get("PREFECT__FLOW_RUN_ID") == str(flow_run.id)
    )


def _climb(client: SyncPrefectClient, flow_run: FlowRun, flow_name: str) -> Place:
    ids, found = [str(flow_run.id)], []
    while not is_root(flow_run):
        # Prefect represents the call of a subflow by a task run of the parent, and counts the calls of each flow there.
        call = client.read_task_run(UUID(str(flow_run.parent_task_run_id)))
        if call.flow_run_id is None:
            break
        name = flow_name if len(ids) == 1 else call.name.removesuffix(f"-{call.dynamic_key}")
        found.append((name, call.dynamic_key, ids[-1]))
        flow_run = client.read_flow_run(call.flow_run_id)
        ids.append(str(flow_run.id))
    owner = _owner(flow_run, client.read_flow(flow_run.flow_id).name)
    related = [object_as_related_resource("flow-run", "flow-run", flow_run)]
    if flow_run.deployment_id is not None:
        deployment = client.read_deployment(flow_run.deployment_id)
        owner = owner.model_copy(update={"deployment_name": deployment.name})
        related.append(object_as_related_resource("deployment", "deployment", deployment))
    related += tags_as_related_resources(flow_run.tags)
    calls: list[Call] = []
    for (name, key, child_id), parent_id in zip(reversed(found), reversed(ids[1:]), strict=True):
        number = str(int(key) + 1) if key.isdigit() else ""
        if not number:  # in a task, where keys are random: ``t`` and which call in the parent's tasks it is
            outer = (f"{call.flow_name} {call.number}" for call in calls)
            scope = ("subflow", owner.flow_run_id, str(flow_run.run_count), *outer, name)
            number = f"t{_kept((child_id,), partial(_numbered, scope, parent_id))}"
        calls.append(Call(name, number))
    around = tuple(one.root for one in related) if len(ids) > 1 else ()
    return Place(owner, tuple(ids), tuple(calls), around, resumed=(flow_run.run_count or 0) > 1)


def _owner(flow_run: FlowRun, flow_name: str) -> Owner:
    ids = {"flow_run_id": str(flow_run.id), "deployment_id": str(flow_run.deployment_id or "")}
    return Owner(**ids, flow_name=flow_name, flow_run_name=flow_run.name, execution=flow_run.run_count)


def _numbered(key: tuple[str, ...], flow_run_id: str) -> int:
    """Count the calls with a key from 1; what a retried task of the user does again keeps its number."""
    task = TaskRunContext.get()
    with _lock:
        if task is None or str(task.task_run.flow_run_id) != flow_run_id:
            return next(_counts[key])
        task_run = (*key, str(task.task_run.id))
        in_this_try = next(_counts[(*task_run, str(task.task_run.run_count))])
        return _kept((*task_run, f"number {in_this_try}"), lambda: next(_counts[key]))


def _kept(key: tuple[str, ...], make: Callable[[], int]) -> int:
    with _lock:
        return _kept_numbers.get(key) or _kept_numbers.setdefault(key, make())


def wants_an_end(state: State | None) -> bool:
    """Whether a flow run's state is an end for its trainings."""
    # Crashed is none: a watchdog sets it when Prefect has not heard of a flow run, and that may be living. Nor is
    # Completed, since a flow may end before what it has submitted.
    return state is not None and (state.is_cancelling() or state.is_cancelled() or state.is_failed())


def mark_cancelled(client: SyncPrefectClient, flow_run_ids: Sequence[str]) -> None:
    """Say of a flow run, the last, that its cancellation is carried out, and of subflows in it that have not ended."""
    # If it is no longer being cancelled, it had ended, and may be executed again by now.
    for flow_run_id in map(UUID, flow_run_ids):
        state = client.read_flow_run(flow_run_id).state
        if state is None or state.is_cancelling() or not (state.is_final() or str(flow_run_id) == flow_run_ids[-1]):
            client.set_flow_run_state(flow_run_id, Cancelled(message="The training was cancelled."), force=True)


def flows_around() -> Iterator[FlowRunContext]:
    """The flows of this process that the caller runs in, the innermost first."""
    context = FlowRunContext.get()
    while context is not None:
        yield context
        outer = context._token.old_value if context._token is not None else None
        context = outer if isinstance(outer, FlowRunContext) else None


def is_ending(flow: FlowRunContext) -> bool:
    """Whether a flow ends, or has ended, otherwise than completed; this shows in any thread."""
    # Prefect's engine leaves the context of a flow run before it waits for the flow's threads. If the run is not
    # completed by then, it ends by a signal or another exception, and nobody wants the training to go on.
    state = flow.flow_run.state if flow.flow_run is not None else None
    return not state.is_completed() if state is not None and state.is_final() else flow._token is None


def end_with_flow_process(flows: Sequence[FlowRunContext]) -> None:
    """Exit with the process that executes the flows, if this one is a worker of its process pool.

    Such a worker would not notice that its flow process was killed, and train on.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and (not flows or any(flow.detached for flow in flows)):
        _end_with(parent)


@cache
def _end_with(parent: BaseProcess) -> None:
    """Exit once the parent has exited; the guard then cleans up, as after a flow process."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="elastic-train-parent", daemon=True).start()


def ended_flow_run(client: SyncPrefectClient, flow_run_ids: Sequence[str]) -> str:
    """Return the outermost (last) of these flow runs whose state ends their trainings; empty if there is none."""
    flow_runs = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": flow_run_ids}}))
    ended = {str(flow_run.id) for flow_run in flow_runs if wants_an_end(flow_run.state)}
    return next((flow_run_id for flow_run_id in reversed(flow_run_ids) if flow_run_id in ended), "")


class FlowRunWatch:
    """Looks at the states of a flow run and those that it is called from now and then, in a thread of its own.

    An API that is away is no news: the last answer stands.
    """

    #: The outermost flow run whose state is an end for the training; empty as long as there is none.
    ended = ""

    def __init__(self, flow_run_ids: Sequence[str], interval_seconds: float) -> None:
        self._flow_run_ids, self._interval = flow_run_ids, interval_seconds
        self._closed = threading.Event()
        context = contextvars.copy_context()  # Prefect's settings and client
        if flow_run_ids:
            threading.Thread(target=context.run, args=(self._run,), name="elastic-train-flow-run", daemon=True).start()

    def close(self) -> None:
        """Look no more; a look that is under way is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        seconds = self._interval
        with get_client(sync_client=True) as client:
            while not self._closed.wait(seconds):
                try:
                    self.ended = ended_flow_run(client, self._flow_run_ids)
                    seconds = self._interval
                except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                    logger.debug("cannot read the state of the flow run: %s", error)
                    seconds = min(2 * seconds, 4 * self._interval)  # perhaps a rate limit
