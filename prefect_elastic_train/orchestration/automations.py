"""Prefect automations as code: they resume dead flow runs, start evaluations and send alerts.

Each deployment or tag has two automations for resuming. One resumes a Crashed flow run: the same flow run, so that its
trainings continue where they were. The other sets flow runs without a heartbeat to Crashed, when no process is left to
do so; the first then resumes them. A flow run that was cancelled or failed is not resumed. An optional third starts
another deployment at each new best checkpoint, or when a training has completed. An optional fourth sends a message for
each failure.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from prefect.automations import AutomationCore, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, RunDeployment, SendNotification
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for

from prefect_elastic_train.core.outcomes import ConfigurationError

from .flow_run_resume import HEARTBEAT, LOST
from .prefect_events import DRIVER_RESTARTED, PREFIX, WORKER_FAILED

#: Prefect events that start an evaluation, each with the checkpoint's URI from its payload.
_EVALUATIONS = {
    "best-checkpoint": "{{ event.payload.checkpoint_uri }}",
    "completed": "{{ event.payload.best_checkpoint_uri or event.payload.checkpoint_uri }}",
}
#: Prefect's events of a flow run that starts to run, the first time and again.
_STARTS = {"prefect.flow-run.Running", "prefect.flow-run.Retrying", "prefect.flow-run.Rerunning"}
#: Prefect's events of states without heartbeats: final ones, and those of a flow run that is scheduled again, paused or
#: suspended.
_SILENCES = {
    "prefect.flow-run.Completed",
    "prefect.flow-run.Failed",
    "prefect.flow-run.TimedOut",
    "prefect.flow-run.Cancelled",
    "prefect.flow-run.Crashed",
    f"prefect.flow-run.{LOST}",
    "prefect.flow-run.AwaitingRetry",
    "prefect.flow-run.Scheduled",
    "prefect.flow-run.Paused",
    "prefect.flow-run.Suspended",
}
#: Events with an alert. Subject and body have the run, the reason, what happens next, and a link.
_FAILURES = {
    WORKER_FAILED,
    DRIVER_RESTARTED,
    "prefect.flow-run.Failed",
    "prefect.flow-run.TimedOut",
    "prefect.flow-run.Crashed",
}
_SUBJECT = f"""{{% if event.event == "{WORKER_FAILED}" %}}Workers failed\
{{% elif event.event == "{DRIVER_RESTARTED}" %}}\
{{{{ "Resumed" if event.payload.counted == 1 else "A driver was lost" }}}}\
{{% else %}}{{{{ event.resource["prefect.state-name"] }}}}{{% endif %}}: {{{{ flow_run.name }}}}"""
_BODY = f"""{{% set payload = event.payload %}}\
{{% if event.event == "{WORKER_FAILED}" %}}Run {{{{ payload.run_name }}}}: {{{{ payload.reasons | join("; ") }}}}. \
{{% if payload.retried %}}The worker group is restarted\
{{% if payload.reports_lost %}}; reports that are done again: {{{{ payload.reports_lost }}}}{{% endif %}}.\
{{% else %}}{{{{ payload.gives_up | capitalize }}}}: the attempt ends.{{% endif %}}\
{{% elif event.event == "{DRIVER_RESTARTED}" %}}Run {{{{ payload.run_name }}}}: {{{{ payload.reason }}}}. \
A new driver resumes from {{{{ payload.checkpoint or "the beginning" }}}}.\
{{% else %}}{{{{ event.resource["prefect.state-message"].rstrip(".") }}}}. \
{{% if event.event.endswith("Crashed") %}}\
Its automation, if there is one, resumes it from the last checkpoint; else a Retry does.\
{{% else %}}It stays {{{{ event.resource["prefect.state-name"] }}}}; a Retry resumes from the last checkpoint, if any.\
{{% endif %}}{{% endif %}}"""
#: Time after its start in which a flow run may crash. Longer than any training.
_LIFETIME = timedelta(days=366)
#: State message of a flow run whose terminal got Ctrl-C, which the user meant. An async flow has it only if the signal
#: comes while it trains; else its message is the same as after the loss of a machine.
_INTERRUPTED = "Execution was aborted by an interrupt signal."


class _Template(NamedTuple):
    """An automation that is not yet restricted to the flow runs of a deployment or tag."""

    name: str
    description: str
    action: ActionTypes
    trigger: dict[str, Any]


def save_automations(
    client: SyncPrefectClient,
    deployments: Sequence[str],
    tags: Sequence[str],
    max_resumes: int,
    heartbeat_timeout_seconds: float,
    evaluate_with: str,
    evaluate_at: str,
    alert: str,
) -> list[tuple[str, str]]:
    """Create or update the Prefect automations for deployments and tags. A repeated call changes nothing.

    Each deployment and each tag gets two automations: one resumes crashed flow runs, one sets flow runs without a
    heartbeat to Crashed. On request, a third starts a deployment with checkpoints, and a fourth sends a message for
    each failure.

    Args:
        client: Client of the Prefect API.
        deployments: The deployments to whose flow runs the automations apply, as ``flow/deployment``.
        tags: The tags to whose flow runs the automations apply.
        max_resumes: The most times that one flow run is resumed.
        heartbeat_timeout_seconds: A flow run without a heartbeat for this time is set to Crashed. It must be longer
            than any outage of the Prefect API that flow runs shall survive.
        evaluate_with: Deployment to start with checkpoints, as ``flow/deployment``. Empty: no automation for it is
            created, and an existing one stays as it is.
        evaluate_at: Event that starts that deployment: ``"best-checkpoint"`` (each new best checkpoint) or
            ``"completed"`` (each completed training).
        alert: Notification block for messages, as ``type/name``. Empty: no automation for messages is created, and an
            existing one stays as it is.

    Returns:
        A pair for each automation: ``created``, ``updated`` or ``unchanged``, and the name of the automation.

    Raises:
        ConfigurationError: Neither a deployment nor a tag is named, ``evaluate_at`` is unknown, or a deployment or the
            notification block does not exist.
    """
    if not deployments and not tags:
        raise ConfigurationError("name at least one deployment (flow/deployment) or tag whose runs shall be resumed")
    if evaluate_at not in _EVALUATIONS:
        raise ConfigurationError(f"evaluate_at={evaluate_at!r}: must be one of {', '.join(_EVALUATIONS)}")
    # Each is identified in Prefect's events by a role and an id.
    resources = {name: f"deployment.{_deployment_id(client, name)}" for name in deployments}
    resources |= {f"tag {tag}": f"tag.{tag}" for tag in tags}
    templates = [*_resume_automations(max_resumes, heartbeat_timeout_seconds)]
    if evaluate_with:
        templates.append(_evaluate_automation(evaluate_with, _deployment_id(client, evaluate_with), evaluate_at))
    if alert:
        templates.append(_alert_automation(alert, _notification_block_id(client, alert)))
    return [_save(client, template, label, resource) for label, resource in resources.items() for template in templates]


def _deployment_id(client: SyncPrefectClient, name: str) -> UUID:
    try:
        return client.read_deployment_by_name(name).id
    except (ObjectNotFound, ValueError) as error:
        raise ConfigurationError(
            f"there is no deployment {name!r} ({error}), as flow/deployment; see `prefect deployment ls`"
        ) from error


def _notification_block_id(client: SyncPrefectClient, name: str) -> UUID:
    block_type, _, short = name.partition("/")
    try:
        document = client.read_block_document_by_name(short, block_type)
    except (ObjectNotFound, ValueError) as error:
        raise ConfigurationError(f"there is no block {name!r}, as type/name; see `prefect block ls`") from error
    if document.block_schema is None or "notify" not in document.block_schema.capabilities:
        raise ConfigurationError(f"block {name!r} sends no notifications; use one such as slack-webhook/team-alerts")
    return document.id


def _resume_automations(max_resumes: int, heartbeat_timeout_seconds: float) -> Iterator[_Template]:
    limit = f"{max_resumes} times at most"
    timeout = f"{heartbeat_timeout_seconds:g} s"
    yield _Template(
        "resume crashed runs",
        f"The same flow run is resumed after a crash, {limit}.",
        ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message=f"Resumed after a crash, {limit}."),
        {
            # A crash counts only after a start, so that a flow run which cannot be started again stays Crashed. The run
            # count is the limit.
            "after": _STARTS,
            "expect": {"prefect.flow-run.Crashed"},
            "match": {
                "prefect.resource.id": "prefect.flow-run.*",
                "prefect.run-count": [str(count) for count in range(1, max_resumes + 1)],
                "prefect.state-message": f"!{_INTERRUPTED}",
            },
            "for_each": {"prefect.resource.id"},
            "within": _LIFETIME,
        },
    )
    yield _Template(
        "find dead runs",
        f"A flow run without a heartbeat for {timeout} is Crashed.",
        ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {timeout}."),
        {
            "after": {HEARTBEAT},
            "expect": {HEARTBEAT} | _SILENCES,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "for_each": {"prefect.resource.id"},
            "posture": Posture.Proactive,
            "within": timedelta(seconds=heartbeat_timeout_seconds),
        },
    )


def _evaluate_automation(deployment: str, deployment_id: UUID, evaluate_at: str) -> _Template:
    """Return the automation that starts a deployment at an event of a run.

    The deployment's flow gets the parameters ``checkpoint_uri`` and ``storage``.
    """
    event = f"{PREFIX}{evaluate_at}"
    parameters = {
        "checkpoint_uri": {"__prefect_kind": "jinja", "template": _EVALUATIONS[evaluate_at]},
        "storage": {"__prefect_kind": "jinja", "template": "{{ event.payload.storage_block }}"},
    }
    return _Template(
        f"evaluate at {evaluate_at}",
        f"At the event {event}, {deployment} is started with the checkpoint.",
        RunDeployment(source="selected", deployment_id=deployment_id, parameters=parameters),
        {"expect": {event}, "match": {"prefect.resource.id": f"{PREFIX}*"}},
    )


def _alert_automation(block: str, block_id: UUID) -> _Template:
    """Return the automation that sends a message for each failure of workers, of a driver or of a flow run."""
    # The link has the UI's address of this process, because a server may not know its own.
    link = (url_for("flow-run", "FLOW_RUN_ID") or "").replace("FLOW_RUN_ID", "{{ flow_run.id }}")
    return _Template(
        "alert on failures",
        f"A message by {block} for each failure: the run, the reason, what happens next, a link.",
        SendNotification(block_document_id=block_id, subject=_SUBJECT, body=f"{_BODY}\n{link}"),
        {
            "expect": _FAILURES,
            "match": {"prefect.resource.id": [f"{PREFIX}*", "prefect.flow-run.*"]},
        },
    )


def _save(client: SyncPrefectClient, template: _Template, label: str, resource: str) -> tuple[str, str]:
    """Create or update an automation for the flow runs of a deployment or tag. Return the change and the name.

    ``resource`` is role and id of the deployment or tag in Prefect's events; ``label`` is its name for users.
    """
    # An update sends only what is set, and the server requires the posture, so it is set even where it is the default.
    related = {"prefect.resource.role": resource.partition(".")[0], "prefect.resource.id": f"prefect.{resource}"}
    trigger = {"posture": Posture.Reactive, "match_related": related, **template.trigger}
    automation = AutomationCore(
        name=f"elastic-train: {template.name} of {label}",
        description=template.description,
        trigger=EventTrigger.model_validate(trigger),
        actions=[template.action],
    )
    existing = client.read_automations_by_name(automation.name)
    if not existing:
        client.create_automation(automation)
        return "created", automation.name
    # An update resets the automation: a flow run that started before it would not be resumed.
    if existing[0].model_dump(include={*AutomationCore.model_fields}) == automation.model_dump():
        return "unchanged", automation.name
    client.update_automation(existing[0].id, automation)
    return "updated", automation.name
