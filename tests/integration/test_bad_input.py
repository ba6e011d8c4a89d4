"""Bad input gets one clear error, at once, and nothing is left of it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
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
from tests.support.gateway import Gateway
from tests.support.processes import ROOT, SESSION_VARIABLE, RayHead, attempts, free_port

pytestmark = pytest.mark.usefixtures("api")

LOOP = "tests.support.loops:counting_loop"


def _fail(loop: Any = LOOP, **arguments: Any) -> tuple[Exception, int]:
    """Train in a flow; give its error and how many times its task ran."""

    @flow
    def bad() -> None:
        elastic_train(
            loop,
            failures=FailureBudget(driver_restarts=3, driver_restart_delay_seconds=0),
            **{"framework": "none", "train_loop_config": {"steps": 1}, **arguments},
        )

    state = bad(return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, Exception)
    this_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        return error, sum(run.run_count for run in client.read_task_runs(flow_run_filter=this_run))


def _own_processes() -> list[str]:
    """Give what trainings of this test process have left, its own children or nobody's."""
    ours = os.environ[SESSION_VARIABLE]
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(SESSION_VARIABLE) != ours or not environment.get(MARK_VARIABLE):
                continue
            if process.ppid() in (os.getpid(), 1):
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


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
        ({"train_loop_config": [1]}, ["dict", "list"]),
    ],
)
def test_what_can_be_seen_without_starting_anything_is_refused_before(
    arguments: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    arguments.setdefault("storage", LocalStorage(path=str(tmp_path / "runs")))
    error, runs = _fail(**arguments)
    assert runs == 0, "not even its task was begun"
    assert isinstance(error, ConfigurationError)
    for part in parts:
        assert part in str(error)
    assert not (tmp_path / "runs").exists()


def test_loop_that_cannot_be_sent_is_refused_before_anything_starts(tmp_path: Path) -> None:
    lock = threading.Lock()

    def loop() -> None:
        with lock:
            pass

    error, _ = _fail(loop, storage=LocalStorage(path=str(tmp_path / "runs")))
    assert isinstance(error, ConfigurationError)
    assert "cannot be sent to another process" in str(error)


def _drive(tmp_path: Path, joined: RayCluster, parts: list[str], at_most: float = 30.0, **arguments: Any) -> None:
    started = time.monotonic()
    error, runs = _fail(**{"storage": LocalStorage(path=str(tmp_path / "runs")), "cluster": joined, **arguments})
    assert isinstance(error, AttemptFailedError), error
    assert not error.retryable
    for part in parts:
        assert part in str(error)
    assert runs == 1
    assert time.monotonic() - started < at_most
    assert len([a for run in (tmp_path / "runs").glob("*") for a in attempts(run)]) == 0
    assert _own_processes() == []


@pytest.mark.parametrize(
    ("loop", "parts"),
    [
        ("no_such_module:loop", ["no_such_module", "ModuleNotFoundError"]),
        ("tests.support.loops:no_such_loop", ["has no 'no_such_loop'"]),
    ],
)
def test_import_path_that_leads_nowhere_is_refused(
    tmp_path: Path, joined: RayCluster, loop: str, parts: list[str]
) -> None:
    _drive(tmp_path, joined, parts, loop=loop)


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path, joined: RayCluster) -> None:
    in_the_way = tmp_path / "a-file"
    in_the_way.write_text("")
    _drive(
        tmp_path,
        joined,
        ["storage_error", str(in_the_way), "LocalStorage"],
        storage=LocalStorage(path=str(in_the_way / "runs")),
    )


def test_address_where_nothing_listens_is_refused_after_a_bounded_wait(tmp_path: Path, joined: RayCluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    _drive(
        tmp_path,
        joined,
        [address, "ray start --head"],
        cluster=RayCluster(address=address, connect_timeout_seconds=2),
    )


def test_listener_that_is_no_head_is_refused_after_a_bounded_wait(tmp_path: Path, joined: RayCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        cluster = RayCluster(address=address, connect_timeout_seconds=3)
        _drive(tmp_path, joined, [address, "does not answer as a Ray head"], cluster=cluster)


def test_wrong_token_is_refused(tmp_path: Path, joined: RayCluster, head: RayHead) -> None:
    wrong = RayCluster(address=head.address, auth_token="0" * 32)
    _drive(tmp_path, joined, [head.address, "token"], at_most=60, cluster=wrong)


@pytest.mark.full
def test_more_workers_than_the_local_cluster_can_hold_are_refused(tmp_path: Path, joined: RayCluster) -> None:
    _drive(
        tmp_path,
        joined,
        ["min_workers=3 need 6 CPU", "has 2"],
        at_most=60,
        cluster=RayCluster(num_cpus=2),
        scaling=ElasticScaling(min_workers=3, max_workers=3, resources_per_worker={"CPU": 2}),
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            {"cluster": RayCluster(working_dir="/no/such/dir")},
            ["Ray does not accept the configuration", "/no/such/dir must be an existing"],
        ),
        ({"worker_runtime_env": {"env_vars": {"A": 1}}}, ["env_vars"]),
        ({"framework": "torch", "torch_config": 3}, ["Ray's TorchConfig and JaxConfig, got 3"]),
        ({"run_name": "new", "resume_from": "tpyo"}, ["resume_from='tpyo'", "has no committed checkpoint"]),
    ],
)
def test_what_ray_would_refuse_later_is_refused_before_anything_starts(
    tmp_path: Path, joined: RayCluster, arguments: dict[str, Any], parts: list[str]
) -> None:
    _drive(tmp_path, joined, parts, **arguments)
    assert list((tmp_path / "runs").glob("*")) == [], "nothing of the run is there"


@pytest.mark.full
def test_placement_that_a_local_cluster_can_never_give_is_refused(tmp_path: Path, joined: RayCluster) -> None:
    scaling = ElasticScaling(min_workers=1, max_workers=2, placement_strategy="STRICT_SPREAD")
    _drive(tmp_path, joined, ["the local cluster is one node"], at_most=60, cluster=RayCluster(), scaling=scaling)


@pytest.mark.full
def test_automatic_address_without_a_cluster_is_refused_at_once(
    tmp_path: Path, joined: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    cluster = RayCluster(address="auto", connect_timeout_seconds=2)
    _drive(tmp_path, joined, ["no Ray cluster answers at"], cluster=cluster)


def _job(what: str, head: RayHead, api_url: str, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Give the fields of a `RayCluster` that a job cannot be submitted to, or not run in."""
    block = head.jobs_block
    if what == "wrong token":
        return {**block, "auth_token": "not-the-token-of-this-cluster"}
    if what == "wrong address":
        return {**block, "address": f"http://127.0.0.1:{free_port()}", "connect_timeout_seconds": 5}
    if what == "no dashboard":
        return {**block, "address": api_url.removesuffix("/api")}
    if what == "unknown certificate":
        return {**block, "address": stack.enter_context(Gateway(head.url, folder)).url}
    if what == "no certificate file":
        return {**block, "address": "https://127.0.0.1:1", "ca_bundle": "/nowhere.pem"}
    if what == "missing folder":
        return {**block, "working_dir": "/nowhere"}
    if what == "missing package":
        code = shutil.copytree(ROOT / "tests" / "support" / "pretending", folder / "code")
        (code / "hidden").write_text("tenacity")
        return {**block, "working_dir": str(code)}
    return block


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("wrong token", ["refused the token", "auth_token of the RayCluster"]),
        ("wrong address", ["no Ray dashboard answers at", "Correct the address"]),
        ("no dashboard", ["is no Ray dashboard"]),
        ("unknown certificate", ["is not trusted", "ca_bundle"]),
        ("no certificate file", ["ca_bundle '/nowhere.pem'", "cannot be read"]),
        ("missing folder", ["Ray does not accept the job", "directory /nowhere must be an existing directory"]),
        ("missing package", ["the cluster lacks what the driver needs: tenacity", "runtime_env"]),
        pytest.param("another Python", ["the cluster runs Python", "and the flow Python 3.99"], marks=pytest.mark.full),
        pytest.param("missing module", ["module 'nowhere.at_all' cannot be imported"], marks=pytest.mark.full),
    ],
)
def test_job_that_cannot_be_submitted_or_cannot_run_is_refused(
    tmp_path: Path, head: RayHead, api_url: str, monkeypatch: pytest.MonkeyPatch, what: str, parts: list[str]
) -> None:
    if what == "another Python":
        monkeypatch.setattr(package, "PYTHON", "3.99")
    with ExitStack() as stack:
        cluster = RayCluster(**_job(what, head, api_url, tmp_path, stack))
        _drive(tmp_path, cluster, parts, loop="nowhere.at_all:loop" if what == "missing module" else LOOP)
