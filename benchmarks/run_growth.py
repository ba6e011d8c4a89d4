"""Cost of a start and a commit in runs with many attempts and checkpoints: `python -m benchmarks.run_growth`.

The run directories are generated, in /dev/shm if it is writable, and nothing is trained. A request is one operation on
the store, also a listing of any length. Seconds are processor time plus 30 ms for each request, as to a bucket.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from benchmarks.common import machine_lines, markdown_table, parse_arguments, summary
from prefect_elastic_train.controller.checkpoint_manager import RankedCheckpointManager
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.records import AttemptRecord, CommitRecord, EndedRecord, Owner, RunRecord, encode
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import (
    CheckpointSettings,
    ClusterSettings,
    FailureSettings,
    LocalStorageSettings,
    ScalingSettings,
)
from prefect_elastic_train.driver.event_relay import EventOutput, EventRecorder
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt
from prefect_elastic_train.runs.commits import remove_leftovers
from prefect_elastic_train.runs.fingerprints import fingerprint
from prefect_elastic_train.runs.history import HistoryWriter
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.storage.store import LocalRunStore

REQUEST_SECONDS = 0.03
OPERATIONS = ("create", "replace", "read", "entries", "file_sizes", "size", "delete", "_delete_folder")
RUNS = {"1/100": (1, 100), "100/100": (100, 100), "10000/100": (10_000, 100)} | {
    "1/10000": (1, 10_000),
    "1/100000": (1, 100_000),
}
"""Numbers of attempts and of kept checkpoints, by case."""
METRICS = {"loss": 0.123456789, "accuracy": 0.987654321, "step": 123_456, "total_steps": 1_000_000, "lr": 0.001}
COSTS = ("driver", "worker group", "first commit", "later commits")


def loop(config: dict[str, Any]) -> None:
    """Stand in for a train loop."""


OWNER = Owner(flow_run_id="1", flow_name="nightly", flow_run_name="calm-cat")
MARK = fingerprint(loop, "torch", {})


class Measuring:
    """Counts the operations on a store, and adds their assumed time to the processor time."""

    def __init__(self) -> None:
        self._requests = 0
        for name in OPERATIONS:
            setattr(LocalRunStore, name, self._counted(getattr(LocalRunStore, name)))

    def cost(self, work: Callable[[], Any]) -> tuple[int, float, Any]:
        """Return the requests, the seconds and the result of some work."""
        self._requests, began = 0, time.process_time()
        result = work()
        return self._requests, time.process_time() - began + self._requests * REQUEST_SECONDS, result

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            self._requests += 1
            return operation(*arguments, **more)

        return counted


class Run:
    """A generated run directory, and the operations of a driver and a controller on it."""

    def __init__(self, folder: Path, attempts: int, kept: int) -> None:
        self.folder = folder
        self.store = LocalRunStore(str(folder))
        self.spec = DriverSpec(
            RunRequest(run_name=folder.name, owner=OWNER, fingerprint=MARK, named=True),
            ScalingSettings(),
            FailureSettings(),
            CheckpointSettings(),
            LocalStorageSettings(path=str(folder.parent)),
            ClusterSettings(),
        )
        self._write(layout.RUN, encode(RunRecord(name=folder.name, id="1", creator=OWNER, fingerprint=MARK)))
        names = [physical_name(f"checkpoint_{number:06}", 1, 1, number) for number in range(kept)]
        for name in names:
            self._write(f"{name}/model.pt", b"")
        results = [{"version": 0, "checkpoint_dir_name": name, "metrics": METRICS} for name in names]
        lists = ("pending_training_results", "pending_validation_specs", "validated_checkpoint_dir_names")
        failed = ("timed_out_validation_checkpoint_dir_names", "failed_validation_checkpoint_dir_names")
        snapshot = {
            "ray_version": "2.60.0",
            "checkpoint_results": results,
            "checkpoint_report_indices": list(range(kept)),
            "latest_checkpoint_result": results[-1],
            "current_report_index": kept,
            **{name: [] for name in (*lists, *failed)},
        }
        commit = CommitRecord(
            attempt=1, sequence=1, trained=7200.0, snapshot=snapshot, manifest={name: {"model.pt": 0} for name in names}
        )
        for attempt in range(1, attempts + 1):
            base = (attempt - 1, 5) if attempt > 1 else None
            self._write(layout.attempt_name(attempt), encode(AttemptRecord(attempt=attempt, owner=OWNER, base=base)))
            self._write(layout.ended_name(attempt), encode(EndedRecord(attempt=attempt, outcome="driver_lost")))
            text = encode(commit.model_copy(update={"attempt": attempt}))
            for sequence in range(1, 6):
                self._write(layout.commit_name((attempt, sequence)), text)
            events = self._events(attempt, names if attempt == attempts else names[-1:])
            if attempt < attempts:
                lines = "".join(f"{ev.encode_event(event)}\n" for event in events)
                self._write(f"{layout.EVENTS}/{attempt:04}-000.jsonl", lines.encode())
                continue
            recorder = self.recorder(attempt)  # as its driver writes it
            for event in events:
                recorder.emit(event)
            recorder.close()
        self._write(layout.SNAPSHOT, json.dumps(snapshot).encode())

    def recorder(self, attempt: int) -> EventRecorder:
        """Return the receiver of an attempt's events, after it has read the history."""
        with open(os.devnull, "w") as nowhere:
            recorder = EventRecorder(EventOutput(nowhere), Details(), self.store, self.spec)
        recorder.attempt, recorder.history = attempt, HistoryWriter(self.store, attempt)
        recorder.recall_history()
        return recorder

    def start_driver(self) -> int:
        """Begin an attempt, and read the history."""
        begun = begin_attempt(self.store, self.spec)
        assert isinstance(begun, Begun)
        assert not begun.notes, begun.notes
        self.recorder(begun.attempt).close()
        return begun.attempt

    def start_group(self, attempt: int) -> Any:
        """Load the checkpoint manager, remove interrupted uploads, and find the commit to start from."""
        storage = StorageContext(
            str(self.folder.parent), self.folder.name, storage_filesystem=run_filesystem(self.store, attempt)
        )
        manager = RankedCheckpointManager(CheckpointConfig(), storage)
        remove_leftovers(self.store, attempt)
        assert RunDirectory(self.store, attempt).newest_commit is not None
        return manager

    def report(self, manager: Any, attempt: int, number: int) -> Callable[[], None]:
        """Upload a checkpoint, and return a function that commits it."""
        name = physical_name(f"checkpoint_{number:06}", attempt, 1, number)
        self._write(f"{name}/model.pt", b"")
        context = manager._storage_context
        checkpoint = Checkpoint(context.build_checkpoint_path_from_name(name), context.storage_filesystem)

        async def register() -> None:
            manager.register_checkpoint(_TrainingReport(checkpoint, dict(METRICS), validation=False))

        return lambda: asyncio.run(register())

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _events(self, attempt: int, names: list[str]) -> list[ev.Event]:
        at = attempt * 1e6
        committed = [
            ev.CheckpointCommitted(at=at + number, checkpoint=name, size_bytes=0, metrics=METRICS, world_size=2)
            for number, name in enumerate(names)
        ]
        started = ev.AttemptStarted(at=at, attempt=attempt, run_name=self.folder.name, run_uri=self.store.uri)
        return [started, ev.WorkerGroupStarted(at=at, world_size=2), *committed]


def measure(measuring: Measuring, attempts: int, kept: int, repeats: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return the requests and seconds of each measurement."""
    costs: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in COSTS}

    def take(name: str, work: Callable[[], Any]) -> Any:
        requests, seconds, result = measuring.cost(work)
        costs[name][0].append(requests)
        costs[name][1].append(seconds)
        return result

    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="elastic-train-growth-", dir=memory) as folder:
        run = Run(Path(folder, "run"), attempts, kept)
        for _ in range(repeats):  # each driver resumes the run of the one before
            attempt = take("driver", run.start_driver)
            manager = take("worker group", lambda attempt=attempt: run.start_group(attempt))
            for number in range(5):
                take("later commits" if number else "first commit", run.report(manager, attempt, number))
    return costs


def main() -> int:
    """Measure and print the table."""
    arguments = parse_arguments((__doc__ or "").splitlines()[0], list(RUNS))
    load_before, measuring, rows = os.getloadavg()[0], Measuring(), []
    for name in arguments.only:
        attempts, kept = RUNS[name]
        costs = measure(measuring, attempts, kept, arguments.repeats)
        cells = [f"{max(requests)}, {summary(seconds)} s" for requests, seconds in costs.values()]
        rows.append([f"{attempts:,}", f"{kept:,}", *cells])
        print(f"# {name}: {cells}", file=sys.stderr, flush=True)
    print(f"{machine_lines('benchmarks.run_growth', load_before)}\n")
    print("Maximum of requests; seconds: median (min–max).\n")
    print(markdown_table(["attempts", "checkpoints kept", *COSTS], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
