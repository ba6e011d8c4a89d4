"""Automations around trainings, created as code: they resume dead flow runs, and start evaluations.

Two for each deployment or tag resume. One resumes a Crashed run: the same flow run, so that its trainings take over
where they were. The other finds runs whose heartbeat has stopped, when nobody is left to say that they crashed, and
says so, which the first then acts on. A run that somebody has cancelled, or that failed, is left alone.

A third, if it is asked for, starts another deployment at each new best checkpoint, or when a training has completed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture, RunDeployment
from prefect.client.schemas.objects import StateType

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.dead_runs import LOST
from prefect_elastic_train.orchestration.prefect_events import BEST_CHECKPOINT, COMPLETED

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import Automation

_RESUME = "elastic-train: resume crashed runs of "
_FIND = "elastic-train: find dead runs of "
_EVALUATE_BEST = "elastic-train: evaluate best checkpoints of "
_EVALUATE_COMPLETED = "elastic-train: evaluate completed trainings of "
_PREFIXES = (_RESUME, _FIND, _EVALUATE_BEST, _EVALUATE_COMPLETED)
#: Prefect's names for a run that begins to run, the first time and again.
_BEGINNINGS = {f"prefect.flow-run.{name}" for name in ("Running", "Retrying", "Rerunning")}
_HEARTBEAT = "prefect.flow-run.heartbeat"
#: What ends the wait for the next heartbeat. A run that is scheduled again, paused or suspended has none.
_FINAL = {"Completed", "Failed", "TimedOut", "Cancelled", "Crashed", LOST}
_ENDINGS = {f"prefect.flow-run.{name}" for name in (*_FINAL, "AwaitingRetry", "Scheduled", "Paused", "Suspended")}
#: How long after its beginning a run may crash. Longer than any training.
_LIFETIME = timedelta(days=366)


@dataclass(frozen=True)
class _Evaluation:
    """When an evaluation is started: the event, the fields of its payload that may have the checkpoint, and words."""

    prefix: str
    event: str
    checkpoint: tuple[str, ...]
    words: str


_EVALUATIONS = {
    "best-checkpoint": _Evaluation(_EVALUATE_BEST, BEST_CHECKPOINT, ("checkpoint_uri",), "Each new best checkpoint"),
    "completed": _Evaluation(
        _EVALUATE_COMPLETED,
        COMPLETED,
        ("best_checkpoint_uri", "checkpoint_uri"),  # without a score there is no best one
        "The best checkpoint of each completed training",
    ),
}
#: When an evaluation can be started.
EVALUATIONS = tuple(_EVALUATIONS)
#: The state of a run whose own terminal got Ctrl-C: its user meant that. An async flow ends so if the signal comes
#: while it trains; else with a message that the loss of a machine has, too.
_INTERRUPTED = "Execution was aborted by an interrupt signal."


@dataclass(frozen=True)
class Scope:
    """Which flow runs a pair of automations is for.

    Attributes:
        label: What people call it: a deployment's ``flow/deployment`` or ``tag <name>``.
        resource_id: Prefect's id of that resource.
        role: Prefect's name of its relation to a flow run.
    """

    label: str
    resource_id: str
    role: str

    def automations(self, max_resumes: int, heartbeat_timeout_seconds: float) -> Iterator[AutomationCore]:
        """Give the automations of this scope."""
        related = {"prefect.resource.role": self.role, "prefect.resource.id": self.resource_id}
        yield AutomationCore(
            name=f"{_RESUME}{self.label}",
            description=f"The same flow run goes on after a crash, {max_resumes} times at most.",
            trigger=EventTrigger(
                # A crash counts once it follows a beginning, so that a run which cannot even be started again
                # stays Crashed. The count of beginnings is the bound.
                after=_BEGINNINGS,
                expect={"prefect.flow-run.Crashed"},
                match={
                    "prefect.resource.id": "prefect.flow-run.*",
                    "prefect.run-count": [str(count) for count in range(1, max_resumes + 1)],
                    "prefect.state-message": f"!{_INTERRUPTED}",
                },
                match_related=related,
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=_LIFETIME,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.SCHEDULED,
                    name="AwaitingRetry",
                    message=f"Resumed after a crash, {max_resumes} times at most.",
                )
            ],
        )
        yield AutomationCore(
            name=f"{_FIND}{self.label}",
            description=f"A flow run without a heartbeat for {heartbeat_timeout_seconds:g} s is Crashed.",
            trigger=EventTrigger(
                after={_HEARTBEAT},
                expect={_HEARTBEAT, *_ENDINGS},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related=related,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=heartbeat_timeout_seconds),
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED,
                    message=f"No heartbeat for {heartbeat_timeout_seconds:g} s.",
                )
            ],
        )

    def evaluation(self, deployment: str, deployment_id: UUID, at: str) -> AutomationCore:
        """Give the automation that starts a deployment with checkpoints of this scope.

        Args:
            deployment: Its name, for people.
            deployment_id: Of a flow with the parameters ``checkpoint_uri`` and ``storage``.
            at: When, one of :data:`EVALUATIONS`.
        """
        when = _EVALUATIONS[at]
        return AutomationCore(
            name=f"{when.prefix}{self.label}",
            description=f"{when.words} starts {deployment}.",
            trigger=EventTrigger(
                expect={when.event},
                match={"prefect.resource.id": "elastic-train.run.*"},
                match_related={"prefect.resource.role": self.role, "prefect.resource.id": self.resource_id},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(0),
            ),
            actions=[
                RunDeployment(
                    source="selected",
                    deployment_id=deployment_id,
                    parameters={
                        "checkpoint_uri": _from_event(*when.checkpoint),
                        "storage": _from_event("storage_block"),
                    },
                )
            ],
        )


def _from_event(*fields: str) -> dict[str, str]:
    """Give a parameter that is the first of these fields of an event's payload which is not empty."""
    value = " or ".join(f"event.payload.{field}" for field in fields)
    return {"__prefect_kind": "jinja", "template": f"{{{{ {value} }}}}"}


@dataclass(frozen=True)
class Change:
    """What was done to one automation.

    Attributes:
        name: The automation's name.
        what: ``created``, ``updated``, ``unchanged`` or ``deleted``.
    """

    name: str
    what: str


def scopes(client: SyncPrefectClient, deployments: Sequence[str], tags: Sequence[str]) -> list[Scope]:
    """Look the deployments up.

    Args:
        client: The Prefect API.
        deployments: Their names, ``flow/deployment``.
        tags: Tags of flow runs or deployments.

    Raises:
        ConfigurationError: There is no such deployment, or nothing was named.
    """
    if not deployments and not tags:
        raise ConfigurationError("name at least one deployment (flow/deployment) or tag whose runs shall be resumed")
    found = [Scope(name, f"prefect.deployment.{_deployment_id(client, name)}", "deployment") for name in deployments]
    return [*found, *(Scope(f"tag {tag}", f"prefect.tag.{tag}", "tag") for tag in tags)]


def _deployment_id(client: SyncPrefectClient, name: str) -> UUID:
    from prefect.exceptions import ObjectNotFound

    try:
        if "/" not in name.strip("/"):
            raise ValueError("a deployment's name has the form flow/deployment")
        return client.read_deployment_by_name(name).id
    except (ObjectNotFound, ValueError) as error:
        raise ConfigurationError(f"there is no deployment {name!r} ({error}); see `prefect deployment ls`") from error


def apply(
    client: SyncPrefectClient,
    wanted: Sequence[Scope],
    max_resumes: int,
    heartbeat_timeout_seconds: float,
    evaluate_with: str = "",
    evaluate_at: str = "best-checkpoint",
) -> list[Change]:
    """Create the automations, or bring them up to date; doing so again changes nothing.

    Args:
        client: The Prefect API.
        wanted: Which flow runs they are for.
        max_resumes: How often a flow run may be resumed, at least 1.
        heartbeat_timeout_seconds: Without a heartbeat for so long, a run counts as crashed. At least 60, and
            longer than any outage of the Prefect API that the runs shall survive untouched.
        evaluate_with: Deployment that is started with checkpoints, ``flow/deployment``; its flow takes
            ``checkpoint_uri`` and ``storage``. Default none; one that was created before stays.
        evaluate_at: ``"best-checkpoint"`` for each new best one, ``"completed"`` for the best one of each training
            that has completed.

    Raises:
        ConfigurationError: A value is out of its bounds, or there is no such deployment.
    """
    if max_resumes < 1:
        raise ConfigurationError(f"max_resumes={max_resumes}: must be at least 1")
    if heartbeat_timeout_seconds < 60:
        raise ConfigurationError(
            f"heartbeat_timeout_seconds={heartbeat_timeout_seconds:g}: must be at least 60, since Prefect's heartbeats "
            "come at most every 30 s"
        )
    if evaluate_at not in _EVALUATIONS:
        raise ConfigurationError(f"evaluate_at={evaluate_at!r}: must be one of {', '.join(EVALUATIONS)}")
    evaluation = (evaluate_with, _deployment_id(client, evaluate_with)) if evaluate_with else None
    changes = []
    for scope in wanted:
        automations = list(scope.automations(max_resumes, heartbeat_timeout_seconds))
        if evaluation is not None:
            automations.append(scope.evaluation(*evaluation, evaluate_at))
        for automation in automations:
            changes.append(Change(automation.name, _bring_up_to_date(client, automation)))
    return changes


def delete(client: SyncPrefectClient, labels: Sequence[str] | None = None) -> list[Change]:
    """Delete automations that :func:`apply` has created.

    Args:
        client: The Prefect API.
        labels: Labels of their scopes; default all.
    """
    wanted = None if labels is None else {f"{prefix}{label}" for prefix in _PREFIXES for label in labels}
    changes = []
    for automation in client.read_automations():
        ours = automation.name.startswith(_PREFIXES)
        if ours and (wanted is None or automation.name in wanted):
            client.delete_automation(automation.id)
            changes.append(Change(automation.name, "deleted"))
    return changes


def _bring_up_to_date(client: SyncPrefectClient, automation: AutomationCore) -> str:
    existing = client.read_automations_by_name(automation.name)
    for twin in existing[1:]:
        client.delete_automation(twin.id)
    if not existing:
        client.create_automation(automation)
        return "created"
    if _essence(existing[0]) == _essence(automation):
        return "unchanged"
    client.update_automation(existing[0].id, automation)
    return "updated"


def _essence(automation: Automation | AutomationCore) -> dict[str, Any]:
    """What makes two automations the same, leaving out what the server adds."""
    trigger = automation.trigger
    assert isinstance(trigger, EventTrigger)
    sets = {"after", "expect", "for_each"}
    plain = {"match", "match_related", "posture", "threshold", "within"}
    return {
        "description": automation.description,
        "enabled": automation.enabled,
        "trigger": trigger.model_dump(mode="json", include=plain),
        **{name: sorted(getattr(trigger, name)) for name in sets},
        "actions": [action.model_dump(mode="json") for action in automation.actions],
    }
