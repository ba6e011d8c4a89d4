"""Flow runs that nobody executes any more, and nobody has said so: they look running for ever.

Prefect offers a retry for final states only. Whoever resumes such a run has to end it first, and should not do that to
one that lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Cancelled, Crashed

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.flow_runs import is_root
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.storage.opening import Storage

#: Name of the state, of type Crashed, that a dead run gets. Automations for Crashed runs shall not resume it, too.
LOST = "Lost"
#: A run counts as living until it has missed so many of Prefect's heartbeats, by default one in 180 s.
_MISSED_BEATS = 2
_HEARTBEAT_SECONDS = 180
#: A runner kills 30 s after the signal, and a training waits 40 s for a runner that has died.
_CANCELLATION_SECONDS = 90.0


def resume(client: SyncPrefectClient, flow_run_id: UUID, *, force: bool = False) -> Iterator[str]:
    """End a flow run that is dead, and have it executed again; say each step when it is done.

    A run that looks running becomes Lost, of type Crashed, and one that looks cancelling Cancelled, which is the end
    of it. What has crashed, failed or was cancelled before is scheduled again as by the Retry of Prefect's UI. Unless
    it is forced, one that shows a sign of life is refused.
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
        yield (
            "It has no deployment, so no runner will take it: execute it with `prefect flow-run retry "
            f"{flow_run_id} --entrypoint file.py:flow`, where it was started; that of `elastic-train run` is "
            "prefect_elastic_train.train_flow.train"
        )
        return
    _set(client, flow_run_id, AwaitingRetry(message="Resumed with `elastic-train resume`."))
    yield f"{name} is scheduled again: the next free runner of its deployment takes it"


def flow_run_of(run_name: str, storages: Sequence[Storage]) -> UUID:
    """Find the flow run that a run belongs to: that of its newest attempt, or which claimed it."""
    places = ", ".join(storage.uri for storage in storages) or "anywhere that is looked at: say where with --storage"
    try:
        found = [RunDirectory(storage.run(run_name)).owner for storage in storages if run_name in storage.run_names()]
    except OSError as error:
        raise ConfigurationError(f"cannot look for run {run_name!r} in {places}: {error}") from error
    owners = {owner.flow_run_id: owner for owner in found if owner is not None}
    if not owners:
        raise ConfigurationError(f"{run_name!r} is no id of a flow run, and no run of this name is in {places}")
    if len(owners) > 1:
        raise ConfigurationError(f"runs of the name {run_name!r} are in several of {places}: give one --storage")
    [owner] = owners.values()
    try:
        return UUID(owner.flow_run_id if owner.is_flow_run else "")
    except ValueError as error:
        raise ConfigurationError(
            f"run {run_name!r} belongs to {owner.describe()}, which cannot be resumed; to go on with the run, "
            f"train with run_name={run_name!r} and resume=True"
        ) from error


def _signs_of_life(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> Iterator[str]:
    """Find what tells that a flow run is being executed, or is about to be, the quick looks first."""
    now = datetime.now(timezone.utc)
    age = (now - state.timestamp).total_seconds()
    if state.is_pending() or (state.is_cancelling() and age < _CANCELLATION_SECONDS):
        yield f"it is {state.name} for {age:.0f} s, and somebody may be about to change that"
    for process in psutil.process_iter():
        try:  # Prefect's runners write the id into the environment of what they start
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id):
                yield f"process {process.pid} ({process.name()}) on this machine belongs to it"
        except psutil.Error:
            continue
    silence = _MISSED_BEATS * (get_current_settings().flows.heartbeat_frequency or _HEARTBEAT_SECONDS)
    beats = EventFilter(
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
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
