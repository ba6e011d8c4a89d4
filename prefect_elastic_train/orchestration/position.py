"""The position of a training: the flow runs around it, and its number among the trainings of its flow run.

A training belongs to the root of the flow runs around it, because a retry starts the root again. When the parent is
retried, Prefect makes a new flow run for a subflow. The id of the root and the call of the subflow in its parent stay
the same, so run names are made from them.
"""

import logging
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import RelatedResource
from prefect.events.related import object_as_related_resource, tags_as_related_resources

from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.runs.fingerprints import Call

from .flow_run_state import query_prefect

logger = logging.getLogger(__name__)

#: Time limit for reading the parents of a flow run and the name of its deployment.
_QUERY_SECONDS = 30.0


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a training: the flow runs around it, and its number among the trainings of its flow run.

    Attributes:
        owner: The root flow run, which owns the training. Outside of flows it has a random id.
        flow_run_ids: The flow run of the training, its parent, and so on up to the root; empty outside of flows.
        calls: The calls of subflows from the root to the flow run of the training; empty for the root.
        related: Prefect resources of the root flow run, for the Prefect events of a training in a subflow. Prefect adds
            those resources of the training's own flow run that are not in this list.
        number: Number of the training in its flow run, counted from 1.
        resumed: True if the flow run or its root flow run was executed before, perhaps in another process.
    """

    owner: Owner
    flow_run_ids: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    related: tuple[RelatedResource, ...] = ()
    number: int = 1
    resumed: bool = False


def count_training() -> TrainingPosition:
    """Number a new training within the current flow run, and return its position.

    Called once for each call of ``elastic_train``.
    """
    context = FlowRunContext.get()
    if not context or not context.flow_run:
        return TrainingPosition(Owner(flow_run_id=uuid4().hex))
    flow_run_id = str(context.flow_run.id)
    executions = context.flow_run.run_count
    number = _registry.next_number(("training", flow_run_id, executions), flow_run_id)
    position = current_position(context)
    return replace(position, number=number, resumed=max(executions, position.owner.execution) > 1)


def current_position(context: FlowRunContext) -> TrainingPosition:
    """Return the position of trainings in a flow run of this process, with number 1.

    The Prefect API is queried once a flow run.
    """
    flow_run = context.flow_run
    assert flow_run
    flow_run_id = str(flow_run.id)
    if flow_run_id in _registry.positions:
        return _registry.positions[flow_run_id]
    position = query_prefect(_look_up, flow_run, timeout_seconds=_QUERY_SECONDS)
    if position is None:
        position = _position_of_root(flow_run, context.flow.name if context.flow else "")
        if not is_root(flow_run):
            logger.warning(
                "cannot read the parent of flow run %r from the Prefect API: a retry of the parent will not continue "
                "the trainings of this flow run",
                flow_run.name,
            )
    return _registry.positions.setdefault(flow_run_id, position)


def is_root(flow_run: FlowRun) -> bool:
    """Return True if a person or a runner started a flow run, so that it can be started again without its caller."""
    return (
        flow_run.parent_task_run_id is None
        or flow_run.deployment_id is not None
        or flow_run.work_pool_name is not None
        or os.environ.get("PREFECT__FLOW_RUN_ID") == str(flow_run.id)
    )


def _look_up(client: SyncPrefectClient, flow_run: FlowRun) -> TrainingPosition:
    """Read the position of a flow run from the Prefect API: that of its parent, extended by the call of the subflow."""
    flow_name = client.read_flow(flow_run.flow_id).name
    # Prefect represents the call of a subflow by a task run of the parent, and counts the calls of each flow there.
    call = None if is_root(flow_run) else client.read_task_run(UUID(str(flow_run.parent_task_run_id)))
    if not call or not call.flow_run_id:
        deployment = client.read_deployment(flow_run.deployment_id) if flow_run.deployment_id else None
        return _position_of_root(flow_run, flow_name, deployment)
    parent = _look_up(client, client.read_flow_run(call.flow_run_id))
    if call.dynamic_key.isdigit():
        number = str(int(call.dynamic_key) + 1)
    else:  # a call in a task has a random key: ``t`` and its number among the calls in tasks of the parent
        key = ("subflow", parent.owner.flow_run_id, parent.owner.execution, parent.calls, flow_name)
        with _registry.lock:
            number = f"t{_number_in_tasks(str(flow_run.id), parent.flow_run_ids[0], key)}"
    return replace(
        parent, flow_run_ids=(str(flow_run.id), *parent.flow_run_ids), calls=(*parent.calls, Call(flow_name, number))
    )


def _position_of_root(
    flow_run: FlowRun, flow_name: str, deployment: DeploymentResponse | None = None
) -> TrainingPosition:
    owner = Owner(
        flow_run_id=str(flow_run.id),
        deployment_id=str(flow_run.deployment_id or ""),
        deployment_name=deployment.name if deployment else "",
        flow_name=flow_name,
        flow_run_name=flow_run.name,
        execution=flow_run.run_count,
    )
    resources = [
        *tags_as_related_resources(flow_run.tags),
        object_as_related_resource("flow-run", "flow-run", flow_run),
    ]
    if deployment:
        resources.append(object_as_related_resource("deployment", "deployment", deployment))
    return TrainingPosition(owner, (owner.flow_run_id,), related=tuple(resources))


class _Registry:
    """The positions of the flow runs in this process, and the numbers of the trainings and subflows called in them.

    The package sees a flow run only in the calls of the user's flows. The registry outlives these calls.
    """

    def __init__(self) -> None:
        self.positions: dict[str, TrainingPosition] = {}
        self.lock = threading.RLock()
        self._numbers: defaultdict[tuple[object, ...], dict[object, int]] = defaultdict(dict)

    def next_number(self, key: tuple[object, ...], flow_run_id: str) -> int:
        """Return the number of a new call of a training or subflow. Calls with the same key are counted from 1.

        A call in a task of the flow run keeps its number when the task is retried.
        """
        task = TaskRunContext.get()
        if task is None or str(task.task_run.flow_run_id) != flow_run_id:
            return self._number_for(key, object())
        task_run = task.task_run
        call = self._number_for((*key, task_run.id, task_run.run_count), object())
        return self._number_for(key, (task_run.id, call))

    def _number_for(self, key: tuple[object, ...], call: object) -> int:
        """Return the number of a call among those with the same key. A new call gets the next number."""
        with self.lock:
            numbers = self._numbers[key]
            return numbers.setdefault(call, len(numbers) + 1)


@cache  # the flow run keeps its number
def _number_in_tasks(flow_run_id: str, parent_id: str, key: tuple[object, ...]) -> int:
    """Return the number of a subflow among those with the same key that tasks of its parent flow run called."""
    return _registry.next_number(key, parent_id)


_registry = _Registry()
