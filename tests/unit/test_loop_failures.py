"""Exceptions of a train loop reach the driver with their message and traceback, also if they cannot be pickled."""

import builtins
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train.backend import BackendConfig
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.preemption import PreemptionContext
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import Outcome, StorageFaultError
from prefect_elastic_train.core.settings import LocalStorageSettings
from prefect_elastic_train.driver.endings import final_event_of_error
from prefect_elastic_train.driver.trainer import _ElasticTrainerMixin
from prefect_elastic_train.worker.rank_failures import failure_text
from prefect_elastic_train.worker.train_worker import RayTrainWorker
from tests.support.processes import wait_for

STORAGE = LocalStorageSettings(path="/runs")


class _Trainer(_ElasticTrainerMixin, DataParallelTrainer):
    """The trainer that a driver makes."""


class _RowError(Exception):
    """An exception that can be pickled, but not unpickled."""

    def __init__(self, table: str, row: int) -> None:
        super().__init__(f"{table} has no row {row}")


class _LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


RAISED = [
    (
        ClientError({"Error": {"Code": "AccessDenied", "Message": "no such key for you"}}, "GetObject"),
        "ClientError: An error occurred (AccessDenied) when calling the GetObject operation: no such key",
    ),
    (_RowError("labels", 17), "_RowError: labels has no row 17"),
    (_LockedError("the queue is closed"), "_LockedError: the queue is closed"),
    (RayTaskError("f", "ray::f()\n…", ValueError("torn"), "ray::f", 1, "10.0.0.1"), "rank 0: ValueError: torn"),
    (SystemExit("bad data"), "SystemExit: bad data"),
    (ValueError("x" * 10_000_000 + " the end"), "ValueError: xxx"),
]
if sys.version_info >= (3, 11):
    RAISED.append(
        (
            builtins.ExceptionGroup("two readers", [_RowError("labels", 17), _LockedError("closed")]),
            "rank 0: ExceptionGroup: two readers (2 sub-exceptions); tests.unit.test_loop_failures._RowError: labels",
        )
    )


Run = Callable[[Any], bytes]


@pytest.fixture
def storage() -> SimpleNamespace:
    """The run directory of the loop's worker."""
    return SimpleNamespace(create_dir=lambda path: None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, storage: SimpleNamespace) -> Run:
    """Run a loop in a worker of Ray Train's, and return its last status as it is sent to the controller."""

    def run_loop(loop: Any) -> bytes:
        runner = ThreadRunner()
        train_context = SimpleNamespace(
            execution_context=SimpleNamespace(result_queue=queue.Queue(), training_thread_runner=runner),
            preemption_context=PreemptionContext(),
            checkpoint_upload_threadpool=ThreadPoolExecutor(),
            storage_context=SimpleNamespace(storage_filesystem=storage, experiment_fs_path="/runs/mnist"),
            get_world_rank=lambda: 0,
        )
        monkeypatch.setattr(context, "_train_context", train_context)
        worker = RayTrainWorker()
        trainer = _Trainer.__new__(_Trainer)
        trainer.train_loop_per_worker, trainer.train_loop_config, trainer.backend_config = loop, {}, BackendConfig()
        worker.run_train_fn(SimpleNamespace(get=trainer._get_train_func))
        wait_for(lambda: not runner.is_running(), 20, "the end of the loop")
        return bytes(cloudpickle.dumps(worker.poll_status()))

    return run_loop


def _ended(sent: bytes) -> AttemptEnded:
    """Return the final event of a driver whose controller got this status, after the error is sent to the driver."""
    error = WorkerGroupPollStatus({0: pickle.loads(sent)}).get_worker_group_error()
    return final_event_of_error(pickle.loads(cloudpickle.dumps(error)), STORAGE)


@pytest.mark.parametrize(("error", "message"), RAISED)
def test_what_a_loop_raises_is_a_user_error_in_its_own_words_with_its_traceback(
    run: Run, error: BaseException, message: str
) -> None:
    def loop():
        raise error

    sent = run(loop)
    ended = _ended(sent)
    assert ended.outcome is Outcome.USER_ERROR
    assert message in ended.message
    text = failure_text(pickle.loads(sent).error)
    assert "Traceback (most recent call last)" in text
    assert ", in loop\n" in text
    assert len(text) < 200_000


def test_an_exception_whose_class_only_workers_have_is_told_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("workers_only")
    exec("class DataError(Exception): pass", module.__dict__)
    with monkeypatch.context() as worker:
        worker.setitem(sys.modules, "workers_only", module)

        def loop():
            raise module.DataError("torn shard")

        sent = run(loop)
    ended = _ended(sent)
    assert "rank 0: workers_only.DataError: torn shard" in ended.message


def test_a_fault_of_the_storage_and_the_death_of_an_actor_stay_what_they_are(
    run: Run, storage: SimpleNamespace
) -> None:
    def save(path=""):
        raise StorageFaultError("no room", kind="no space", permanent=True)

    def call():
        raise ActorDiedError

    ends = [_ended(run(loop)).outcome for loop in (save, call)]
    assert ends == [Outcome.STORAGE_ERROR, Outcome.CLUSTER_LOST]
    storage.create_dir = save  # as on a node that does not share it
    ended = _ended(run(lambda: pytest.fail("it trains")))
    assert (ended.outcome, ended.message) == (Outcome.STORAGE_ERROR, "no room")


@pytest.mark.parametrize("value", [threading.Lock(), {"weights": torch.ones(2)}])
def test_what_a_loop_returns_ends_no_training(run: Run, value: Any) -> None:
    status = pickle.loads(run(lambda: value))
    assert (status.running, status.error, status.return_value) == (False, None, None)


def test_a_loop_that_only_returns_what_would_train_is_no_completed_training(run: Run) -> None:
    async def train_later():
        """Train, if it is awaited."""

    training = train_later()
    ended = _ended(run(lambda: training))
    training.close()
    assert ended.outcome is Outcome.USER_ERROR
    assert "TypeError: the train loop returned a coroutine, which has not run" in ended.message
