"""Automations around trainings, created as code: they resume dead flow runs, and start evaluations.

Two for each deployment or tag resume. One resumes a Crashed run: the same flow run, so that its trainings take over
where they were. The other finds runs whose heartbeat has stopped, when nobody is left to say that they crashed, and
says so, which the first then acts on. A run that somebody has cancelled, or that failed, is left alone.

A third, if it is asked for, starts another deployment at each new best checkpoint, or when a training has completed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture, RunDeployment
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes
from prefect.exceptions import ObjectNotFound

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.dead_runs import LOST
from prefect_elastic_train.orchestration.publisher import BEST_CHECKPOINT, COMPLETED

_RESUME = "elastic-train: resume crashed runs of "
_FIND = "elastic-train: find dead runs of "
#: When an evaluation can be started: of what, at which event, and where that has the checkpoint; without a score there
#: is no best one.
_EVALUATIONS = {
    "best-checkpoint": ("best checkpoints", BEST_CHECKPOINT, "checkpoint_uri"),
    "completed": ("completed trainings", COMPLETED, "best_checkpoint_uri or event.payload.checkpoint_uri"),
}
_EVALUATE = "elastic-train: evaluate {} of "
_NAMES = (_RESUME, _FIND, *(_EVALUATE.format(what) for what, _, _ in _EVALUATIONS.values()))
#: Prefect's names for a run that begins to run, the first time and again.
_BEGINNINGS = {f"prefect.flow-run.{name}" for name in ("Running", "Retrying", "Rerunning")}
_HEARTBEAT = "prefect.flow-run.heartbeat"
#: What ends the wait for the next heartbeat. A run that is scheduled again, paused or suspended has none.
_FINAL = {"Completed", "Failed", "TimedOut", "Cancelled", "Crashed", LOST}
_ENDINGS = {f"prefect.flow-run.{name}" for name in (*_FINAL, "AwaitingRetry", "Scheduled", "Paused", "Suspended")}
#: How long after its beginning a run may crash. Longer than any training.
_LIFETIME = timedelta(days=366)
#: The state of a run whose own terminal got Ctrl-C: its user meant that. An async flow ends so if the signal comes
#: while it trains; else with a message that the loss of a machine has, too.
_INTERRUPTED = "Execution was aborted by an interrupt signal."


class Scope(NamedTuple):
    """Which flow runs some automations are for: a deployment's or a tag's, by what people call it and by its id."""

    label: str
    role: str
    id: str


class Change(NamedTuple):
    """What was done to one automation: ``created``, ``updated``, ``unchanged`` or ``deleted``."""

    name: str
    what: str


def scopes(client: SyncPrefectClient, deployments: Sequence[str], tags: Sequence[str]) -> list[Scope]:
    """Look up deployments, by ``flow/deployment``, beside tags of flow runs or deployments."""
    if not deployments and not tags:
        raise ConfigurationError("name at least one deployment (flow/deployment) or tag whose runs shall be resumed")
    found = [Scope(name, "deployment", str(_deployment_id(client, name))) for name in deployments]
    return [*found, *(Scope(f"tag {tag}", "tag", tag) for tag in tags)]


def _deployment_id(client: SyncPrefectClient, name: str) -> UUID:
    try:
        return client.read_deployment_by_name(name).id
    except (ObjectNotFound, ValueError) as error:
        raise ConfigurationError(
            f"there is no deployment {name!r} ({error}), as flow/deployment; see `prefect deployment ls`"
        ) from error


def apply(
    client: SyncPrefectClient,
    wanted: Sequence[Scope],
    max_resumes: int,
    heartbeat_timeout_seconds: float,
    evaluate_with: str = "",
    evaluate_at: str = "best-checkpoint",
) -> list[Change]:
    """Create the automations of some scopes, or bring them up to date; doing so again changes nothing.

    Without a heartbeat for so long a run counts as crashed: longer than any outage of the Prefect API that the runs
    shall survive untouched. The evaluation of before stays if there is none now.
    """
    if evaluate_at not in _EVALUATIONS:
        raise ConfigurationError(f"evaluate_at={evaluate_at!r}: must be one of {', '.join(_EVALUATIONS)}")
    automations = [one for scope in wanted for one in _resuming(scope, max_resumes, heartbeat_timeout_seconds)]
    if evaluate_with:
        deployment_id = _deployment_id(client, evaluate_with)
        automations += [_evaluating(scope, evaluate_with, deployment_id, evaluate_at) for scope in wanted]
    return [Change(automation.name, _bring_up_to_date(client, automation)) for automation in automations]


def delete(client: SyncPrefectClient, labels: Sequence[str] | None = None) -> list[Change]:
    """Delete automations that :func:`apply` has created, by the labels of their scopes; by default all."""
    changes = []
    for automation in client.read_automations():
        label = next((automation.name.removeprefix(name) for name in _NAMES if automation.name.startswith(name)), None)
        if label is not None and (labels is None or label in labels):
            client.delete_automation(automation.id)
            changes.append(Change(automation.name, "deleted"))
    return changes


def _resuming(scope: Scope, max_resumes: int, heartbeat_timeout_seconds: float) -> Iterator[AutomationCore]:
    bound, silence = f"{max_resumes} times at most", f"{heartbeat_timeout_seconds:g} s"
    yield _automation(
        scope,
        _RESUME,
        f"The same flow run goes on after a crash, {bound}.",
        ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message=f"Resumed after a crash, {bound}."),
        # A crash counts once it follows a beginning, so that a run which cannot even be started again stays Crashed.
        # The count of beginnings is the bound.
        after=_BEGINNINGS,
        expect={"prefect.flow-run.Crashed"},
        match={
            "prefect.resource.id": "prefect.flow-run.*",
            "prefect.run-count": [str(count) for count in range(1, max_resumes + 1)],
            "prefect.state-message": f"!{_INTERRUPTED}",
        },
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        within=_LIFETIME,
    )
    yield _automation(
        scope,
        _FIND,
        f"A flow run without a heartbeat for {silence} is Crashed.",
        ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {silence}."),
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *_ENDINGS},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        within=timedelta(seconds=heartbeat_timeout_seconds),
    )


def _evaluating(scope: Scope, deployment: str, deployment_id: UUID, at: str) -> AutomationCore:
    """The automation that starts a deployment, of a flow that takes ``checkpoint_uri`` and ``storage``."""
    what, event, checkpoint = _EVALUATIONS[at]
    parameters = {
        parameter: {"__prefect_kind": "jinja", "template": f"{{{{ event.payload.{value} }}}}"}
        for parameter, value in {"checkpoint_uri": checkpoint, "storage": "storage_block"}.items()
    }
    return _automation(
        scope,
        _EVALUATE.format(what),
        f"At the event {event}, {deployment} is started with the checkpoint.",
        RunDeployment(source="selected", deployment_id=deployment_id, parameters=parameters),
        expect={event},
        match={"prefect.resource.id": "elastic-train.run.*"},
        posture=Posture.Reactive,
        within=timedelta(0),
    )


def _automation(scope: Scope, name: str, description: str, action: ActionTypes, **trigger: Any) -> AutomationCore:
    related = {"prefect.resource.role": scope.role, "prefect.resource.id": f"prefect.{scope.role}.{scope.id}"}
    return AutomationCore(
        name=f"{name}{scope.label}",
        description=description,
        trigger=EventTrigger(match_related=related, threshold=1, **trigger),
        actions=[action],
    )


def _bring_up_to_date(client: SyncPrefectClient, automation: AutomationCore) -> str:
    existing = client.read_automations_by_name(automation.name)
    if not existing:
        client.create_automation(automation)
        return "created"
    # An update ends what the automation waits for: a run that has begun before it would not be resumed.
    if _without_ids(existing[0]) == _without_ids(automation):
        return "unchanged"
    client.update_automation(existing[0].id, automation)
    return "updated"


def _without_ids(automation: AutomationCore) -> dict[str, Any]:
    return automation.model_dump(include={*AutomationCore.model_fields}, exclude={"trigger": {"id"}})
