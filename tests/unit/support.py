"""What the tests of the run directory have in common: claims, checkpoints, and what Ray's controller does to them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings
from pydantic import BaseModel

from prefect_elastic_train.controller.callbacks import RunCallback
from prefect_elastic_train.controller.controller_state import ControllerSettings, ControllerState
from prefect_elastic_train.controller.event_queue import ReceiverAddress
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import (
    CheckpointSettings,
    ClusterSettings,
    FailureSettings,
    LocalStorageSettings,
    ScalingSettings,
)
from prefect_elastic_train.core.version import ray_minor
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt
from prefect_elastic_train.runs.commits import CommitLog
from prefect_elastic_train.runs.fingerprints import fingerprint
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.runs.snapshots import parse_snapshot
from prefect_elastic_train.storage.store import LocalRunStore, RunStore

REPOSITORY = Path(__file__).resolve().parents[2]

needs_ray_2_60 = pytest.mark.skipif(ray_minor() < (2, 60), reason="for what Ray has since 2.60")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
"""How hypothesis looks for examples: ``same`` or ``wide``."""

WIDER = 50
"""How many times as many examples the wide profile looks at."""

FLOW_RUN = "11111111-aaaa-bbbb-cccc-000000000001"
OTHER_FLOW_RUN = "22222222-aaaa-bbbb-cccc-000000000002"


class Stop(BaseException):
    """The flow run was stopped."""


def stop(*_: object) -> NoReturn:
    """Stop the flow run."""
    raise Stop


def examples(number: int) -> settings:
    """The settings of a test that looks at so many examples, or at many more in the wide profile."""
    return settings(max_examples=number * WIDER if PROFILE == "wide" else number)


def claim(flow_run: str = FLOW_RUN, *, name: str = "mnist", config: Any = None, **arguments: Any) -> DriverSpec:
    """What a driver is told that wants a run, by default one on another machine; with fields of owner and budget."""

    def its(kind: type[BaseModel]) -> dict[str, Any]:
        return {field: arguments.pop(field) for field in kind.model_fields.keys() & arguments.keys()}

    failures = FailureSettings(**{"driver_restarts": 3, **its(FailureSettings)})
    described = {"flow_name": "nightly", "flow_run_name": "eager-otter", "host": "elsewhere/1"}
    owner = Owner(flow_run_id=flow_run, **{**described, **its(Owner)})
    return spec(RunRequest(name, owner, fingerprint("train:loop", "torch", config), **arguments), failures=failures)


def spec(request: RunRequest | None = None, **settings: Any) -> DriverSpec:
    """What the driver of a run is told, with the settings that blocks have by default."""
    request = request or RunRequest("mnist", Owner(flow_run_id="1"), fingerprint("m:loop", "none", {}))
    defaults = {
        "scaling": ScalingSettings(),
        "failures": FailureSettings(),
        "checkpoints": CheckpointSettings(),
        "storage": LocalStorageSettings(path="/runs"),
        "cluster": ClusterSettings(),
    }
    return DriverSpec(request, **{**defaults, **settings})


def begin(store: RunStore, wanted: DriverSpec | RunRequest | None = None, **arguments: Any) -> Begun:
    """Begin an attempt that must not find the run finished."""
    wanted = spec(wanted) if isinstance(wanted, RunRequest) else wanted or claim()
    begun = begin_attempt(store, wanted, **arguments)
    assert isinstance(begun, Begun)
    return begun


def empty_snapshot() -> dict[str, Any]:
    """The state of Ray Train's checkpoint manager before the first report."""
    return {
        "ray_version": "2.60.0",
        "checkpoint_results": [],
        "checkpoint_report_indices": [],
        "latest_checkpoint_result": None,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": 0,
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }


def with_result(snapshot: dict[str, Any], name: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with one more report that brought a checkpoint."""
    snapshot = deepcopy(snapshot)
    result = {"version": 0, "checkpoint_dir_name": name, "metrics": metrics}
    snapshot["checkpoint_results"].append(result)
    snapshot["checkpoint_report_indices"].append(snapshot["current_report_index"])
    snapshot["latest_checkpoint_result"] = result
    snapshot["current_report_index"] += 1
    return snapshot


class SteppedStore(LocalRunStore):
    """A disk where something is called before each operation, and before each file of a folder that is deleted."""

    _OPERATIONS = {"names": "list", "file_sizes": "sizes", "delete_folder": "delete", "upload": "copy"} | {
        name: name for name in ("create", "replace", "read", "folders", "delete")
    }

    def __init__(self, path: str, before: Callable[[str], object]) -> None:
        super().__init__(path)
        self.before = before

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in SteppedStore._OPERATIONS:
            return found

        def stepped(*arguments: Any, **more: Any) -> Any:
            self.before(f"{SteppedStore._OPERATIONS[name]} {arguments[0] if arguments else ''}")
            return found(*arguments, **more)

        return stepped

    def _delete_folder(self, name: str) -> None:
        for file in LocalRunStore.file_sizes(self, name) or {}:
            self.before("unlink")
            Path(self.path, name, file).unlink()
        super()._delete_folder(name)


def happening_before(store: RunStore, operation: str, happens: Callable[[], object]) -> SteppedStore:
    """Return the same disk, where something happens once before an operation."""
    pending = [happens]

    def before(next_operation: str) -> None:
        if next_operation == operation and pending:
            pending.pop()()

    return SteppedStore(store.path, before)


def run_callback(
    receiver: ReceiverAddress, store: RunStore, attempt: int, failures: FailureSettings, score_attribute: str = ""
) -> RunCallback:
    """Return the callback of a controller, with its state. It has no keepers of recovery points, which are actors."""
    context = RunContext("mnist", "0" * 32, attempt, "", store.uri, score_attribute=score_attribute)
    settings = ControllerSettings(receiver, store, context, "torch", ScalingSettings(), failures, "", "off", 0.3)
    state = ControllerState(settings)
    state.keepers.newest_states = lambda newest: []  # type: ignore[method-assign]
    return RunCallback(state)


class Training:
    """What Ray's controller and its workers do to a run directory in one attempt, in the order of Ray's."""

    def __init__(self, store: RunStore, attempt: int, keep: int | None = None) -> None:
        self.store = store
        self.attempt = attempt
        self.keep = keep
        self.log = CommitLog(store, attempt)
        self.snapshot = parse_snapshot(store.read(layout.SNAPSHOT)) or empty_snapshot()

    def upload(self, name: str, files: dict[str, bytes] | None = None) -> None:
        """Write a checkpoint's files as a worker does."""
        run_filesystem(self.store, self.attempt).create_dir(f"{self.store.path}/{name}")
        for file, data in (files or {"model.pt": b"weights of " + name.encode()}).items():
            self.store.replace(f"{name}/{file}", data)

    def commit(self, name: str, metrics: dict[str, Any] | None = None) -> Any:
        """Commit what was uploaded."""
        snapshot = with_result(self.snapshot, name, metrics or {})
        if self.keep is not None:
            for field in ("checkpoint_results", "checkpoint_report_indices"):
                snapshot[field] = snapshot[field][-self.keep :]
        self.log.commit(json.dumps(snapshot).encode())
        self.snapshot = snapshot
        return self.log.newest

    def report(self, name: str, metrics: dict[str, Any] | None = None) -> None:
        """Upload a checkpoint and commit it."""
        self.upload(name)
        self.commit(name, metrics)


def tear(store: RunStore, name: str) -> None:
    """Cut an object in half, as a crash in the middle of a plain write does."""
    data = store.read(name) or b""
    store.replace(name, data[: len(data) // 2])


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder, in memory where there is one, since tests sync thousands of writes."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="elastic-train-test-", dir=memory)


def python(*arguments: str, cwd: str | Path = "/", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that finds this package and nothing else of this repository."""
    code = f"import sys; sys.path.append({str(REPOSITORY)!r})\n"
    command = [sys.executable, "-c", code + arguments[0], *arguments[1:]]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
    )
