"""The run's history in the run directory, and results."""

import errno
import itertools
import uuid
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train import LocalStorage, TrainingResult, checkpoint_directory
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import CheckpointGoneError, ConfigurationError, Outcome
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.accounts import Accounts
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.runs.inspecting import make_result
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import wait_for
from tests.unit.ray_storage import Ray
from tests.unit.support import SteppedStore, Training, begin

STARTED = ev.AttemptStarted(attempt=1, run_name="mnist", run_uri="/runs/mnist")


def _result(*arguments: Any, **more: Any) -> TrainingResult:
    """What a user gets of what the driver has said."""
    return TrainingResult.model_validate(make_result(*arguments, **more).model_dump())


def _report(index: int, at: float = 0.0, checkpoint: str = "", size: int = 0) -> ev.Report:
    fields = {"index": index, "at": at, "metrics": {"step": index, "text": "x" * size}}
    if checkpoint:
        return ev.CheckpointCommitted(checkpoint=checkpoint, size_bytes=1, **fields)
    return ev.Reported(**fields)


def _reports(first: int, last: int) -> list[ev.Report]:
    """A hundred reports a second."""
    return [_report(index, at=index / 100) for index in range(first, last + 1)]


def _indices(store: LocalRunStore) -> list[int]:
    return [event.index for event in read_history(store) if isinstance(event, ev.Report)]


def _write(store: LocalRunStore, *events: ev.Event, attempt: int = 1) -> list[int]:
    """Write events and return the numbers of the reports that are read again."""
    writer = HistoryWriter(store, attempt)
    for event in events:
        writer.add(event)
    writer.close()
    return _indices(store)


def test_the_history_of_all_attempts_is_read_in_order_without_signs_of_life(store: LocalRunStore) -> None:
    lifeless = ev.ControllerAlive(doing="RUNNING", seconds=1)
    for attempt in (1, 2, 10):
        states = [ev.StateChanged(attempt=attempt, state=state) for state in ("SCHEDULING", "RUNNING")]
        _write(store, lifeless, *states, attempt=attempt)
    for name in ("0001-000.jsonl.bak", "x.jsonl", "0001.jsonl"):
        store.create(f"{layout.EVENTS}/{name}", STARTED.model_dump_json().encode())
    store.create(f"{layout.EVENTS}/0011-000.jsonl", STARTED.model_dump_json().encode()[:-10] + b"\n\xff\n{}\n")  # torn
    assert [(event.attempt, event.state) for event in read_history(store)] == [  # type: ignore[union-attr]
        (attempt, state) for attempt in (1, 2, 10) for state in ("SCHEDULING", "RUNNING")
    ]


def test_a_lifecycle_event_is_written_soon_and_without_closing(store: LocalRunStore) -> None:
    writer = HistoryWriter(store, 1)
    writer.add(STARTED)
    wait_for(lambda: list(read_history(store)) == [STARTED], 1.5, "the event to be written")
    # The driver reads the whole history to make its result, and has its last word after that.
    writer.close()
    last = ev.AttemptEnded(attempt=1, outcome=Outcome.COMPLETED)
    writer.add(last)
    writer.close()
    assert list(read_history(store)) == [STARTED, last]


def test_a_full_segment_is_followed_by_the_next_one(store: LocalRunStore) -> None:
    assert _write(store, *(_report(index, size=10_000) for index in range(100))) == list(range(100))
    names = store.names(layout.EVENTS)
    assert names == [f"0001-{number:03d}.jsonl" for number in range(4)]
    assert all(len(store.read(f"{layout.EVENTS}/{name}")) <= 256 * 1024 for name in names)


def test_the_longer_a_worker_group_the_fewer_of_its_reports_are_kept_up_to_a_bound(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect_elastic_train.runs.history._REPORTS_IN_FULL", 100)
    checkpoint, another_group = _report(9_001, at=5500.5, checkpoint="c"), ev.WorkerGroupStarted(at=5501, world_size=2)
    anew = [_report(index, at=5501 + index / 1e6) for index in range(9_002, 9_050)]
    reports = (_report(index, at=1000 + index / 2) for index in range(1, 9_001))
    kept = _write(store, *reports, checkpoint, another_group, *anew)
    assert kept[-49:] == list(range(9_001, 9_050)), "another group's first tell how long its start took"
    kept = kept[:-49]
    pauses = [(later - earlier) / 2 for earlier, later in itertools.pairwise(kept)]
    assert kept[:100] == list(range(1, 101))
    assert [set(pauses[100 * number + 1 : 100 * (number + 1) - 1]) for number in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]
    assert set(pauses[801:-1]) == {8.0}


def test_how_far_the_training_was_is_known_when_something_happens(store: LocalRunStore) -> None:
    failure, checkpoint = ev.WorkerFailed(at=30.5, retried=True), _report(3151, at=31.51, checkpoint="a")
    before, after = _reports(1, 3050), _reports(3051, 3150)
    kept = _write(store, *before, failure, failure, *after, checkpoint, failure, *_reports(3152, 3160))
    events = [getattr(event, "index", event.kind) for event in read_history(store)]
    last = events[events.index(3050) :]
    assert last == [3050, "worker_failed", "worker_failed", *last[3:-3], 3151, "worker_failed", 3160]
    assert 3150 not in kept, "a checkpoint makes the report before it dispensable"
    assert kept == sorted(set(kept)), "in order, none twice"


def test_nothing_is_lost_when_the_disk_fails_for_a_while(store: LocalRunStore) -> None:
    is_full = [True]

    def check(operation: str) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = HistoryWriter(SteppedStore(store.path, check), 1)
    for index in range(60):  # more than one segment
        writer.add(_report(index, size=10_000))
    is_full[0] = False
    writer.add(STARTED)
    writer.close()
    assert _indices(store) == list(range(60))
    assert list(read_history(store))[-1] == STARTED


# results


def test_the_result_of_a_run_is_of_its_newest_commit(store: LocalRunStore) -> None:
    training = Training(store, begin(store).attempt)
    training.report("a", {"loss": 0.5})
    training.report("b", {"loss": 0.25})
    spent = TimeAccount(wall_seconds=10, productive_seconds=5, lost_seconds=5)
    accounts = Accounts(attempts=2, reports_lost=3, time=spent, last_metrics={"loss": 9})
    result = _result(store, accounts, storage_block="training-storage-directory/shared")
    checkpoints = [(f"{store.path}/a", {"loss": 0.5}), (f"{store.path}/b", {"loss": 0.25})]
    assert (result.checkpoint_uri, result.metrics) == checkpoints[1]
    assert [(best.uri, best.metrics) for best in result.best_checkpoints] == checkpoints
    assert (result.attempts, result.reports_lost, result.goodput, result.time) == (2, 3, 0.5, spent)
    where = (result.run_name, result.run_uri, result.storage_block)
    assert where == ("mnist", store.path, "training-storage-directory/shared")
    assert TrainingResult.model_validate_json(result.model_dump_json()) == result


def test_the_checkpoints_of_a_result_are_read_from_its_storage_alone(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt, checkpoint_score_attribute="acc").start()
    ray.report("best", acc=0.9)
    ray.report("newest", acc=0.1)
    result = _result(store, Accounts())
    runs = LocalStorage(path=str(Path(store.path).parent))
    for best, name in ((False, "newest"), (True, "best")):
        for storage in (None, runs):
            with result.checkpoint(best=best, storage=storage).as_directory() as folder:
                assert (Path(folder) / "model.pt").read_text() == name
            with result.checkpoint_directory(best=best, storage=storage) as directory:
                assert directory == Path(store.path, name), "not copied where it can be read"
    elsewhere = LocalStorage(path=f"{runs.path}-elsewhere")
    with pytest.raises(ConfigurationError, match=f"{result.checkpoint_uri} is not in storage {elsewhere.path}"):
        result.checkpoint(storage=elsewhere)


@pytest.mark.parametrize("storage", ["disk", "memory"], indirect=True)
def test_a_checkpoint_that_is_gone_is_told_from_a_run_that_nobody_sees(storage: Storage) -> None:
    name = f"r{uuid.uuid4().hex}"
    store = storage.run(name)
    Training(store, begin(store).attempt).report("a")
    with checkpoint_directory(f"{storage.uri}/{name}/a") as directory:
        assert (directory / "model.pt").exists()
    for path, error, message in (
        (f"{name}/b", CheckpointGoneError, f"{name}/b: the run has no such checkpoint; it may have been deleted"),
        ("not-mounted/a", FileNotFoundError, "its parent folder is not a run"),
    ):
        with pytest.raises(error, match=message) as missing, checkpoint_directory(f"{storage.uri}/{path}"):
            pass
        assert type(missing.value) is error


def test_the_result_of_a_run_without_checkpoints_has_its_last_metrics(store: LocalRunStore) -> None:
    begin(store)
    rows = [{"loss": 1.0, "_attempt": 1}, {"loss": 0.5, "_attempt": 1}]
    result = _result(store, Accounts(last_metrics={"loss": 0.5}, history=rows))
    assert (result.checkpoint_uri, result.metrics, result.attempts) == ("", {"loss": 0.5}, 1)
    assert list(result.metrics_dataframe()["loss"]) == [1.0, 0.5]
    with pytest.raises(FileNotFoundError, match="run 'mnist' has no checkpoint"):
        result.checkpoint()
