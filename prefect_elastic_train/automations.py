"""Automations that resume a flow run whose process or host has died, created as code.

Two for each deployment or tag. One resumes a Crashed run: the same flow run, so that its trainings take over where
they were. The other finds runs whose heartbeat has stopped, when nobody is left to say that they crashed, and says
so, which the first then acts on. A run that somebody has cancelled, or that failed, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.schemas.objects import StateType

from prefect_elastic_train.dead_runs import LOST
from prefect_elastic_train.outcomes import ConfigurationError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import Automation

__all__ = ["DEFAULT_HEARTBEAT_TIMEOUT_SECONDS", "DEFAULT_MAX_RESUMES", "Change", "Scope", "apply", "delete", "scopes"]

DEFAULT_MAX_RESUMES = 10
#: Three of Prefect's heartbeat intervals (180 s) and some.
DEFAULT_HEARTBEAT_TIMEOUT_SECONDS = 600.0

_RESUME = "elastic-train: resume crashed runs of "
_FIND = "elastic-train: find dead runs of "
#: Prefect's names for a run that begins to run, the first time and again.
_BEGINNINGS = {f"prefect.flow-run.{name}" for name in ("Running", "Retrying", "Rerunning")}
_HEARTBEAT = "prefect.flow-run.heartbeat"
#: What ends the wait for the next heartbeat. A run that is scheduled again, paused or suspended has none.
_ENDINGS = {
    f"prefect.flow-run.{name}"
    for name in (
        "Completed",
        "Failed",
        "TimedOut",
        "Cancelled",
        "Crashed",
        LOST,
        "AwaitingRetry",
        "Scheduled",
        "Paused",
        "Suspended",
    )
}
#: How long after its beginning a run may crash. Longer than any training.
_LIFETIME = timedelta(days=366)
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
    from prefect.exceptions import ObjectNotFound

    if not deployments and not tags:
        raise ConfigurationError("name at least one deployment (flow/deployment) or tag whose runs shall be resumed")
    found = []
    for name in deployments:
        try:
            if "/" not in name.strip("/"):
                raise ValueError("a deployment's name has the form flow/deployment")
            deployment = client.read_deployment_by_name(name)
        except (ObjectNotFound, ValueError) as error:
            raise ConfigurationError(
                f"there is no deployment {name!r} ({error}); see `prefect deployment ls`"
            ) from error
        found.append(Scope(name, f"prefect.deployment.{deployment.id}", "deployment"))
    return [*found, *(Scope(f"tag {tag}", f"prefect.tag.{tag}", "tag") for tag in tags)]


def apply(
    client: SyncPrefectClient,
    wanted: Sequence[Scope],
    max_resumes: int = DEFAULT_MAX_RESUMES,
    heartbeat_timeout_seconds: float = DEFAULT_HEARTBEAT_TIMEOUT_SECONDS,
) -> list[Change]:
    """Create the automations, or bring them up to date; doing so again changes nothing.

    Args:
        client: The Prefect API.
        wanted: Which flow runs they are for.
        max_resumes: How often a flow run may be resumed, at least 1.
        heartbeat_timeout_seconds: Without a heartbeat for so long, a run counts as crashed. At least 60, and
            longer than any outage of the Prefect API that the runs shall survive untouched.

    Raises:
        ConfigurationError: A value is out of its bounds.
    """
    if max_resumes < 1:
        raise ConfigurationError(f"max_resumes={max_resumes}: must be at least 1")
    if heartbeat_timeout_seconds < 60:
        raise ConfigurationError(
            f"heartbeat_timeout_seconds={heartbeat_timeout_seconds:g}: must be at least 60, since Prefect's heartbeats "
            "come at most every 30 s"
        )
    changes = []
    for scope in wanted:
        for automation in scope.automations(max_resumes, heartbeat_timeout_seconds):
            changes.append(Change(automation.name, _bring_up_to_date(client, automation)))
    return changes


def delete(client: SyncPrefectClient, labels: Sequence[str] | None = None) -> list[Change]:
    """Delete automations that :func:`apply` has created.

    Args:
        client: The Prefect API.
        labels: Labels of their scopes; default all.
    """
    wanted = None if labels is None else {f"{prefix}{label}" for prefix in (_RESUME, _FIND) for label in labels}
    changes = []
    for automation in client.read_automations():
        ours = automation.name.startswith((_RESUME, _FIND))
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
    return {
        "description": automation.description,
        "enabled": automation.enabled,
        "trigger": trigger.model_dump(
            mode="json",
            include={
                "match",
                "match_related",
                "after",
                "expect",
                "for_each",
                "posture",
                "threshold",
                "within",
            },
        )
        | {name: sorted(getattr(trigger, name)) for name in ("after", "expect", "for_each")},
        "actions": [action.model_dump(mode="json") for action in automation.actions],
    }
