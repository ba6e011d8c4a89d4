"""``elastic_train``: a Prefect task that supervises driver attempts until a training has ended.

The task's retries are driver restarts. It never calls ``fit()``: no driver can be retried in the process it dies in.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from typing_extensions import ParamSpec

from prefect_elastic_train.blocks import CheckpointPolicy, ElasticScaling, FailureBudget, RayCluster
from prefect_elastic_train.blocks.lookup import StorageBlock
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import AttemptFailedError, may_retry
from prefect_elastic_train.core.request import Payload
from prefect_elastic_train.driver.interruptions import interruptions, notice_interruptions
from prefect_elastic_train.orchestration.arguments import (
    check_arguments,
    given_blocks,
    load_given,
    make_request,
)
from prefect_elastic_train.orchestration.local import LocalTraining
from prefect_elastic_train.orchestration.result import TrainingResult
from prefect_elastic_train.orchestration.training import SilentEndError, Training

TrainLoop = Callable[..., Any] | str

_Arguments = ParamSpec("_Arguments")


class _ElasticTrain(Generic[_Arguments]):
    """``elastic_train`` and its ``submit``, with the arguments of the function that makes a training of them."""

    def __init__(self, ask: Callable[_Arguments, Training]) -> None:
        update_wrapper(self, ask)
        self.__signature__ = inspect.signature(ask).replace(return_annotation="TrainingResult")
        self.ask = ask

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> TrainingResult:
        training = self.ask(*args, **kwargs)
        with suppress(RuntimeError):  # there is no event loop, or no flow run
            asyncio.get_running_loop()
            get_run_logger().warning(
                "elastic_train() blocks the event loop until the training ends: use `await aelastic_train(...)` instead"
            )
        with _ended_with_its_call(training):
            result: TrainingResult = _with_budget(_elastic_train_task, training)(training)
        return result

    def submit(self, train_loop: TrainLoop, **arguments: Any) -> PrefectFuture[TrainingResult]:
        """Start the training in the flow's task runner. Takes the arguments of a call, returns a future."""
        training: Training = self.ask(train_loop, **arguments)  # type: ignore[arg-type]
        training.submitted = True
        notice_interruptions()
        future: PrefectFuture[TrainingResult] = _with_budget(_elastic_train_task, training).submit(training)
        future.add_done_callback(lambda _: training.end())
        return future


@contextmanager
def _ended_with_its_call(training: Training) -> Iterator[None]:
    """Leave nothing of a training, and raise what its task has ended with as the flow is to have it."""
    try:
        yield
        if training.stopped_by is not None:
            raise training.stopped_by.with_traceback(None)
    except SilentEndError as error:
        raise Abort(str(error)) from None
    except AttemptFailedError as error:
        raise error.with_traceback(None)  # noqa: B904 - the message says it all, and Prefect logs all frames
    finally:
        training.end(sys.exc_info()[1])


@_ElasticTrain
def elastic_train(
    train_loop: TrainLoop,
    *,
    train_loop_config: Any = None,
    framework: str = "torch",
    scaling: ElasticScaling | str | None = None,
    failures: FailureBudget | str | None = None,
    checkpoints: CheckpointPolicy | str | None = None,
    storage: StorageBlock | str | Path | None = None,
    cluster: RayCluster | str | None = None,
    datasets: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    run_name: str | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    torch_config: Any = None,
    jax_config: Any = None,
    dataset_config: Any = None,
    validation_config: Any = None,
    worker_runtime_env: dict[str, Any] | None = None,
    timeout_seconds: float | None = None,
    local: bool = False,
) -> Training:
    """Train, and return when the loop has returned on all ranks.

    Args:
        train_loop: A Ray Train loop: a function of no argument or of the config, or its import path
            ``"package.module:function"``.
        train_loop_config: Passed to the loop: a dict, dataclass, pydantic model or anything that can be pickled.
            Default none.
        framework: ``"torch"``, ``"jax"``, or ``"none"`` for a plain Python loop. Default ``"torch"``.
        scaling: Workers, as a block or the name of a saved one. Default, as of the next four: the saved block
            that the settings name (``default_scaling`` and so on), else one CPU worker.
        failures: How much may fail. Default without a setting: 3 worker failures and 3 driver restarts.
        checkpoints: Which checkpoints are kept. Default without a setting: all.
        storage: Where the run directory goes; also a directory (``"./runs"``, ``Path("runs")``) or a URL
            (``"s3://bucket/runs"``, with the ambient credentials). Default without a setting: ``~/elastic_train_runs``.
        cluster: The Ray cluster. Default without a setting: a local one for this training.
        datasets: Ray Data datasets by name, functions that make them, or one function that makes all.
        run_name: Name of the run. Default: the flow's name and the first 8 characters of the flow run id,
            and from the second training of a flow run on its number.
        resume: Take over a run that belongs to another flow run. Default False.
        resume_from: Start a new run from the checkpoint of another: ``"<run>"`` for its latest,
            ``"<run>@best"``, or ``"<run>@<checkpoint>"``. ``"latest"``: from the best checkpoint of the newest
            run that the same training of an earlier flow run of this deployment (without one: of this flow) has
            completed, from the beginning if there is none; ``"latest@latest"`` from its newest.
        torch_config: Ray's ``TorchConfig``.
        jax_config: Ray's ``JaxConfig``.
        dataset_config: Ray's ``DataConfig``.
        validation_config: Ray's ``ValidationConfig``.
        worker_runtime_env: Ray runtime environment of the workers.
        timeout_seconds: Seconds from now after which the training is ended and TimedOut, over all its driver
            restarts in this flow process; what it has committed stays. Default: no bound.
        local: Run the loop in this process with Ray Train's local mode (``num_workers=0``), so that breakpoints work.
            Saves no checkpoint and does not retry. Blocks, ``resume``, Ray's configurations, ``worker_runtime_env`` and
            ``timeout_seconds`` are checked and then ignored; ``resume_from`` is an error. The result has the metrics
            of the last report. Default False.

    Returns:
        What the training gives back.

    Raises:
        ConfigurationError: It cannot start as configured; nothing was started.
        AttemptFailedError: The last attempt failed; its ``outcome`` says how.
        TrainingTimeoutError: ``timeout_seconds`` went by.
    """
    check_arguments(framework, run_name, resume, resume_from, timeout_seconds)
    get_settings()  # what is wrong with them is said now, whether or not a block is looked for
    if isinstance(storage, Path):
        storage = os.path.abspath(storage)
    blocks = given_blocks(scaling=scaling, failures=failures, checkpoints=checkpoints, storage=storage, cluster=cluster)
    ray_data = sys.modules.get("ray.data") if datasets else None
    payload = Payload(
        train_loop,
        train_loop_config,
        datasets,
        dataset_config,
        torch_config,
        jax_config,
        validation_config,
        ray_data and ray_data.DataContext.get_current(),
    )
    request, place = make_request(payload, framework, run_name, resume, resume_from, worker_runtime_env)
    return (LocalTraining if local else Training)(request, blocks, place, timeout_seconds)


async def aelastic_train(train_loop: TrainLoop, **arguments: Any) -> TrainingResult:
    """Train like :data:`elastic_train`, without holding the event loop.

    Takes the same arguments, returns and raises the same. Cancelling the coroutine ends the training.
    """
    notice_interruptions()
    interrupts = interruptions(signal.SIGINT)
    training = elastic_train.ask(train_loop, **arguments)
    try:
        with _ended_with_its_call(training):
            result: TrainingResult = await _with_budget(_aelastic_train_task, training)(training)
    except asyncio.CancelledError:
        if interruptions(signal.SIGINT) > interrupts:
            # asyncio makes a cancellation of Ctrl-C, which Prefect could not tell from the end of a machine.
            raise KeyboardInterrupt from None
        raise
    return result


def _with_budget(template: Any, training: Training) -> Any:
    """Return the task with the retries of the failure budget, which the training keeps in step with what is left."""
    failures = load_given("failures", training.blocks["failures"])
    assert isinstance(failures, FailureBudget)
    training.failures = failures
    # In Prefect's delay, which may have a default in its settings, nobody would look after the cluster.
    return template.with_options(
        task_run_name=training.request.run_name, retries=failures.driver_restarts, retry_delay_seconds=0
    )


@task(name="elastic_train", cache_policy=NO_CACHE, retry_condition_fn=may_retry)
def _elastic_train_task(training: Training) -> TrainingResult | State[Any]:
    return training.attempt()


@task(name="elastic_train", cache_policy=NO_CACHE, retry_condition_fn=may_retry)
async def _aelastic_train_task(training: Training) -> TrainingResult | State[Any]:
    # A thread of its own: the loop's pool is small, and other trainings may fill it for weeks.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-train") as thread:
        run = contextvars.copy_context().run
        attempt = asyncio.get_running_loop().run_in_executor(thread, run, training.attempt)
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            training.cancelled.set()
            await asyncio.wait([attempt])
            raise
