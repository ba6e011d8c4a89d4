"""Claims of local clusters on the GPUs of their machine, with pretended GPUs that no other test has."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import ClusterSettings, ScalingSettings
from prefect_elastic_train.supervisor import devices
from prefect_elastic_train.supervisor.devices import DeviceClaims
from tests.support.processes import wait_for
from tests.unit.support import REPOSITORY, claim, spec

Make = Callable[[], DeviceClaims]
#: Claims a GPU in another process, and says so.
_HOLDER = """
import sys, time
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor.devices import DeviceClaims
from tests.unit.support import spec
claims = DeviceClaims()
print(claims.claim(spec(cluster=ClusterSettings(num_gpus=1)), print), claims.gpus, flush=True)
time.sleep(100)
"""
#: Claims two GPUs, forks, starts what stands in for the head of a cluster, and says the ids of head and fork.
_FORKER = """
import os, signal, subprocess
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor.devices import DeviceClaims
from tests.unit.support import spec
claims = DeviceClaims()
assert claims.claim(spec(cluster=ClusterSettings(num_gpus=2)), print) == ""
runs, says = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(says, b".")
    signal.pause()
os.read(runs, 1)
head = subprocess.Popen(["sleep", "100"], pass_fds=[one.fileno() for one in claims.sockets])
print(head.pid, forked, flush=True)
signal.pause()
"""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two pretended GPUs, the only ones of this process."""
    names = [f"{secrets.token_hex(4)}-{number}" for number in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    return names


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes claims, and gives them back."""
    made: list[DeviceClaims] = []

    def claims() -> DeviceClaims:
        made.append(DeviceClaims())
        return made[-1]

    yield claims
    for one in made:
        one.release()


def _of(name: str = "mnist", *, gpus: int = -1, cpus: int = 0, **scaling: Any) -> DriverSpec:
    request: RunRequest = claim(name=name).request
    settings = {"scaling": ScalingSettings(**scaling), "cluster": ClusterSettings(num_gpus=gpus, num_cpus=cpus)}
    return spec(request, **settings)


def _take(claims: DeviceClaims, wanted: DriverSpec, notes: list[str] | None = None) -> str:
    return claims.claim(wanted, (notes if notes is not None else []).append)


def test_each_gpu_is_claimed_by_one_cluster_and_the_next_one_waits_until_it_is_given_back(
    gpus: list[str], make: Make
) -> None:
    first, second, third, told = make(), make(), make(), list[str]()
    assert (_take(first, _of("first", gpus=1), told), told) == ("", [])
    assert _take(second, _of("second", gpus=1), told) == ""
    by_first = f"GPU {gpus[0]} is used by training 'first' (pid {os.getpid()})"
    assert (first.gpus + second.gpus, told) == (gpus, [f"{by_first}; the local cluster has GPU {gpus[1]}"])
    by_second = f"GPU {gpus[1]} is used by training 'second' (pid {os.getpid()})"
    assert _take(third, _of("third", gpus=1)) == f"{by_first}; {by_second}; the local cluster waits for GPUs: 1"
    assert _take(first, _of("first", gpus=1)) == "", "it keeps what it has"
    first.release()
    assert _take(third, _of("third", gpus=1)) == ""
    assert third.gpus == gpus[:1]


def test_without_a_number_a_cluster_takes_what_its_workers_can_use_and_what_is_free(
    gpus: list[str], make: Make
) -> None:
    shared, rest, none = make(), make(), make()
    assert _take(shared, _of(accelerator="gpu", max_workers=2, resources_per_worker={"GPU": 0.5})) == ""
    assert _take(rest, _of(accelerator="gpu", max_workers=2)) == ""
    assert _take(none, _of(accelerator="cpu")) == ""
    assert [shared.gpus, rest.gpus, none.gpus] == [gpus[:1], gpus[1:], []]
    with pytest.raises(AttemptFailedError, match="needs 3 GPUs, and this process may use 2") as caught:
        _take(make(), _of(gpus=3))
    assert caught.value.outcome is Outcome.INVALID


def test_the_claims_of_a_process_that_was_killed_are_free_at_once(gpus: list[str], make: Make) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": gpus[0]}
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        wait_for(lambda: gpus[0] in str(holder.stdout and holder.stdout.readline()), 60, "the claim")
        assert f"is used by training 'mnist' (pid {holder.pid})" in _take(make(), _of(gpus=2))
        holder.kill()
        holder.wait(10)
        assert _take(make(), _of(gpus=2)) == ""
    finally:
        holder.kill()
        holder.communicate()


def test_the_head_that_inherits_a_claim_keeps_it_and_a_process_that_is_forked_does_not(
    gpus: list[str], make: Make
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    holder = subprocess.Popen([sys.executable, "-c", _FORKER], env=environment, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    head, forked = map(int, holder.stdout.readline().split())
    try:
        holder.kill()
        holder.wait(10)
        assert "waits for GPUs: 2" in _take(make(), _of(gpus=2))
        os.kill(head, signal.SIGKILL)
        claims = make()
        wait_for(lambda: _take(claims, _of(gpus=2)) == "", 10, "the end of the claims: only the head had them")
    finally:
        for pid in (head, forked):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.communicate()


def test_an_index_that_means_another_gpu_to_another_process_is_another_gpu(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi, uuids = tmp_path / "nvidia-smi", [f"GPU-{secrets.token_hex(8)}" for _ in range(2)]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def of_job(number: int, visible: str) -> tuple[str, list[str]]:
        smi.write_text(f"#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: {uuids[number]})'\n")
        smi.chmod(0o755)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        devices._uuids.cache_clear()
        claims = make()
        return _take(claims, _of(gpus=1)), claims.gpus

    try:
        assert of_job(0, "0") == ("", ["0"])
        assert of_job(1, "0") == ("", ["0"]), "as two jobs of Slurm"
        waits, _ = of_job(0, uuids[0])
        assert waits.startswith(f"GPU {uuids[0]} is used by"), "another name of the first"
    finally:
        devices._uuids.cache_clear()


def test_an_nvidia_smi_that_cannot_be_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nsleep 20 &\nsleep 20\n")  # the first keeps the output open when the shell is killed
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(devices, "_SMI_SECONDS", 0.2)
    request.addfinalizer(devices._uuids.cache_clear)
    devices._uuids.cache_clear()
    began = time.monotonic()
    assert devices._uuids() == {}
    assert time.monotonic() - began < 10
