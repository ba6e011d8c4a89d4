"""Processes that are forked in place of those that Ray starts, and what becomes of these where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.core.settings import ClusterSettings, ScalingSettings
from prefect_elastic_train.supervisor import fork_server, forked_worker
from prefect_elastic_train.supervisor.devices import DeviceClaims
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.local_cluster import LocalCluster
from tests.support.processes import wait_for
from tests.unit.support import spec

#: Stands in for Ray's own program.
WORKER = """
import json, os, random, sys
import numpy
about = {"imported": [name for name in ("ray", "torch._dynamo") if name in sys.modules], "arguments": sys.argv[1:]}
about |= {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "folder": os.getcwd(), "main": __name__}
about |= {"chance": [random.random(), numpy.random.rand()], "path": sys.path, "own": os.environ.get("RAY_OWN", "")}
about |= {"platforms": sys.modules["jax"].config.jax_platforms if "jax" in sys.modules else "not imported"}
about["chance"] += [sys.modules["torch"].rand(1).item()] if "torch" in sys.modules else []
about |= {"threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0}
print(json.dumps(about))
"""


class Notes(Follower):
    """Collects notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str, level: int = 0) -> None:
        self.texts.append(text)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    own = {FORK_SERVER_VARIABLE: str(tmp_path / "fork"), forked_worker.WORKER_VARIABLE: str(program)}
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | own


@pytest.fixture
def server(
    environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[bytes]]:
    framework = getattr(request, "param", "torch")
    command = [sys.executable, "-m", "prefect_elastic_train.supervisor.fork_server", framework, "1"]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path)
    wait_for(lambda: Path(environment[FORK_SERVER_VARIABLE]).exists(), 60, "the socket")
    yield process
    process.kill()
    process.wait()


def _worker(environment: dict[str, str], folder: Path, *arguments: str) -> dict[str, Any]:
    """What a worker says of itself, which Ray has started with the output and the folder of this process."""
    out, program = folder / f"out-{len(list(folder.glob('out-*')))}", forked_worker.__file__
    with out.open("wb") as stream:
        subprocess.run([sys.executable, program, *arguments], env=environment, stdout=stream, cwd=folder, check=True)
    wait_for(lambda: out.read_text().endswith("\n"), 60, "a worker")
    about: dict[str, Any] = json.loads(out.read_text())
    return about


def test_a_forked_worker_is_as_ray_has_started_it_but_for_what_is_imported(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    one, other = (_worker(environment | {"RAY_OWN": own}, folder, "--id", own) for own in ("1", "2"))
    assert one["imported"] == other["imported"] == ["ray", "torch._dynamo"]
    for about, own in ((one, "1"), (other, "2")):
        assert (about["arguments"], about["own"], about["main"]) == (["--id", own], own, "__main__")
        assert (about["parent"], about["group"]) == (server.pid, about["pid"]), "Ray ends the group of one that is gone"
        assert about["folder"] == str(folder)
        assert str(tmp_path) not in about["path"]
        assert about["threads"] == 1
    assert not {*one["chance"]} & {*other["chance"]}, "each has its own chance"
    wait_for(lambda: not psutil.Process(server.pid).children(), 30, "the end of both")


@pytest.mark.parametrize("server", ["jax"], indirect=True)
def test_jax_chooses_its_platform_anew_in_a_forked_worker(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    about = _worker(environment, tmp_path)
    assert (about["parent"], about["platforms"]) == (server.pid, None), "as where JAX_PLATFORMS is not set"


def test_none_is_forked_for_a_request_that_nobody_waits_for_any_more(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late.py"
    late.write_text("open(__file__ + '.ran', 'w').close()")
    with monkeypatch.context() as own:
        own.setattr(os, "environ", environment)
        own.setattr(forked_worker, "_FORK_SECONDS", 0.1)
        with pytest.raises(TimeoutError):
            forked_worker.request_fork([str(late)])  # which has the first imports of Ray to wait for
    assert _worker(environment, tmp_path)["parent"] == server.pid
    wait_for(lambda: not psutil.Process(server.pid).children(), 30, "the end of all")
    assert [one.name for one in tmp_path.glob("late*")] == ["late.py"], "its launcher has become that worker by itself"


#: A fork server that cannot fork while there is a file "crowded".
_CROWDED = """
import os, runpy, sys
fork = os.fork
def fork_unless_crowded():
    if os.path.exists("crowded"):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = fork_unless_crowded
sys.argv = ["fork_server", "none", "1"]
runpy.run_module("prefect_elastic_train.supervisor.fork_server", run_name="__main__")
"""


def test_a_worker_that_cannot_be_forked_boots_by_itself(environment: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _CROWDED], env=environment, cwd=tmp_path) as server:
        try:
            wait_for(lambda: Path(environment[FORK_SERVER_VARIABLE]).exists(), 60, "the socket")
            _worker(environment, tmp_path)  # the first request, which does the imports
            assert _worker(environment, tmp_path)["parent"] == server.pid
            (tmp_path / "crowded").touch()
            assert _worker(environment, tmp_path)["parent"] == os.getpid()
        finally:
            server.kill()


def test_a_worker_with_variables_of_its_own_boots_by_itself(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    about = _worker(environment | {"TORCHDYNAMO_VERBOSE": "1"}, tmp_path, "--id", "1")
    assert (about["imported"], about["arguments"], about["parent"]) == ([], ["--id", "1"], os.getpid())


@pytest.mark.parametrize("is_left", [False, True], ids=["never there", "killed"])
def test_without_a_server_a_worker_boots_by_itself(
    environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest, is_left: bool
) -> None:
    if is_left:
        server = request.getfixturevalue("server")
        server.kill()
        server.wait()
        assert Path(environment[FORK_SERVER_VARIABLE]).exists()
    assert _worker(environment, tmp_path)["parent"] == os.getpid()


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (True, "FileNotFoundError: [Errno 2] No such file or directory"),
        (False, "its process ended with -9"),
    ],
    ids=["exited", "killed"],
)
def test_why_a_fork_server_has_ended_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, reason: str
) -> None:
    notes = Notes()
    monkeypatch.setattr(LocalCluster, "_command", lambda *_: ["sleep", "100"])
    cluster = LocalCluster(spec(), tmp_path, {**os.environ}, DeviceClaims())
    if fails:
        cluster._fork_variables[FORK_SERVER_VARIABLE] = "/no/such/folder/fork"
        cluster._environment[FORK_SERVER_VARIABLE] = "/no/such/folder/fork"
    cluster.start()
    server = cluster._fork_server
    assert server is not None
    assert cluster._head is not None
    try:
        if not fails:
            server.kill()
        server.wait(60)
        cluster.check_fork_server(notes)
        cluster.check_fork_server(notes)
    finally:
        server.kill()
        cluster._head.kill()
        cluster._head.wait()
    assert notes.texts == [f"Workers are not forked, and take longer to start: {reason}"]


def test_a_local_cluster_has_the_cpus_that_tasks_beside_its_workers_need(tmp_path: Path) -> None:
    for given, all_of_them in ((4, 6), (0, len(os.sched_getaffinity(0)) + 2)):
        asked = spec(cluster=ClusterSettings(num_cpus=given))
        asked = replace(asked, request=replace(asked.request, cpus_beside=2))
        command = LocalCluster(asked, tmp_path, {**os.environ}, DeviceClaims())._command("1", tmp_path)
        assert f"--num-cpus={all_of_them}" in command


def test_none_is_forked_where_an_import_has_used_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork_server._id_of_child() != b""
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    assert fork_server._id_of_child() == b""


def test_only_workers_without_tpus_and_an_environment_of_their_own_are_forked() -> None:
    assert spec().can_fork
    assert spec(scaling=ScalingSettings(accelerator="gpu")).can_fork
    for other in (
        spec(scaling=ScalingSettings(accelerator="tpu")),
        spec(cluster=ClusterSettings(address="10.0.0.1:6379")),
        spec(cluster=ClusterSettings(runtime_env={"env_vars": {"A": "b"}})),
    ):
        assert not other.can_fork
