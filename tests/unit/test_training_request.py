"""What ``elastic_train`` checks before anything starts, and what it tells the driver; without any server."""

import functools
import inspect
import pickle
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pydantic import BaseModel
from ray.data import DataContext, Dataset
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators.input_data_operator import InputData
from ray.data._internal.stats import DatasetStats
from ray.train.v2.api.validation_config import ValidationConfig

from prefect_elastic_train import (
    CheckpointPolicy,
    ConfigurationError,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    RayCluster,
)
from prefect_elastic_train.blocks import lookup
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import may_retry
from prefect_elastic_train.driver.user_code import make_datasets
from prefect_elastic_train.orchestration import task as task_module
from prefect_elastic_train.orchestration.arguments import TrainOptions, driver_spec
from prefect_elastic_train.orchestration.task import _elastic_train_task, _task, elastic_train, make_training


def loop(config: dict[str, Any]) -> None:
    """A train loop."""


def two(config: dict[str, Any], other: int) -> None:
    """Not a train loop."""


async def later(config: dict[str, Any]) -> None:
    """Not a train loop, either."""


def piece_by_piece(config: dict[str, Any]) -> Iterator[int]:
    """Nor is this one."""
    yield 1


#: As ``materialize()`` makes them.
BLOCKS = Dataset(
    LogicalPlan(InputData(input_data=[]), DataContext()), DataContext(), DatasetStats(metadata={}, parent=None)
)

REFUSED = [
    ({"train_loop": 7}, ["must be a function or the import path of one, got int"]),
    ({"train_loop": two}, ["'two' has the parameters (config, other)"]),
    ({"train_loop": later}, ["'later' is async or a generator: calling it runs nothing", "asyncio.run(...)"]),
    ({"train_loop": functools.partial(piece_by_piece)}, ["is async or a generator"]),
    ({"train_loop": "package.module"}, ["'package.module' is no import path", "'package.module:function'"]),
    ({"framework": "tensorflow"}, ["'tensorflow' is unknown", "'torch', 'jax', 'xgboost'"]),
    ({"timeout_seconds": 0}, ["timeout_seconds=0 must be above 0"]),
    ({"resume": True, "run_name": "a", "resume_from": "b"}, ["resume=True", "resume_from", "one of them"]),
    ({"resume_from": "../b"}, ["'../b' cannot name a run directory"]),
    ({"run_name": "a/b"}, ["'a/b' cannot name a run directory"]),
    ({"run_name": "latest"}, ["'latest' is what resume_from calls the newest earlier run"]),
    ({"scaling": FailureBudget()}, ["expected ElasticScaling or the name of one, got FailureBudget"]),
    ({"train_loop_config": {"lock": threading.Lock()}}, ["cannot be sent to another process", "lock"]),
    ({"datasets": {"train": BLOCKS}}, ["datasets['train'] holds data of this process", "{'train': make_dataset}"]),
    ({"cluster": RayCluster(auth_token="********")}, ["RayCluster.auth_token is masked", "Save the block"]),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_a_bad_request_is_refused_before_anything_starts(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make_training(**{"train_loop": loop, **arguments})
    for word in words:
        assert word in str(refused.value)


def test_each_option_is_documented() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(elastic_train) or "", re.MULTILINE)
    assert documented[: len(TrainOptions.__annotations__) + 1] == ["train_loop", *TrainOptions.__annotations__]


def test_an_argument_that_there_is_none_of_is_refused_as_pythons_functions_do() -> None:
    with pytest.raises(TypeError, match=r"elastic_train\(\) got an unexpected keyword argument 'num_workers'"):
        elastic_train(loop, num_workers=2)  # type: ignore[call-arg]


def test_a_request_without_anything_but_a_loop_works_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    training = make_training(train_loop=loop)
    spec = driver_spec(training.request, training.blocks)
    assert spec.request.run_name.startswith("loop-")
    assert spec.request.run_name != make_training(train_loop=loop).request.run_name
    assert (spec.request.named, spec.request.framework, spec.request.has_datasets) == (False, "torch", False)
    assert spec.storage.path == "/home/ada/elastic_train_runs"
    assert spec.cluster.is_local
    assert (spec.scaling.min_workers, spec.scaling.max_workers, spec.poll_interval_seconds) == (1, 1, 0.1)


PASSED = {
    "scaling": ElasticScaling(min_workers=2, max_workers=64),
    "failures": FailureBudget(driver_restarts=7),
    "checkpoints": CheckpointPolicy(keep=3),
    "storage": LocalStorage(path="/mnt/runs"),
    "cluster": RayCluster(address="auto", auth_token="hush"),
}


def test_everything_that_was_asked_for_reaches_the_driver_and_nothing_secret_the_text_of_the_request() -> None:
    config = {"password": "hush", "max_steps": 9, "max_epochs": "many", "num_steps": 128}
    of_the_user = {"train_loop": "package.module:loop", "train_loop_config": config, "jax_config": "j"}
    asked = {"run_name": "mnist", "resume_from": "base@best", "worker_runtime_env": {"env_vars": {"A": "1"}}}
    training = make_training(**of_the_user, **asked, **PASSED, framework="jax", datasets={"train": [1]})
    assert repr(training) == str(training) == "<training mnist>"
    assert pickle.loads(cloudpickle.dumps(training)).request == training.request, "as in another process"
    spec = driver_spec(training.request, training.blocks)
    wanted = spec.request
    assert {name: getattr(wanted, name) for name in asked} == asked
    assert (wanted.named, wanted.resume, wanted.has_datasets, wanted.framework) == (True, False, True, "jax")
    assert wanted.totals == {"max_steps": 9}
    assert {name: getattr(spec, name) for name in PASSED} == {name: block.plain() for name, block in PASSED.items()}
    assert spec.cluster.auth_token.get_secret_value() == "hush"
    assert spec.poll_interval_seconds == pytest.approx(0.32)
    payload = pickle.loads(wanted.payload)
    assert {name: getattr(payload, name) for name in of_the_user} == of_the_user


def test_datasets_are_made_with_the_settings_of_ray_data_in_the_flow_process(monkeypatch: pytest.MonkeyPatch) -> None:
    context = DataContext.get_current()
    before = context.target_max_block_size
    monkeypatch.setattr(context, "target_max_block_size", 7)
    asked = make_training(loop, datasets=lambda: {"bytes": DataContext.get_current().target_max_block_size})
    monkeypatch.setattr(context, "target_max_block_size", before)  # a driver is another process
    assert make_datasets(pickle.loads(asked.request.payload)) == {"bytes": 7}


def _validation(**resources: float) -> ValidationConfig:
    return ValidationConfig(loop, ray_remote_kwargs=resources)


@pytest.mark.parametrize(
    ("arguments", "cpus"),
    [
        ({}, 0),
        ({"datasets": {"train": [1]}}, 1),
        ({"validation_config": ValidationConfig(loop)}, 1),
        ({"validation_config": _validation(num_cpus=1.5), "datasets": {"train": [1]}}, 3),
        ({"validation_config": _validation(num_cpus=0)}, 0),
    ],
)
def test_datasets_and_a_validation_need_cpus_beside_those_of_the_workers(arguments: dict[str, Any], cpus: int) -> None:
    assert make_training(train_loop=loop, **arguments).request.extra_cpus == cpus


@dataclass
class Hyper:
    lr: float = 0.1
    max_steps: int = 9


class Model(BaseModel):
    width: int = 3


@pytest.mark.parametrize(
    ("config", "keys", "totals"),
    [(Hyper(), ["lr", "max_steps"], {"max_steps": 9}), (Model(), ["width"], {}), ([1, 2], [""], {})],
)
def test_a_config_may_be_of_any_type_and_its_fields_are_compared_by_name(
    config: Any, keys: list[str], totals: dict[str, int]
) -> None:
    request = make_training(loop, train_loop_config=config).request
    assert (list(request.fingerprint.config), request.totals) == (keys, totals)


@pytest.mark.parametrize(
    ("scaling", "is_reloaded"),
    [(None, True), ("lab", True), (ElasticScaling(), False)],
)
def test_a_saved_block_is_loaded_again_at_each_attempt_unless_the_call_passed_it_as_a_block(
    monkeypatch: pytest.MonkeyPatch, scaling: Any, is_reloaded: bool
) -> None:
    saved = scaling if isinstance(scaling, ElasticScaling) else ElasticScaling()
    saved._block_document_name, saved._is_anonymous = "lab", False
    chosen = lookup.chosen_block
    monkeypatch.setattr(
        lookup, "chosen_block", lambda argument, name: saved if argument == "scaling" else chosen(argument, name)
    )
    training = make_training(loop, scaling=scaling)
    assert training.blocks.scaling is saved
    assert training.saved_blocks == ({"scaling": "elastic-scaling/lab"} if is_reloaded else {})


def test_a_wrong_setting_is_refused_at_the_call_whatever_blocks_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "get_settings", get_settings.__wrapped__)  # which other tests have called
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ConfigurationError, match="LIVENESS_TIMEOUT_SECONDS='soon' is not allowed"):
        make_training(loop, **PASSED)


@pytest.mark.parametrize("directory", ["./runs", Path("runs")])  # a Path is never the name of a block
def test_a_storage_is_also_a_directory_which_stays_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = make_training(loop, storage=directory).blocks.storage
    monkeypatch.chdir("/")
    assert (type(storage), storage.path) == (LocalStorage, str(tmp_path / "runs"))


def test_the_task_has_the_retries_of_the_budget_and_the_training_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    # As by PREFECT_TASKS_DEFAULT_RETRY_DELAY_SECONDS.
    monkeypatch.setattr(_elastic_train_task, "retry_delay_seconds", 600)
    failures = FailureBudget(driver_restarts=4, driver_restart_delay_seconds=100)
    task = _task(make_training(loop, failures=failures, run_name="mnist"))
    assert (task.retries, task.retry_delay_seconds) == (4, 0)
    assert (task.retry_condition_fn, task.task_run_name) == (may_retry, "mnist")
