"""Requests to apply the changed blocks of a training before its next attempt, sent as Prefect events."""

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import TaskRunFilter
from prefect.events import emit_event

from prefect_elastic_train.core.outcomes import ConfigurationError

from .flow_run_state import last_event_time
from .prefect_events import PREFIX

#: Seconds between two reads of the saved blocks of a training.
READ_SECONDS = 15.0
_REQUESTED = f"{PREFIX}apply-requested"
#: States of the task of a training that has not ended.
_LIVE_STATES = ("SCHEDULED", "PENDING", "RUNNING")


class ApplyBlocks(BaseException):
    """Raised in the flow process to stop the driver, so that another attempt uses changed blocks."""


def request_apply(client: SyncPrefectClient, run_name: str) -> str:
    """Request that the live training of a run applies its changed blocks. Return what it will do, for the user.

    Raises:
        ConfigurationError: No task trains this run.
    """
    live = {"name": {"any_": [run_name]}, "state": {"type": {"any_": _LIVE_STATES}}}
    if not client.read_task_runs(task_run_filter=TaskRunFilter.model_validate(live)):
        raise ConfigurationError(f"nothing trains run {run_name!r} now; see `elastic-train runs list`")
    emit_event(_REQUESTED, resource={"prefect.resource.id": f"{PREFIX}{run_name}"})
    return (
        f"{run_name} reads its saved blocks within {READ_SECONDS:.0f} s. If they have changed, it applies them after "
        "its next checkpoint; while it waits for capacity, at once"
    )


def last_request(client: SyncPrefectClient, run_name: str) -> float:
    """Return the time of the newest request for a run, in seconds since the epoch; 0 if there is none."""
    resource = {"id": [f"{PREFIX}{run_name}"]}
    return last_event_time(client, {"event": {"name": [_REQUESTED]}, "resource": resource})
