"""Exceptions of a train loop reach the driver with their message and traceback, also if they cannot be pickled."""

from __future__ import annotations

import builtins
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from botocore.exceptions import ClientError
from pydantic import BaseModel
from ray import cloudpickle
from ray.exceptions import ActorDiedError
from ray.train.backend import BackendConfig
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.preemption import PreemptionContext
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from prefect_elastic_train.core.outcomes import Outcome, StorageFaultError
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
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


class _Options(BaseModel):
    """A model with a field that is not text."""

    width: int


def _request() -> None:
    httpx.Response(404, request=httpx.Request("GET", "http://data/rows")).raise_for_status()


def _ask_bucket() -> None:
    raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no such key for you"}}, "GetObject")


def _validate() -> None:
    _Options.model_validate({"width": "wide"})


def _read_row() -> None:
    raise _RowError("labels", 17)


def _read_with_cause() -> None:
    try:
        _read_row()
    except _RowError as error:
        raise ValueError("no labels") from error


def _lock() -> None:
    raise _LockedError("the queue is closed")


def _raise_group() -> None:
    caught = []
    for fail in (_read_row, _lock):
        try:
            fail()
        except Exception as error:
            caught.append(error)
    raise vars(builtins)["ExceptionGroup"]("two readers", caught)


def _exit() -> None:
    sys.exit("bad data")


def _raise_own_class() -> None:
    raise sys.modules["workers_only"].DataError("torn shard")


async def _train_later() -> None:
    """Train, if it is awaited."""


def _say_much() -> None:
    raise ValueError("x" * 10_000_000 + " the end")


@pytest.fixture
def module_of_workers() -> Iterator[str]:
    """The name of a module that only the workers can import; the test removes it."""
    module = ModuleType("workers_only")
    exec("class DataError(Exception): pass", module.__dict__)
    sys.modules["workers_only"] = module
    yield "workers_only"
    sys.modules.pop("workers_only", None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], bytes]:
    """Run a loop in a worker of Ray Train's, and return its last status as it is sent to the controller."""

    def run_loop(loop: Any) -> bytes:
        runner = ThreadRunner()
        train_context = SimpleNamespace(
            execution_context=SimpleNamespace(result_queue=queue.Queue(), training_thread_runner=runner),
            preemption_context=PreemptionContext(),
            checkpoint_upload_threadpool=ThreadPoolExecutor(),
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


def _of_controller(sent: bytes) -> bytes:
    """Return the error for such a status as it is sent to the driver."""
    return bytes(cloudpickle.dumps(WorkerGroupPollStatus({0: pickle.loads(sent)}).get_worker_group_error()))


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (_request, "httpx.HTTPStatusError: Client error '404 Not Found' for url 'http://data/rows'"),
        (
            _ask_bucket,
            "ClientError: An error occurred (AccessDenied) when calling the GetObject operation: no such key",
        ),
        (_validate, "ValidationError: 1 validation error for _Options width Input should be a valid integer"),
        (_read_row, "_RowError: labels has no row 17"),
        (_read_with_cause, "rank 0: ValueError: no labels"),
        (_lock, "_LockedError: the queue is closed"),
        pytest.param(
            _raise_group,
            "rank 0: ExceptionGroup: two readers (2 sub-exceptions); tests.unit.test_loop_failures._RowError",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has groups from 3.11 on"),
        ),
        (_exit, "SystemExit: bad data"),
        (_say_much, "ValueError: xxx"),
    ],
)
def test_what_a_loop_raises_is_a_user_error_in_its_own_words_with_its_traceback(
    run: Callable[[Any], bytes], loop: Any, words: str
) -> None:
    sent = run(loop)
    error = pickle.loads(_of_controller(sent))
    ended = final_event_of_error(error, STORAGE)
    assert ended.outcome is Outcome.USER_ERROR
    assert words in ended.message
    text = failure_text(pickle.loads(sent).error)
    assert "Traceback (most recent call last)" in text
    assert f", in {loop.__name__}\n" in text
    assert len(text) < 200_000


def test_an_exception_whose_class_only_workers_have_is_told_too(
    run: Callable[[Any], bytes], module_of_workers: str
) -> None:
    sent = run(_raise_own_class)
    del sys.modules[module_of_workers]
    assert (
        "rank 0: workers_only.DataError: torn shard"
        in final_event_of_error(pickle.loads(_of_controller(sent)), STORAGE).message
    )


def test_a_fault_of_the_storage_and_the_death_of_an_actor_stay_what_they_are(run: Callable[[Any], bytes]) -> None:
    def save() -> None:
        raise StorageFaultError("no room", kind="no space", permanent=True)

    def call() -> None:
        raise ActorDiedError

    ends = [final_event_of_error(pickle.loads(_of_controller(run(loop))), STORAGE).outcome for loop in (save, call)]
    assert ends == [Outcome.STORAGE_ERROR, Outcome.CLUSTER_LOST]


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), {"weights": torch.ones(2)}, torch.nn.Linear(1, 1)],
    ids=["lock", "weights", "module"],
)
def test_what_a_loop_returns_ends_no_training(run: Callable[[Any], bytes], value: Any) -> None:
    status = pickle.loads(run(lambda: value))
    assert (status.running, status.error, status.return_value) == (False, None, None)


def test_a_loop_that_only_returns_what_would_train_is_no_completed_training(run: Callable[[Any], bytes]) -> None:
    training = _train_later()
    ended = final_event_of_error(pickle.loads(_of_controller(run(lambda: training))), STORAGE)
    training.close()
    assert ended.outcome is Outcome.USER_ERROR
    assert "TypeError: the train loop returned a coroutine, which has not run" in ended.message
