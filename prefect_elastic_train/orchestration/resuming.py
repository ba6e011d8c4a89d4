"""Flow runs that nobody executes any more: resumed by a person, or by automations, which are created as code.

Such a run may look running for ever, while Prefect offers a retry for final states only. Whoever resumes it has to end
it first, and should not do that to one that lives.

Two automations for each deployment or tag resume. One resumes a Crashed run: the same flow run, so that its trainings
take over where they were. The other finds runs whose heartbeat has stopped, when nobody is left to say that they
crashed, and says so, which the first then acts on. A run that somebody has cancelled, or that failed, is left alone.
A third, if it is asked for, starts another deployment at each new best checkpoint, or when a training has completed;
a fourth sends a message for each failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple
from uuid import UUID

import psutil
from prefect.automations import AutomationCore, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, RunDeployment, SendNotification
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Cancelled, Crashed
from prefect.utilities.urls import url_for

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.flow_runs import is_root
from prefect_elastic_train.orchestration.publisher import BEST_CHECKPOINT, COMPLETED, DRIVER_RESTARTED, WORKER_FAILED

#: Name of the state, of type Crashed, that a dead run gets. Automations for Crashed runs shall not resume it, too.
LOST = "Lost"
_HEARTBEAT_SECONDS = 180
#: A runner kills 30 s after the signal, and a training waits 40 s for a runner that has died.
_CANCELLATION_SECONDS = 90.0
_RESUME = "elastic-train: resume crashed runs of "
_FIND = "elastic-train: find dead runs of "
#: When an evaluation can be started: of what, at which event, and where that has the checkpoint (the best if scored).
_EVALUATIONS = {
    "best-checkpoint": ("best checkpoints", BEST_CHECKPOINT, "checkpoint_uri"),
    "completed": ("completed trainings", COMPLETED, "best_checkpoint_uri or event.payload.checkpoint_uri"),
}
_EVALUATE = "elastic-train: evaluate {} of "
_ALERT = "elastic-train: alert on failures of "
#: Prefect's names for a run that begins to run, the first time and again.
_BEGINNINGS = {f"prefect.flow-run.{name}" for name in ("Running", "Retrying", "Rerunning")}
_HEARTBEAT = "prefect.flow-run.heartbeat"
#: What ends the wait for the next heartbeat. A run that is scheduled again, paused or suspended has none.
_FINAL = {"Completed", "Failed", "TimedOut", "Cancelled", "Crashed", LOST}
_ENDINGS = {f"prefect.flow-run.{name}" for name in (*_FINAL, "AwaitingRetry", "Scheduled", "Paused", "Suspended")}
#: What failed, in the subject and in the body of an alert: which run, why, what happens next, and where to look.
_FAILURES = {f"prefect.flow-run.{state}" for state in ("Failed", "TimedOut", "Crashed")}
_SUBJECT = f"""{{% if event.event == "{WORKER_FAILED}" %}}Workers failed\
{{% elif event.event == "{DRIVER_RESTARTED}" %}}\
{{{{ "Taken up again" if event.payload.counted == 1 else "A driver was lost" }}}}\
{{% else %}}{{{{ event.resource["prefect.state-name"] }}}}{{% endif %}}: {{{{ flow_run.name }}}}"""
_BODY = f"""{{% set told = event.payload %}}\
{{% if event.event == "{WORKER_FAILED}" %}}Run {{{{ told.run_name }}}}: {{{{ told.reasons | join("; ") }}}}. \
{{% if told.retried %}}The worker group is restarted\
{{% if told.reports_lost %}}; reports that are done again: {{{{ told.reports_lost }}}}{{% endif %}}.\
{{% else %}}{{{{ told.gives_up | capitalize }}}}: the attempt ends.{{% endif %}}\
{{% elif event.event == "{DRIVER_RESTARTED}" %}}Run {{{{ told.run_name }}}}: {{{{ told.reason }}}}. \
A new driver goes on from {{{{ told.checkpoint or "the beginning" }}}}.\
{{% else %}}{{{{ event.resource["prefect.state-message"].rstrip(".") }}}}. \
{{% if event.event.endswith("Crashed") %}}\
It goes on from the last checkpoint if its automation resumes it, else after a Retry.\
{{% else %}}It stays so; after a Retry it goes on from the last checkpoint, if any.{{% endif %}}{{% endif %}}"""
#: How long after its beginning a run may crash. Longer than any training.
_LIFETIME = timedelta(days=366)
#: The state of a run whose own terminal got Ctrl-C: its user meant that. An async flow ends so if the signal comes
#: while it trains; else with a message that the loss of a machine has, too.
_INTERRUPTED = "Execution was aborted by an interrupt signal."


def resume(client: SyncPrefectClient, flow_run_id: UUID, *, force: bool = False) -> Iterator[str]:
    """End a flow run that is dead, and have it executed again; say each step when it is done.

    A run that looks running becomes Lost, of type Crashed, and one that looks cancelling Cancelled, which is the end
    of it. What has crashed, failed or was cancelled before is scheduled again as by the Retry of Prefect's UI. Unless
    it is forced, one that shows a sign of life is refused.

    Raises:
        ConfigurationError: It cannot be resumed, or not by us: without a deployment nobody would execute it.
    """
    try:
        flow_run = client.read_flow_run(flow_run_id)
    except ObjectNotFound as error:
        raise ConfigurationError(f"there is no flow run {flow_run_id}; see `prefect flow-run ls`") from error
    name, state = flow_run.name, flow_run.state
    if not is_root(flow_run):
        raise ConfigurationError(f"flow run {name} was called by another flow run: resume that one")
    if state is None or state.is_scheduled() or state.is_paused() or state.is_completed():
        said = state.name if state is not None else "not scheduled yet"
        raise ConfigurationError(f"flow run {name} is {said}: there is nothing left to resume")
    if not state.is_final():
        sign = None if force else next(_signs_of_life(client, flow_run, state), None)
        if sign is not None:
            raise ConfigurationError(
                f"flow run {name} may be alive: {sign}. Wait, or give --force if you know better; then a process "
                "that does live gives way"
            )
        if state.is_cancelling():
            _set(client, flow_run_id, Cancelled(message="It was being cancelled, and nobody was left to do it."))
            yield f"{name} was being cancelled and is Cancelled now. To resume it, do the same again"
            return
        _set(client, flow_run_id, Crashed(name=LOST, message="It gave no sign of life, as a person has found."))
        yield f"{name} was {state.name} and is {LOST} (Crashed) now"
    if flow_run.deployment_id is None:
        raise ConfigurationError(
            f"flow run {name} has no deployment, so no runner will take it: execute it with `prefect flow-run retry "
            f"{flow_run_id} --entrypoint file.py:flow`, where it was started; that of `elastic-train run` is "
            "prefect_elastic_train.train_flow.train"
        )
    _set(client, flow_run_id, AwaitingRetry(message="Resumed with `elastic-train resume`."))
    yield f"{name} is scheduled again: the next free runner of its deployment takes it"


def flow_run_called(client: SyncPrefectClient, name: str) -> UUID:
    """Return the id of the flow run with this name."""
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])), limit=2)
    if len(found) != 1:
        raise ConfigurationError(
            f"{'several flow runs are' if found else 'no flow run is'} called {name!r}: give the id, which `prefect "
            "flow-run ls` lists; `elastic-train runs show` says to which flow run a run belongs"
        )
    return found[0].id


def _signs_of_life(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> Iterator[str]:
    """Find what tells that a flow run is being executed, or is about to be, the quick looks first."""
    now = datetime.now(timezone.utc)
    age = (now - state.timestamp).total_seconds()
    if state.is_pending() or (state.is_cancelling() and age < _CANCELLATION_SECONDS):
        yield f"it is {state.name} for {age:.0f} s, and somebody may be about to change that"
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # Prefect's runners write the id into the environment of what they start
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id):
                yield f"process {process.pid} ({process.name()}) on this machine belongs to it"
    # It counts as living until it has missed two of Prefect's heartbeats.
    silence = 2 * (get_current_settings().flows.heartbeat_frequency or _HEARTBEAT_SECONDS)
    beats = EventFilter(
        event=EventNameFilter(name=[_HEARTBEAT]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{flow_run.id}"]),
        occurred=EventOccurredFilter(since=now - timedelta(seconds=silence)),
    )
    if client.read_events(beats, limit=1).events:
        yield f"it has sent a heartbeat within {silence} s"


def _set(client: SyncPrefectClient, flow_run_id: UUID, state: State) -> None:
    """Propose a state as the UI does, under Prefect's rules."""
    answer = client.set_flow_run_state(flow_run_id, state)
    if answer.state is None or answer.state.name != state.name:
        reason = getattr(answer.details, "reason", None) or "no reason given"
        raise ConfigurationError(f"Prefect did not make the flow run {state.name}: {reason}")


class Scope(NamedTuple):
    """Which flow runs some automations are for: a deployment's or a tag's, by what people call it and by its id."""

    label: str
    role: str
    id: str


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
    alert: str = "",
) -> list[tuple[str, str]]:
    """Create the automations of some scopes, or bring them up to date; doing so again changes nothing.

    Without a heartbeat for so long a run counts as crashed: longer than any outage of the Prefect API that the runs
    shall survive untouched. Evaluation and alert of before stay if there are none now. Returns what was done with each.
    """
    if evaluate_at not in _EVALUATIONS:
        raise ConfigurationError(f"evaluate_at={evaluate_at!r}: must be one of {', '.join(_EVALUATIONS)}")
    automations = [one for scope in wanted for one in _resuming(scope, max_resumes, heartbeat_timeout_seconds)]
    if evaluate_with:
        deployment_id = _deployment_id(client, evaluate_with)
        automations += [_evaluating(scope, evaluate_with, deployment_id, evaluate_at) for scope in wanted]
    if alert:
        block_id = _notification_block_id(client, alert)
        automations += [_alerting(scope, alert, block_id) for scope in wanted]
    return [(_save(client, automation), automation.name) for automation in automations]


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
    )


def _notification_block_id(client: SyncPrefectClient, name: str) -> UUID:
    kind, _, own_name = name.partition("/")
    try:
        found = client.read_block_document_by_name(own_name, kind)
    except (ObjectNotFound, ValueError) as error:
        raise ConfigurationError(f"there is no block {name!r}, as type/name; see `prefect block ls`") from error
    if found.block_schema is None or "notify" not in found.block_schema.capabilities:
        raise ConfigurationError(f"block {name!r} sends no notifications; give one such as slack-webhook/team-alerts")
    return found.id


def _alerting(scope: Scope, block: str, block_id: UUID) -> AutomationCore:
    """The automation that sends a message for each failure."""
    # As the UI is seen from here: a server need not know its own address.
    link = (url_for("flow-run", UUID(int=0)) or "").replace(str(UUID(int=0)), "{{ flow_run.id }}")
    return _automation(
        scope,
        _ALERT,
        f"A message by {block} for each failure: the run, why, what happens next, a link.",
        SendNotification(block_document_id=block_id, subject=_SUBJECT, body=f"{_BODY}\n{link}"),
        expect={WORKER_FAILED, DRIVER_RESTARTED, *_FAILURES},
        match={"prefect.resource.id": ["elastic-train.run.*", "prefect.flow-run.*"]},
    )


def _automation(scope: Scope, name: str, description: str, action: ActionTypes, **trigger: Any) -> AutomationCore:
    # The posture is also said where it is the client's default: of an update, what is left out is not sent.
    trigger = {"posture": Posture.Reactive, "within": timedelta(0), **trigger}
    related = {"prefect.resource.role": scope.role, "prefect.resource.id": f"prefect.{scope.role}.{scope.id}"}
    return AutomationCore(
        name=f"{name}{scope.label}",
        description=description,
        trigger=EventTrigger(match_related=related, threshold=1, **trigger),
        actions=[action],
    )


def _save(client: SyncPrefectClient, automation: AutomationCore) -> str:
    existing = client.read_automations_by_name(automation.name)
    if not existing:
        client.create_automation(automation)
        return "created"
    # An update ends what the automation waits for: a run that has begun before it would not be resumed.
    if existing[0].model_dump(include={*AutomationCore.model_fields}) == automation.model_dump():
        return "unchanged"
    client.update_automation(existing[0].id, automation)
    return "updated"
