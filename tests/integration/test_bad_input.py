"""Bad input gets one clear error, at once, and nothing is left of it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from prefect_elastic_train import (
    ConfigurationError,
    FailureBudget,
    Outcome,
    RayCluster,
    elastic_train,
)
from prefect_elastic_train.core.request import MARK_VARIABLE
from tests.support.clusters import RayHead
from tests.support.processes import ROOT, SESSION_VARIABLE, Start, attempts, carrying, free_port

LOOP = "tests.support.loops:hashing_loop"


def _fail(client: SyncPrefectClient, loop: Any = LOOP, **arguments: Any) -> tuple[Exception, int]:
    """Train in a flow; returns its error and how many times its task ran."""
    budget = FailureBudget(driver_restarts=3, driver_restart_delay_seconds=0)

    @flow
    def bad() -> None:
        elastic_train(loop, failures=budget, **{"framework": "none", "train_loop_config": {"steps": 1}, **arguments})

    state = bad(return_state=True)
    this_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    runs = sum(run.run_count for run in client.read_task_runs(flow_run_filter=this_run))
    return state.result(raise_on_failure=False), runs


def test_a_block_that_does_not_exist_is_refused_at_once(tmp_path: Path, client: SyncPrefectClient) -> None:
    error, runs = _fail(client, storage=tmp_path / "runs", scaling="no-such-block")
    assert isinstance(error, ConfigurationError)
    assert "elastic-scaling/no-such-block" in str(error)
    assert "prefect block ls" in str(error)
    assert runs == 0, "not even its task was begun"
    assert not (tmp_path / "runs").exists()


def _raising(config: Any) -> None:
    raise ValueError(f"no such data: {config.source}")


@dataclass
class _Hyper:
    source: str


def test_what_a_loop_raises_is_the_cause_of_the_error_with_its_traceback(
    tmp_path: Path, client: SyncPrefectClient
) -> None:
    error, runs = _fail(
        client, _raising, storage=tmp_path / "a = 1, b", train_loop_config=_Hyper("s3"), run_name="a = 1, b"
    )
    assert (error.outcome, runs) == (Outcome.USER_ERROR, 1)
    assert "in _raising" in str(error.__cause__)
    assert str(error.__cause__).endswith("ValueError: no such data: s3")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"loop": "no_such_module:loop"}, ["no_such_module", "ModuleNotFoundError"]),
        ({"storage": "a-file/runs"}, ["storage_error", "a-file", "write permission"]),
        ({"cluster": {"address": "NOWHERE", "connect_timeout_seconds": 2}}, ["127.0.0.1", "ray start --head"]),
        ({"cluster": {"auth_token": "0" * 32}}, ["127.0.0.1", "token"]),
        ({"cluster": {"auth_token": "0" * 32, "address": "JOBS"}}, ["refused the token", "auth_token of the RayC"]),
        ({"worker_runtime_env": {"env_vars": {"A": 1}}}, ["env_vars"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_only_a_driver_can_see_is_one_error_that_is_not_retried_before_anything_trains(
    tmp_path: Path, head: RayHead, client: SyncPrefectClient, arguments: dict[str, Any], parts: list[str]
) -> None:
    (tmp_path / "a-file").write_text("")
    addresses = {"NOWHERE": f"127.0.0.1:{free_port()}", "JOBS": head.url}
    fields = {**head.block, **arguments.get("cluster", {})}
    fields["address"] = addresses.get(fields["address"], fields["address"])
    storage = tmp_path / arguments.get("storage", "runs")
    started = time.monotonic()
    error, runs = _fail(client, **{**arguments, "storage": storage, "cluster": RayCluster(**fields)})
    assert (error.retryable, runs) == (False, 1)
    for part in parts:
        assert part in str(error)
    assert time.monotonic() - started < 60
    assert [one for run in (tmp_path / "runs").glob("*") for one in attempts(run)] == []
    ours = carrying(f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}")
    assert [one for one in ours if one.environ().get(MARK_VARIABLE) and one.ppid() in (os.getpid(), 1)] == []


#: Sets another version of Ray, which may lack a name.
ANOTHER_RAY = """
import importlib.metadata, os
version, import_module = importlib.metadata.version, importlib.import_module
importlib.metadata.version = lambda name: "2.99.0" if name == "ray" else version(name)

def import_another(name, package=None):
    module = import_module(name, package)
    if name == "ray.util.tpu" and "LACKS" in os.environ:
        vars(module).pop("SlicePlacementGroup", None)
    return module

importlib.import_module = import_another
"""


@pytest.mark.parametrize("lacks", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_version_of_ray_that_is_not_tested_is_named_at_once_and_refused_if_it_lacks_a_name_in_use(
    start: Start, tmp_path: Path, lacks: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_RAY)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({"LACKS": "1"} if lacks else {})
    flow = start(config={"steps": 1}, environment=environment)
    ended = flow.wait(120)
    assert "was tested with Ray 2.58, 2.59, 2.60, not with 2.99.0" in flow.log
    if not lacks:
        assert ended["state"] == "COMPLETED"
        return
    assert (ended["state"], ended["outcome"]) == ("FAILED", "invalid")
    assert "cannot run with that: ray.util.tpu has no SlicePlacementGroup; there is no" in ended["error"]
    assert not flow.run, "nothing was begun"
