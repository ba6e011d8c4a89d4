"""Resume a flow run that no process executes any more, as a person does with ``elastic-train resume``.

Such a flow run may look running forever, and Prefect retries only flow runs in a final state. So it is ended first,
unless it may still be alive.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Cancelled, Crashed, Scheduled

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.time_limits import RUNNER_GRACE_SECONDS

from .flow_run_state import last_event_time
from .position import is_root

#: Name of the state, of type Crashed, of a dead flow run. Automations for Crashed flow runs do not resume it, too.
LOST = "Lost"
HEARTBEAT = "prefect.flow-run.heartbeat"
_HEARTBEAT_SECONDS = 180
#: After the time in which a training waits for the signal of its runner, and the runner for the flow process.
_CANCELLATION_SECONDS = 3 * RUNNER_GRACE_SECONDS


def resume(client: SyncPrefectClient, flow_run_id: UUID, *, force: bool = False) -> Iterator[str]:
    """Schedule a flow run again that no process executes any more. Yield a line of text for the user after each step.

    A flow run that looks running becomes Lost (of type Crashed) first. One that looks cancelling becomes Cancelled and
    is not scheduled. One that crashed, failed or was cancelled is scheduled again as by the Retry of Prefect's UI. A
    flow run that a process may still execute is refused, unless ``force`` is set.

    Raises:
        ConfigurationError: The flow run does not exist, is a subflow, has nothing left to resume, may still be
            executed, or has no deployment, so that no runner would execute it; or Prefect rejects the new state.
    """
    try:
        flow_run = client.read_flow_run(flow_run_id)
    except ObjectNotFound as error:
        raise ConfigurationError(f"there is no flow run {flow_run_id}; see `prefect flow-run ls`") from error
    state = flow_run.state or Scheduled()  # a new flow run has none
    if not is_root(flow_run):
        raise ConfigurationError(f"flow run {flow_run.name} was called by another flow run: resume that one")
    if state.is_scheduled() or state.is_paused() or state.is_completed():
        raise ConfigurationError(f"flow run {flow_run.name} is {state.name}: there is nothing left to resume")
    if not state.is_final():
        evidence = "" if force else next(_find_liveness(client, flow_run, state), "")
        if evidence:
            raise ConfigurationError(
                f"flow run {flow_run.name} may be alive: {evidence}. Wait, or use --force if you know that it is dead; "
                "if a process is alive then, it stops"
            )
        if state.is_cancelling():
            _set_state(client, flow_run_id, Cancelled(message="It was cancelling, and no process was left to do it."))
            yield f"{flow_run.name} was being cancelled and is Cancelled now. To resume it, run this command again"
            return
        _set_state(client, flow_run_id, Crashed(name=LOST, message="A person found that no process executes it."))
        yield f"{flow_run.name} was {state.name} and is {LOST} (Crashed) now"
    if flow_run.deployment_id is None:
        raise ConfigurationError(
            f"flow run {flow_run.name} has no deployment, so no runner will take it: execute it with `prefect flow-run "
            f"retry {flow_run_id} --entrypoint file.py:flow`, where it was started; the entrypoint of "
            "`elastic-train run` is prefect_elastic_train.train_flow.train"
        )
    _set_state(client, flow_run_id, AwaitingRetry(message="Resumed with `elastic-train resume`."))
    yield f"{flow_run.name} is scheduled again: the next free runner of its deployment takes it"


def _find_liveness(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> Iterator[str]:
    """Yield texts of evidence that a process executes a flow run, or will soon. The quick checks come first.

    Evidence is a recent change of its state, a process on this machine, or a recent heartbeat in Prefect.
    """
    now = time.time()
    age = now - state.timestamp.timestamp()
    if state.is_pending() or (state.is_cancelling() and age < _CANCELLATION_SECONDS):
        yield f"it has been {state.name} for {age:.0f} s, and a process may be about to change that"
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # Prefect's runners set the id in the environment of their processes
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id):
                yield f"process {process.pid} ({process.name()}) on this machine belongs to it"
    # A flow run may be alive until two of Prefect's heartbeats are missing.
    timeout = 2 * (get_current_settings().flows.heartbeat_frequency or _HEARTBEAT_SECONDS)
    heartbeats = {"event": {"name": [HEARTBEAT]}, "resource": {"id": [f"prefect.flow-run.{flow_run.id}"]}}
    if now - last_event_time(client, heartbeats) < timeout:
        yield f"it has sent a heartbeat within {timeout} s"


def _set_state(client: SyncPrefectClient, flow_run_id: UUID, state: State) -> None:
    """Set the state of a flow run under Prefect's rules, as the UI does.

    Raises:
        ConfigurationError: Prefect rejects the state.
    """
    answer = client.set_flow_run_state(flow_run_id, state)
    if answer.state is None or answer.state.name != state.name:
        raise ConfigurationError(
            f"Prefect did not make the flow run {state.name}: "
            f"{getattr(answer.details, 'reason', None) or 'no reason given'}"
        )
