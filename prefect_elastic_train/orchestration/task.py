"""``elastic_train``: a Prefect task that supervises driver attempts until a training has ended.

The task's retries are driver restarts. The task never calls ``fit()``, because a driver cannot be restarted in a
process that dies with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from prefect import task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.futures import PrefectFuture, PrefectFutureList
from prefect.logging import get_run_logger
from prefect.utilities.callables import expand_mapping_parameters
from pydantic import BaseModel
from typing_extensions import Unpack

from prefect_elastic_train.blocks.lookup import Blocks, load_block, saved_name
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import AttemptFailedError, may_retry
from prefect_elastic_train.driver.termination_signals import count_signals, watch_signals

from .arguments import TrainLoop, TrainOptions, check_options, make_payload, make_request, pickle_payload
from .local_mode import LocalTraining
from .position import count_training
from .supervision import SilentEndError, Training
from .training_result import TrainingResult


class _ElasticTrain:
    """Train, and return when the loop has returned on all ranks.

    Args:
        train_loop: A Ray Train loop: a function with no parameter or with the config, or its import path
            ``"package.module:function"``.
        train_loop_config: Passed to the loop: a dict, dataclass, pydantic model or anything that can be pickled.
            Default: None.
        framework: ``"torch"``, ``"jax"``, ``"xgboost"``, ``"lightgbm"``, or ``"none"`` for a plain Python loop.
            Default: ``"torch"``.
        scaling: The workers, as a block or the name of a saved one. Default, also for the next four: the saved block
            that the settings name (``default_scaling`` and so on), else one CPU worker.
        failures: The failures to tolerate. Default without a setting: 3 worker failures and 3 driver restarts.
        checkpoints: The checkpoints to keep. Default without a setting: all.
        storage: The storage of the run directory; also a directory (``"./runs"``, ``Path("runs")``) or a URL
            (``"s3://bucket/runs"``, with ambient credentials). Default without a setting: ``~/elastic_train_runs``.
        cluster: The Ray cluster. Default without a setting: a local one for this training.
        datasets: Ray Data datasets by name, functions that make them, or one function that makes all. Default: none.
        run_name: Name of the run. Default: the name of the flow and the first 8 characters of the flow run id, from
            the second training of a flow run on with its number.
        resume: Take over a run that belongs to another flow run. Default: False.
        resume_from: Start a new run from the checkpoint of another: ``"<run>"`` for its latest,
            ``"<run>@best"``, or ``"<run>@<checkpoint>"``. ``"latest"``: from the best checkpoint of the newest
            run that the same training of an earlier flow run of this deployment (without one: of this flow) has
            completed, from the beginning if there is none; ``"latest@latest"`` from its newest.
        torch_config: Ray's ``TorchConfig``.
        jax_config: Ray's ``JaxConfig``.
        dataset_config: Ray's ``DataConfig``.
        validation_config: Ray's ``ValidationConfig``.
        worker_runtime_env: Ray runtime environment of the workers.
        timeout_seconds: Seconds from now after which the training is stopped and TimedOut, over all its driver
            restarts in this flow process; its commits stay. Default: no limit.
        local: Run the loop in this process with Ray Train's local mode (``num_workers=0``), so that breakpoints work.
            Saves no checkpoint and does not retry. Blocks, ``resume``, Ray's configurations, ``worker_runtime_env`` and
            ``timeout_seconds`` are checked and then ignored; ``resume_from`` is an error. The result has the metrics
            of the last report. Default: False.

    Returns:
        The result of the training. ``submit`` takes the same arguments, starts the training in the flow's task runner,
        and returns a future. ``map`` starts several.

    Raises:
        ConfigurationError: The training cannot start as configured; nothing was started.
        AttemptFailedError: The last attempt failed, with its ``outcome``.
        TrainingTimeoutError: ``timeout_seconds`` have passed.
    """

    def __call__(self, train_loop: TrainLoop, **options: Unpack[TrainOptions]) -> TrainingResult:
        training = make_training(train_loop, **options)
        with suppress(RuntimeError):  # there is no event loop, or no flow run
            asyncio.get_running_loop()
            get_run_logger().warning(
                "elastic_train() blocks the event loop until the training ends: use `await aelastic_train(...)` instead"
            )
        with _closing(training):
            result: TrainingResult = _task(training)(training)
        return result

    def submit(self, train_loop: TrainLoop, **options: Unpack[TrainOptions]) -> PrefectFuture[TrainingResult]:
        """Start a training in the flow's task runner, and return a future of its result.

        Takes the same arguments as :data:`elastic_train`.
        """
        return _submit(make_training(train_loop, **options))

    def map(self, train_loop: Any, **options: Any) -> PrefectFutureList[TrainingResult]:
        """Start a training for each element of the iterable arguments, and return a list of futures.

        Takes the same arguments as :data:`elastic_train`, and maps over them as Prefect's tasks do: lists and other
        iterables must have one length, and ``unmapped`` of Prefect keeps one whole. Texts, dicts and blocks are the
        same in all trainings. A single ``run_name`` gets a number in each: ``sweep-1``, ``sweep-2`` and so on.

        Raises:
            MappingLengthMismatch: The iterables differ in length.
            MappingMissingIterable: No argument is an iterable.
            ConfigurationError: A training cannot start as configured; none was started.
        """
        values = {"train_loop": train_loop, **options}
        for name, value in values.items():
            if isinstance(value, PrefectFuture):
                values[name] = value.result()
            elif isinstance(value, dict | BaseModel):
                values[name] = unmapped(value)
        calls = expand_mapping_parameters(self.submit, values)
        trainings = []
        for number, call in enumerate(calls, start=1):
            named = call["options"]
            if isinstance(options.get("run_name"), str):
                named["run_name"] += f"-{number}"
            trainings.append(make_training(call["train_loop"], **named))
        return PrefectFutureList(map(_submit, trainings))  # type: ignore[abstract]


elastic_train = _ElasticTrain()


def _submit(training: Training) -> PrefectFuture[TrainingResult]:
    training.submitted = True
    watch_signals()
    future: PrefectFuture[TrainingResult] = _task(training).submit(training)
    future.add_done_callback(lambda _: training.close())
    return future


async def aelastic_train(train_loop: TrainLoop, **options: Unpack[TrainOptions]) -> TrainingResult:
    """Train like :data:`elastic_train`, without blocking the event loop.

    Takes the same arguments, returns and raises the same. Cancelling the coroutine stops the training.
    """
    watch_signals()
    interrupts = count_signals(signal.SIGINT)
    training = make_training(train_loop, **options)
    # The event loop's own thread pool is small, and other trainings may occupy it for weeks.
    with _closing(training), ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-train") as thread:
        result: asyncio.Future[TrainingResult] = asyncio.get_running_loop().run_in_executor(
            thread, contextvars.copy_context().run, _task(training), training
        )
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            training.cancelled = True
            await asyncio.gather(result, return_exceptions=True)
            if count_signals(signal.SIGINT) > interrupts:
                # asyncio turns Ctrl-C into a cancellation, which Prefect would take for the loss of a machine.
                raise KeyboardInterrupt from None
            raise


def make_training(train_loop: TrainLoop, **options: Unpack[TrainOptions]) -> Training:
    """Check the arguments of ``elastic_train``, load the blocks, and return the numbered training, not yet started."""
    check_options(options)
    get_settings()  # refuses a wrong setting now, even if no block is looked up
    values: dict[str, Any] = {**options}
    loaded = {argument: load_block(argument, values.get(argument)) for argument in Blocks._fields}
    saved = {
        argument: saved_name(block)
        for argument, block in loaded.items()
        if block is not values.get(argument) and saved_name(block)
    }
    payload = pickle_payload(make_payload(train_loop, options))
    position = count_training()  # after the checks, so that a refused training is not counted
    request = make_request(train_loop, options, payload, position)
    training_type = LocalTraining if options.get("local") else Training
    return training_type(request, Blocks(**loaded), saved, position, options.get("timeout_seconds"))


@contextmanager
def _closing(training: Training) -> Iterator[None]:
    """Close a training when the ``with`` block ends.

    Convert the error that its Prefect task has raised into the one for the flow, such as Prefect's ``Abort``.
    """
    try:
        yield
        if training.cancellation:
            raise training.cancellation.with_traceback(None)
    except SilentEndError as error:
        raise Abort(str(error)) from None
    except AttemptFailedError as error:
        raise error.with_traceback(None)  # noqa: B904 - the message is enough, and Prefect logs all frames
    finally:
        training.close(sys.exc_info()[1])


def _task(training: Training) -> Any:
    """Return the Prefect task of a training, with the run's name and a retry for each driver restart in the budget.

    The training updates the number of retries after each attempt.
    """
    # No delay by Prefect, which has a default in its settings: the training waits itself, and supervises the cluster.
    return _elastic_train_task.with_options(
        task_run_name=training.request.run_name,
        retries=training.blocks.failures.driver_restarts,
        retry_delay_seconds=0,
    )


@task(name="elastic_train", cache_policy=NO_CACHE, retry_condition_fn=may_retry)
def _elastic_train_task(training: Training) -> TrainingResult | State[Any]:
    return training.attempt()
