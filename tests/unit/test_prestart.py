"""Which processes of a local cluster get ready before anybody needs them, as far as that needs no cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_elastic_train.core.request import MARK_VARIABLE, Owner, RunRequest
from prefect_elastic_train.core.settings import ClusterSettings, ScalingSettings
from prefect_elastic_train.elastic import prestart
from prefect_elastic_train.runs.identity import fingerprint
from tests.unit.support import spec

GET_READY = """
import sys
import prefect_elastic_train.elastic.prestarted
print(*(name for name in ("torch._dynamo", "ray.train.torch", "torch") if name in sys.modules))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MARK_VARIABLE, str(tmp_path))
    request = RunRequest("mnist", Owner(flow_run_id="1"), fingerprint("m:loop", "torch", {}))
    scaling = ScalingSettings(max_workers=8, resources_per_worker={"CPU": 2})
    for name, value in prestart.environment(spec(request, scaling=scaling), tmp_path, cpus=1).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "prestart"


def _states(place: Path) -> list[str]:
    return sorted(file.name.partition("-")[0] for file in place.iterdir())


def _get_ready() -> str:
    done = subprocess.run([sys.executable, "-c", GET_READY], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.strip()


def test_only_so_many_processes_get_ready_as_are_wanted_and_leave_out_for_now_what_the_first_step_needs(
    place: Path,
) -> None:
    assert _states(place) == ["needed", "wanted", "wanted"], "a controller and as many workers as it has CPUs for"
    assert [_get_ready() for _ in range(3)] == ["ray.train.torch torch", "ray.train.torch torch", ""]
    assert _states(place) == ["needed", "ready", "ready"]


def test_one_that_nobody_waits_for_gets_ready_for_a_first_step(place: Path) -> None:
    prestart._want(place, 1, in_a_hurry=False)
    assert _get_ready() == "torch._dynamo ray.train.torch torch"
    assert _states(place) == ["ready"]
    prestart.hurry()
    assert _states(place) == ["needed", "ready"]


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["ray::IDLE", "60"], executable="/bin/sleep")
    yield process
    process.kill()
    process.wait()


def test_those_that_lack_and_fit_the_memory_are_asked_for_once_none_boots(
    place: Path, monkeypatch: pytest.MonkeyPatch, idle: subprocess.Popen[bytes]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prestart, "_ask_node", asked.append)
    monkeypatch.setattr(prestart, "memory_left", lambda: 1.5 * prestart.WARM_BYTES)
    (place / f"ready-{idle.pid}").touch()
    (place / f"ready-{os.getpid()}").touch()  # which serves somebody
    (place / "ready-999999999").touch()
    booting = place / f"boots-{os.getpid()}"
    booting.touch()
    pool = prestart.Prestarted()
    assert (pool.fill(4, in_any_case=True), asked) == (None, []), "Ray would forget of them"
    assert _states(place) == ["boots", "needed", "ready", "wanted", "wanted"]
    booting.unlink()
    assert (pool.fill(4, in_any_case=False), asked) == (None, [1]), "for one there is memory"
    assert _states(place) == ["ready", "wanted"]
    assert (pool.fill(4, in_any_case=True), asked) == (None, [1]), "it has not had the time to boot"
    pool._asked_at = float("-inf")
    assert (pool.fill(4, in_any_case=True), asked) == (None, [1, 3])
    assert _states(place) == ["ready", "wanted", "wanted", "wanted"]
    (size,) = pool.fill(1, in_any_case=False) or []
    assert size > 0


def test_only_a_local_cluster_whose_workers_have_no_environment_of_their_own_keeps_processes_ready() -> None:
    assert spec().is_prestarted
    for other in (
        spec(scaling=ScalingSettings(standby="off")),
        spec(scaling=ScalingSettings(accelerator="gpu")),
        spec(cluster=ClusterSettings(address="10.0.0.1:6379")),
        spec(cluster=ClusterSettings(runtime_env={"env_vars": {"A": "b"}})),
    ):
        assert not other.is_prestarted
