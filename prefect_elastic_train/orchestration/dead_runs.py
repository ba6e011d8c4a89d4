"""Flow runs that nobody executes any more, and nobody has said so: they look running for ever.

Prefect offers a retry for final states only. Whoever resumes such a run has to end it first, and should not do that to
one that lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import psutil

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.records import AttemptRecord, Owner, RunRecord, decode
from prefect_elastic_train.orchestration.flow_runs import is_root
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import is_alive
from prefect_elastic_train.runs.commits import all_attempts, newest_attempt
from prefect_elastic_train.storage.opening import Storage

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

#: Name of the state, of type Crashed, that a dead run gets. Automations for Crashed runs shall not resume it, too.
LOST = "Lost"
#: Prefect's default, in seconds, for a flow run that has sent only one heartbeat.
_HEARTBEAT_SECONDS = 180.0
#: A run counts as living until it has missed so many heartbeats.
_MISSED_BEATS = 2
#: A runner kills 30 s after the signal, and a training waits 40 s for a runner that has died.
_CANCELLATION_SECONDS = 90.0


def resume(
    client: SyncPrefectClient, flow_run_id: UUID, storages: Sequence[Storage] = (), *, force: bool = False
) -> Iterator[str]:
    """End a flow run that is dead, and have it executed again; say each step when it is done.

    A run that looks running becomes Lost, of type Crashed, and one that looks cancelling Cancelled, which is the end
    of it. What has crashed, failed or was cancelled before is scheduled again as by the Retry of Prefect's UI.

    Args:
        client: The Prefect API.
        flow_run_id: The flow run.
        storages: Storages whose run directories are looked at for a sign of life.
        force: Do not look for signs of life.

    Raises:
        ConfigurationError: It lives, or may; or it is not a run to be resumed.
    """
    from prefect.exceptions import ObjectNotFound
    from prefect.states import AwaitingRetry, Cancelled, Crashed

    try:
        flow_run = client.read_flow_run(flow_run_id)
    except ObjectNotFound as error:
        raise ConfigurationError(f"there is no flow run {flow_run_id}; see `prefect flow-run ls`") from error
    state = flow_run.state
    _check_state(client, flow_run, state)
    assert state is not None
    if not state.is_final():
        if not force:
            _check_dead(client, flow_run, state, storages)
        if state.is_cancelling():
            _set(client, flow_run_id, Cancelled(message="It was being cancelled, and nobody was left to do it."))
            yield f"{flow_run.name} was being cancelled and is Cancelled now. To resume it, do the same again"
            return
        _set(client, flow_run_id, Crashed(name=LOST, message="It gave no sign of life, as a person has found."))
        yield f"{flow_run.name} was {state.name} and is {LOST} (Crashed) now"
    if flow_run.deployment_id is None:
        yield (
            "It has no deployment, so no runner will take it: execute it with `prefect flow-run retry "
            f"{flow_run_id} --entrypoint file.py:flow`, where it was started; that of `elastic-train run` is "
            "prefect_elastic_train.train_flow.train"
        )
        return
    _set(client, flow_run_id, AwaitingRetry(message="Resumed with `elastic-train resume`."))
    yield f"{flow_run.name} is scheduled again: the next free runner of its deployment takes it"


def flow_run_of(run_name: str, storages: Sequence[Storage]) -> UUID:
    """Find the flow run that a run belongs to: that of its newest attempt, before the first one that which claimed it.

    Args:
        run_name: Name of the run.
        storages: Storages that it may be in.

    Raises:
        ConfigurationError: No storage has the run, several have, or it belongs to no flow run.
    """
    places = ", ".join(storage.uri for storage in storages)
    try:
        owners = [owner for storage in storages if (owner := _owner(storage, run_name)) is not None]
    except OSError as error:
        raise ConfigurationError(f"cannot look for run {run_name!r} in {places}: {error}") from error
    if not owners:
        where = f"in {places}" if places else "anywhere that is looked at: say where with --storage"
        raise ConfigurationError(f"{run_name!r} is no id of a flow run, and there is no run of this name {where}")
    ids = {owner.flow_run_id for owner in owners}
    if len(ids) > 1:
        raise ConfigurationError(f"runs of the name {run_name!r} are in several of {places}: give one --storage")
    try:
        flow_run_id = UUID(ids.pop())
    except ValueError:
        flow_run_id = None
    if flow_run_id is None or not owners[0].flow_run_name:
        raise ConfigurationError(
            f"run {run_name!r} belongs to {owners[0].describe()}, which cannot be resumed; to go on with the run, "
            f"train with run_name={run_name!r} and resume=True"
        )
    return flow_run_id


def signs_of_life(client: SyncPrefectClient, flow_run: FlowRun, storages: Sequence[Storage]) -> Iterator[str]:
    """Find what tells that a flow run is being executed, the quick looks first."""
    yield from _processes_here(str(flow_run.id))
    yield from _recent_heartbeat(client, str(flow_run.id))
    for storage in storages:
        yield from _living_drivers(storage, str(flow_run.id))


def _owner(storage: Storage, run_name: str) -> Owner | None:
    if run_name not in storage.run_names():
        return None
    store = storage.run(run_name)
    newest = newest_attempt(store)
    attempt = decode(AttemptRecord, store.read(layout.attempt_name(newest))) if newest else None
    if attempt is not None:
        return attempt.owner
    run = decode(RunRecord, store.read(layout.RUN))
    return run.creator if run is not None else None


def _check_state(client: SyncPrefectClient, flow_run: FlowRun, state: State | None) -> None:
    if not is_root(flow_run):
        assert flow_run.parent_task_run_id is not None
        parent = client.read_task_run(UUID(str(flow_run.parent_task_run_id))).flow_run_id
        raise ConfigurationError(f"flow run {flow_run.name} was called by flow run {parent}: resume that one")
    if state is None or state.is_scheduled() or state.is_paused():
        name = state.name if state else "not scheduled yet"
        raise ConfigurationError(f"flow run {flow_run.name} is {name}: nobody executes it now, and there is no need to")
    if state.is_completed():
        raise ConfigurationError(f"flow run {flow_run.name} is {state.name}: there is nothing left to resume")


def _check_dead(client: SyncPrefectClient, flow_run: FlowRun, state: State, storages: Sequence[Storage]) -> None:
    sign = next(signs_of_life(client, flow_run, storages), None)
    age = (datetime.now(timezone.utc) - state.timestamp).total_seconds()
    if sign is None and state.is_pending():
        sign = f"it is {state.name} for {age:.0f} s, and what shall execute it may just be starting"
    if sign is None and state.is_cancelling() and age < _CANCELLATION_SECONDS:
        sign = f"it is being cancelled for {age:.0f} s, which may take {_CANCELLATION_SECONDS:g} s"
    if sign is not None:
        raise ConfigurationError(
            f"flow run {flow_run.name} may be alive: {sign}. Wait, or give --force if you know better; then a process "
            "that does live gives way"
        )


def _set(client: SyncPrefectClient, flow_run_id: UUID, state: State) -> None:
    """Propose a state as the UI does, under Prefect's rules."""
    answer = client.set_flow_run_state(flow_run_id, state)
    if answer.state is None or answer.state.name != state.name:
        reason = getattr(answer.details, "reason", None) or "no reason given"
        raise ConfigurationError(f"Prefect did not make the flow run {state.name}: {reason}")


def _processes_here(flow_run_id: str) -> Iterator[str]:
    """Look for processes of the flow run on this machine; Prefect's runners write its id into their environment."""
    entry = f"PREFECT__FLOW_RUN_ID={flow_run_id}"
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if entry.encode() in environment and process.status() != psutil.STATUS_ZOMBIE:
                yield f"process {process.pid} ({process.name()}) on this machine belongs to it"
        except (OSError, psutil.Error):
            continue


def _recent_heartbeat(client: SyncPrefectClient, flow_run_id: str) -> Iterator[str]:
    from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter

    now = datetime.now(timezone.utc)
    page = client.read_events(
        EventFilter(
            event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{flow_run_id}"]),
            occurred=EventOccurredFilter(since=now - timedelta(days=1), until=now + timedelta(hours=1)),
        ),
        limit=2,
    )
    beats = sorted((event.occurred for event in page.events), reverse=True)
    if not beats:
        return
    interval = (beats[0] - beats[1]).total_seconds() if len(beats) > 1 else _HEARTBEAT_SECONDS
    age = (now - beats[0]).total_seconds()
    if age < _MISSED_BEATS * interval:
        yield (
            f"its last heartbeat came {age:.0f} s ago, they come every {interval:.0f} s, and only "
            f"{_MISSED_BEATS * interval:.0f} s without one are a sign of its death"
        )


def _living_drivers(storage: Storage, flow_run_id: str) -> Iterator[str]:
    """Look for drivers that train for the flow run; a heartbeat from another machine is watched for some seconds."""
    try:
        yield from _living_drivers_in(storage, flow_run_id)
    except OSError as error:
        raise ConfigurationError(f"cannot read storage {storage.uri!r}: {error}") from error


def _living_drivers_in(storage: Storage, flow_run_id: str) -> Iterator[str]:
    for name in storage.run_names():
        store = storage.run(name)
        numbers = all_attempts(store)
        record = decode(AttemptRecord, store.read(layout.attempt_name(numbers[-1]))) if numbers else None
        if record is None or record.owner.flow_run_id != flow_run_id:
            continue
        if record.owner.job:
            continue  # a job outlives its flow process, and is followed again
        if store.read(layout.ended_name(numbers[-1])) is None and is_alive(store, record):
            yield f"the driver of attempt {numbers[-1]} of run {name} lives on {record.owner.host.split('/')[0]}"
