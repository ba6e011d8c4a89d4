"""Claims of local clusters on the GPUs and CPUs of their machine, with pretended GPUs that no other test has."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import ClusterSettings, ScalingSettings
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
print(claims.take(spec(cluster=ClusterSettings(num_gpus=1))), claims.gpus, flush=True)
time.sleep(100)
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


def test_each_gpu_is_claimed_by_one_cluster_and_the_next_one_waits_until_it_is_given_back(
    gpus: list[str], make: Make
) -> None:
    first, second, third = make(), make(), make()
    assert first.take(_of("first", gpus=1)) == (True, "")
    may_start, message = second.take(_of("second", gpus=1))
    assert (may_start, first.gpus + second.gpus) == (True, gpus)
    assert (
        message == f"GPU {gpus[0]} is used by training 'first' (pid {os.getpid()}); the local cluster has GPU {gpus[1]}"
    )
    may_start, message = third.take(_of("third", gpus=1))
    assert (may_start, third.gpus) == (False, [])
    assert message.endswith(
        f"GPU {gpus[1]} is used by training 'second' (pid {os.getpid()}); the local cluster waits for 1 GPU"
    )
    assert first.take(_of("first", gpus=1)) == (True, ""), "it keeps what it has"
    first.release()
    assert third.take(_of("third", gpus=1))[0]
    assert third.gpus == gpus[:1]


def test_without_a_number_a_cluster_takes_what_its_workers_can_use_and_what_is_free(
    gpus: list[str], make: Make
) -> None:
    shared, rest, too_many = make(), make(), make()
    assert shared.take(_of(accelerator="gpu", max_workers=2, resources_per_worker={"GPU": 0.5}))[0]
    assert rest.take(_of(accelerator="gpu", max_workers=2))[0]
    assert [shared.gpus, rest.gpus] == [gpus[:1], gpus[1:]]
    assert make().take(_of(accelerator="cpu"))[0], "it needs none"
    with pytest.raises(AttemptFailedError, match="needs 3 GPUs, and this process may use 2") as caught:
        too_many.take(_of(gpus=3))
    assert caught.value.outcome is Outcome.INVALID


def test_the_claims_of_a_process_that_was_killed_are_free_at_once(gpus: list[str], make: Make) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": gpus[0]}
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == f"(True, '') ['{gpus[0]}']\n"
        claims = make()
        may_start, message = claims.take(_of(gpus=2))
        assert (may_start, f"is used by training 'mnist' (pid {holder.pid})" in message) == (False, True)
        holder.kill()
        holder.wait(10)
        assert claims.take(_of(gpus=2)) == (True, "")
    finally:
        holder.kill()
        holder.communicate()


def test_the_head_that_inherits_a_claim_keeps_it_and_a_process_that_is_forked_does_not(
    gpus: list[str], make: Make
) -> None:
    first, second = make(), make()
    assert first.take(_of(gpus=2))[0]
    forked = os.fork()
    if forked == 0:
        signal.pause()
    head = subprocess.Popen(["sleep", "100"], pass_fds=first.descriptors)
    try:
        first.release()
        assert not second.take(_of(gpus=2))[0]
        head.kill()
        head.wait(10)
        assert second.take(_of(gpus=2))[0], "only the head had them"
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        head.kill()
        head.wait(10)


def test_an_index_that_means_another_gpu_to_another_process_is_another_gpu(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi, uuids = tmp_path / "nvidia-smi", [f"GPU-{secrets.token_hex(8)}" for _ in range(2)]

    def of_job(number: int, visible: str) -> DeviceClaims:
        smi.write_text(f"#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: {uuids[number]})'\n")
        smi.chmod(0o755)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return make()

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    first, second = of_job(0, "0"), None
    assert first.take(_of(gpus=1))[0]
    second = of_job(1, "0")
    assert second.take(_of(gpus=1))[0], "as two jobs of Slurm"
    assert (first.gpus, second.gpus) == (["0"], ["0"])
    assert not of_job(0, uuids[0][:12]).take(_of(gpus=1))[0], "another name of the first"


def test_clusters_whose_workers_may_use_more_cpus_than_the_machine_has_are_warned_of(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = len(os.sched_getaffinity(0))
    first, second = make(), make()
    first.take(_of("first", cpus=there, max_workers=there))
    second.take(_of("second"))
    warning = second.crowding()
    assert f"and it has {os.cpu_count()}: they slow each other down" in warning
    assert f"training 'first' (pid {os.getpid()}) {there}" in warning
    assert "'second'" not in warning
    monkeypatch.setattr(os, "cpu_count", lambda: 10_000)
    assert second.crowding() == ""


def test_a_claim_is_seen_by_all_processes_of_the_machine_and_gone_with_its_owner(gpus: list[str], make: Make) -> None:
    claims = make()
    claims.take(_of("seen", gpus=1))
    assert f"@elastic-train gpu {gpus[0]} {os.getpid()}-" in Path("/proc/net/unix").read_text()
    claims.release()
    wait_for(lambda: gpus[0] not in Path("/proc/net/unix").read_text(), 5, "the end of the claim")
