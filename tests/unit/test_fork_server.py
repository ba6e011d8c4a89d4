"""Processes that are forked in place of those that Ray starts, and what becomes of these where none is."""

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
from prefect_elastic_train.supervisor.local_cluster import LocalCluster
from tests.support.processes import wait_for
from tests.unit.support import spec

#: Stands in for Ray's own program.
WORKER = """
import json, os, random, sys
import numpy
jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
about = {"imported": [name for name in ("ray", "torch._dynamo") if name in sys.modules], "arguments": sys.argv[1:]}
about |= {"parent": os.getppid(), "folder": os.getcwd(), "main": __name__, "own": os.environ.get("RAY_OWN", "")}
about |= {"leads": os.getpgid(0) == os.getpid(), "finds": [path for path in sys.path if os.environ["TMP"] in path]}
about |= {"threads": torch.get_num_threads() if torch else 0, "platforms": jax.config.jax_platforms if jax else ""}
about |= {"chance": [random.random(), numpy.random.rand(), *([torch.rand(1).item()] if torch else [])]}
print(json.dumps(about))
"""
#: A fork server that cannot fork while there is a file "crowded".
SERVER = """
import os, runpy, sys
fork = os.fork
def fork_unless_crowded():
    if os.path.exists("crowded"):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = fork_unless_crowded
sys.path[0] = os.getcwd()  # as "python -m" does
sys.argv = ["fork_server", sys.argv[1], "1"]
runpy.run_module("prefect_elastic_train.supervisor.fork_server", run_name="__main__")
"""
#: A request that is given up before the first imports of Ray are done.
HASTY = """
from prefect_elastic_train.supervisor import forked_worker
forked_worker._FORK_SECONDS = 0.1
forked_worker.request_fork()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    own = {FORK_SERVER_VARIABLE: f"{tmp_path}/fork", forked_worker.WORKER_VARIABLE: str(program), "TMP": str(tmp_path)}
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | own


@pytest.fixture
def server(
    environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[bytes]]:
    framework = getattr(request, "param", "torch")
    with subprocess.Popen([sys.executable, "-c", SERVER, framework], env=environment, cwd=tmp_path) as process:
        wait_for((tmp_path / "fork").exists, 60, "the socket")
        yield process
        process.kill()


def _worker(environment: dict[str, str], folder: Path, *arguments: str) -> dict[str, Any]:
    """What a worker says of itself, which Ray has started with the output and the folder of this process."""
    out = folder / "out"
    with out.open("wb") as stream:
        command = [sys.executable, forked_worker.__file__, *arguments]
        subprocess.run(command, env=environment, stdout=stream, cwd=folder, check=True)
    wait_for(lambda: out.read_text().endswith("\n"), 60, "a worker")
    return json.loads(out.read_text())


def test_a_forked_worker_is_as_ray_has_started_it_but_for_what_is_imported(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    chances = set()
    for own in ("1", "2"):
        about = _worker(environment | {"RAY_OWN": own}, folder, "--id", own)
        chances |= {*about.pop("chance")}
        assert about == {
            "imported": ["ray", "torch._dynamo"],
            "arguments": ["--id", own],
            "own": own,
            "main": "__main__",
            "parent": server.pid,
            "leads": True,  # Ray ends the group of one that is gone
            "folder": str(folder),
            "finds": [],
            "threads": 1,
            "platforms": "",
        }
    assert len(chances) == 6, "each has its own chance"
    wait_for(lambda: not psutil.Process(server.pid).children(), 30, "the end of both")


@pytest.mark.parametrize("server", ["jax"], indirect=True)
def test_jax_chooses_its_platform_anew_in_a_forked_worker(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    about = _worker(environment, tmp_path)
    assert (about["parent"], about["platforms"]) == (server.pid, None), "as where JAX_PLATFORMS is not set"


def test_none_is_forked_for_a_request_that_nobody_waits_for_any_more(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    hasty = subprocess.run([sys.executable, "-c", HASTY], env=environment, capture_output=True, text=True, cwd="/")
    assert "TimeoutError" in hasty.stderr
    assert _worker(environment, tmp_path)["parent"] == server.pid
    wait_for(lambda: not psutil.Process(server.pid).children(), 30, "the end of all")
    assert hasty.stdout == ""


@pytest.mark.parametrize("why", ["crowded", "own variables", "never there", "killed"])
def test_a_worker_that_is_not_forked_boots_by_itself(
    server: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path, why: str
) -> None:
    if why == "crowded":
        (tmp_path / "crowded").touch()
    elif why == "own variables":
        environment["TORCHDYNAMO_VERBOSE"] = "1"
    else:
        server.kill()
        server.wait()
        if why == "never there":
            (tmp_path / "fork").unlink()
    about = _worker(environment, tmp_path, "--id", "1")
    assert (about["imported"], about["arguments"], about["parent"]) == ([], ["--id", "1"], os.getpid())


@pytest.mark.parametrize(("given", "all_of_them"), [(4, 6), (0, len(os.sched_getaffinity(0)) + 2)])
def test_a_local_cluster_has_the_cpus_that_tasks_beside_its_workers_need(
    tmp_path: Path, given: int, all_of_them: int
) -> None:
    request = replace(spec().request, extra_cpus=2)
    cluster = LocalCluster(spec(request, cluster=ClusterSettings(num_cpus=given)), tmp_path, {}, DeviceClaims())
    assert f"--num-cpus={all_of_them}" in cluster._command()


def test_none_is_forked_where_an_import_has_used_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: False)  # other tests of this process may have used one
    assert fork_server._id_of_child() != b""
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    assert fork_server._id_of_child() == b""


def test_only_workers_without_tpus_and_an_environment_of_their_own_are_forked() -> None:
    assert spec().can_fork
    assert spec(scaling=ScalingSettings(accelerator="gpu")).can_fork
    assert spec(replace(spec().request, has_datasets=True)).can_fork
    for other in (
        spec(scaling=ScalingSettings(accelerator="tpu")),
        spec(cluster=ClusterSettings(address="10.0.0.1:6379")),
        spec(cluster=ClusterSettings(runtime_env={"env_vars": {"A": "b"}})),
    ):
        assert not other.can_fork
