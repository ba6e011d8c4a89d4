"""Bad input gets one clear error, at once, and nothing is left of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from prefect_elastic_train import (
    AttemptFailedError,
    ConfigurationError,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    RayCluster,
    elastic_train,
)
from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.supervisor import job_package as package
from tests.support.clusters import RayHead
from tests.support.processes import SESSION_VARIABLE, attempts, carrying, free_port

LOOP = "tests.support.loops:hashing_loop"


def _fail(client: SyncPrefectClient, loop: Any = LOOP, **arguments: Any) -> tuple[Exception, int]:
    """Train in a flow; returns its error and how many times its task ran."""
    budget = FailureBudget(driver_restarts=3, driver_restart_delay_seconds=0)

    @flow
    def bad() -> None:
        elastic_train(loop, failures=budget, **{"framework": "none", "train_loop_config": {"steps": 1}, **arguments})

    state = bad(return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, Exception)
    this_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    return error, sum(run.run_count for run in client.read_task_runs(flow_run_filter=this_run))


def _left() -> list[psutil.Process]:
    """What trainings of this test process have left, its own children or nobody's."""
    ours = [one for one in carrying(f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}") if one.pid != os.getpid()]
    return [one for one in ours if one.environ().get(MARK_VARIABLE) and one.ppid() in (os.getpid(), 1)]


def _unpicklable() -> Any:
    lock = threading.Lock()

    def loop() -> None:
        with lock:
            pass

    return loop


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"framework": "tensorflow"}, ["framework 'tensorflow'", "'torch'", "'jax'", "'none'"]),
        ({"run_name": "a/b"}, ["'a/b'", "letters, digits"]),
        ({"resume": True}, ["run_name"]),
        ({"resume": True, "run_name": "a", "resume_from": "b"}, ["one of them"]),
        ({"resume_from": "../other", "run_name": "a"}, ["'../other'"]),
        ({"scaling": "no-such-block"}, ["elastic-scaling/no-such-block", "prefect block ls"]),
        ({"scaling": RayCluster()}, ["ElasticScaling", "RayCluster"]),
        ({"cluster": RayCluster(auth_token="********")}, ["auth_token", "asterisks", "Save the block"]),
        ({"loop": "no path"}, ["'no path'", "package.module:function"]),
        ({"loop": 3}, ["int"]),
        ({"loop": lambda config, other: None}, ["2 arguments", "config, other"]),
        ({"loop": _unpicklable()}, ["cannot be sent to another process"]),
        ({"train_loop_config": [1]}, ["dict", "list"]),
    ],
)
def test_what_can_be_seen_without_starting_anything_is_refused_before(
    arguments: dict[str, Any], parts: list[str], tmp_path: Path, client: SyncPrefectClient
) -> None:
    error, runs = _fail(client, **{"storage": LocalStorage(path=str(tmp_path / "runs")), **arguments})
    assert isinstance(error, ConfigurationError)
    assert runs == 0, "not even its task was begun"
    for part in parts:
        assert part in str(error)
    assert not (tmp_path / "runs").exists()


def _drive(client: SyncPrefectClient, folder: Path, parts: list[str], **arguments: Any) -> None:
    """Train what a driver refuses: one error that is not retried, and no attempt."""
    started = time.monotonic()
    error, runs = _fail(client, **{"storage": LocalStorage(path=str(folder / "runs")), **arguments})
    assert isinstance(error, AttemptFailedError), error
    assert (error.retryable, runs) == (False, 1)
    for part in parts:
        assert part in str(error)
    assert time.monotonic() - started < 60
    assert [one for run in (folder / "runs").glob("*") for one in attempts(run)] == []
    assert _left() == []


@pytest.mark.parametrize(
    ("loop", "parts"),
    [
        ("no_such_module:loop", ["no_such_module", "ModuleNotFoundError"]),
        pytest.param("tests.support.loops:no_such_loop", ["has no 'no_such_loop'"], marks=pytest.mark.full),
    ],
)
def test_import_path_that_leads_nowhere_is_refused(
    tmp_path: Path, joined: RayCluster, client: SyncPrefectClient, loop: str, parts: list[str]
) -> None:
    _drive(client, tmp_path, parts, cluster=joined, loop=loop)


def test_storage_that_cannot_be_written_is_refused(
    tmp_path: Path, joined: RayCluster, client: SyncPrefectClient
) -> None:
    (tmp_path / "a-file").write_text("")
    storage = LocalStorage(path=str(tmp_path / "a-file" / "runs"))
    _drive(
        client,
        tmp_path,
        ["storage_error", str(tmp_path / "a-file"), "write permission"],
        cluster=joined,
        storage=storage,
    )


def test_address_where_nothing_listens_is_refused_after_a_bounded_wait(
    tmp_path: Path, client: SyncPrefectClient
) -> None:
    cluster = RayCluster(address=f"127.0.0.1:{free_port()}", connect_timeout_seconds=2)
    _drive(client, tmp_path, [cluster.address, "ray start --head"], cluster=cluster)


def test_wrong_token_is_refused(tmp_path: Path, client: SyncPrefectClient, head: RayHead) -> None:
    _drive(client, tmp_path, [head.address, "token"], cluster=RayCluster(address=head.address, auth_token="0" * 32))


NEVER = ElasticScaling(min_workers=3, max_workers=3, resources_per_worker={"CPU": 2})
SPREAD = ElasticScaling(min_workers=1, max_workers=2, placement_strategy="STRICT_SPREAD")


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"worker_runtime_env": {"env_vars": {"A": 1}}}, ["env_vars"]),
        ({"framework": "torch", "torch_config": 3}, ["Ray's TorchConfig and JaxConfig, got 3"]),
        ({"run_name": "new", "resume_from": "tpyo"}, ["resume_from='tpyo'", "has no committed checkpoint"]),
        ({"cluster": RayCluster(working_dir="/no/such/dir")}, ["/no/such/dir must be an existing"]),
        ({"cluster": RayCluster(num_cpus=2), "scaling": NEVER}, ["min_workers=3 need 6 CPU", "has 2"]),
        ({"cluster": RayCluster(), "scaling": SPREAD}, ["the local cluster is one node"]),
    ],
)
def test_what_ray_would_refuse_later_is_refused_before_anything_starts(
    tmp_path: Path, joined: RayCluster, client: SyncPrefectClient, arguments: dict[str, Any], parts: list[str]
) -> None:
    _drive(client, tmp_path, parts, **{"cluster": joined, **arguments})
    assert list((tmp_path / "runs").glob("*")) == [], "nothing of the run is there"


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ({"auth_token": "not-the-token"}, ["refused the token", "auth_token of the RayCluster"]),
        pytest.param({"address": "http://127.0.0.1:1"}, ["no Ray dashboard answers at"], marks=pytest.mark.full),
        pytest.param({"address": "API"}, ["is no Ray dashboard"], marks=pytest.mark.full),
        pytest.param({"ca_bundle": "/nowhere.pem"}, ["ca_bundle '/nowhere.pem'"], marks=pytest.mark.full),
        pytest.param({"working_dir": "/nowhere"}, ["must be an existing directory"], marks=pytest.mark.full),
        pytest.param(
            {"python": "3.99"}, ["the cluster runs Python", "and the flow Python 3.99"], marks=pytest.mark.full
        ),
        pytest.param({"loop": "nowhere.at_all:loop"}, ["'nowhere.at_all' cannot be imported"], marks=pytest.mark.full),
    ],
    ids=lambda value: next(iter(value)),
)
def test_job_that_cannot_be_submitted_or_cannot_run_is_refused(
    tmp_path: Path,
    head: RayHead,
    client: SyncPrefectClient,
    monkeypatch: pytest.MonkeyPatch,
    what: dict[str, str],
    parts: list[str],
) -> None:
    fields = dict(what)
    loop = fields.pop("loop", LOOP)
    monkeypatch.setattr(package, "PYTHON", fields.pop("python", package.PYTHON))
    if fields.get("address") == "API":
        fields["address"] = str(client.api_url).removesuffix("/api/")
    cluster = RayCluster(**{**head.jobs_block, "connect_timeout_seconds": 5, **fields})
    _drive(client, tmp_path, parts, loop=loop, cluster=cluster)
