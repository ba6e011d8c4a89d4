"""Claims of local clusters on the GPUs and CPUs of their machine, with pretended ones that no other test has."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings, ScalingSettings
from prefect_elastic_train.supervisor import devices
from prefect_elastic_train.supervisor.devices import DeviceClaims
from tests.support.processes import wait_for
from tests.unit.support import REPOSITORY, spec

Make = Callable[[], DeviceClaims]
#: Claims two GPUs, forks, starts what stands in for the head of a cluster, and says the ids of head and fork.
_HOLDER = """
import os, signal, subprocess
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor.devices import DeviceClaims
from tests.unit.support import spec
claims = DeviceClaims()
assert claims.claim(spec(cluster=ClusterSettings(num_gpus=2, num_cpus=1))) == ""
runs, says = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(says, b".")
    signal.pause()
os.read(runs, 1)
head = subprocess.Popen(["sleep", "100"], pass_fds=[one.fileno() for one in claims.sockets.values()])
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
    with ExitStack() as stack:

        def claims() -> DeviceClaims:
            claims = DeviceClaims()
            stack.callback(claims.release)
            return claims

        yield claims


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes an nvidia-smi that runs commands of a shell."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def make(commands: str) -> None:
        program.write_text(f"#!/bin/sh\n{commands}\n")
        program.chmod(0o755)
        devices._uuids.cache_clear()

    yield make
    devices._uuids.cache_clear()


def _take(claims: DeviceClaims, name: str = "mnist", gpus: int = 1, **scaling: Any) -> str:
    told = spec(scaling=ScalingSettings(**scaling), cluster=ClusterSettings(num_gpus=gpus, num_cpus=1))
    told = replace(told, request=replace(told.request, run_name=name))
    return claims.claim(told)


def test_each_gpu_is_claimed_by_one_cluster_and_the_next_one_waits_until_it_is_given_back(
    gpus: list[str], make: Make
) -> None:
    first, second, third = (make() for _ in range(3))
    assert _take(first, "first") == ""
    assert _take(second, "second") == ""
    by_first = f"GPU {gpus[0]} is used by training 'first' (pid {os.getpid()})"
    assert [*first.sockets, *second.sockets] == gpus
    by_second = f"GPU {gpus[1]} is used by training 'second' (pid {os.getpid()})"
    assert _take(third) == f"{by_first}; {by_second}; the local cluster waits for GPUs: 1"
    assert _take(first) == "", "it keeps what it has"
    first.release()
    assert _take(third) == ""
    assert [*third.sockets] == gpus[:1]


def test_without_a_number_a_cluster_takes_what_its_workers_can_use_and_what_is_free(
    gpus: list[str], make: Make
) -> None:
    half = {"GPU": 0.5}
    cases = [
        ({"accelerator": "gpu", "max_workers": 2, "resources_per_worker": half}, gpus[:1]),
        ({"accelerator": "gpu", "max_workers": 2}, gpus[1:]),
        ({"accelerator": "cpu"}, []),
    ]
    for scaling, expected in cases:
        claims = make()
        assert _take(claims, gpus=-1, **scaling) == ""
        assert [*claims.sockets] == expected
    with pytest.raises(AttemptFailedError, match="needs 3 GPUs, and this process may use 2") as caught:
        _take(make(), gpus=3)
    assert caught.value.outcome is Outcome.INVALID


def test_the_head_that_inherits_a_claim_keeps_it_and_a_killed_process_and_one_that_is_forked_do_not(
    gpus: list[str], make: Make
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], env=environment, stdout=subprocess.PIPE, text=True
    ) as holder:
        head, forked = map(int, holder.stdout.readline().split())
        claims = make()
        try:
            assert f"is used by training 'mnist' (pid {holder.pid})" in _take(claims, gpus=2)
            holder.kill()
            holder.wait(10)
            assert "waits for GPUs: 2" in _take(claims, gpus=2)
            os.kill(head, signal.SIGKILL)
            wait_for(lambda: _take(claims, gpus=2) == "", 10, "the end of the claims: only the head had them")
        finally:
            holder.kill()
            for pid in (head, forked):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """Four pretended CPUs, a set that no other process has."""
    numbers = {secrets.randbits(40) for _ in range(4)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: numbers)
    monkeypatch.setattr(devices, "usable_cpus", lambda: len(numbers))
    return len(numbers)


def _take_cpus(claims: DeviceClaims, name: str, workers: tuple[int, int] = (1, 1), num_cpus: int = 0) -> str:
    scaling = ScalingSettings(min_workers=workers[0], max_workers=workers[1])
    wanted = spec(scaling=scaling, cluster=ClusterSettings(num_cpus=num_cpus))
    return claims.claim(replace(wanted, request=replace(wanted.request, run_name=name)))


def test_trainings_divide_the_cpus_and_one_that_does_not_fit_waits_until_there_is_room(cpus: int, make: Make) -> None:
    first, second, third = (make() for _ in range(3))
    assert _take_cpus(first, "first", (2, 3)) == ""
    assert _take_cpus(second, "second", (1, 3)) == ""
    assert (first.num_cpus, second.num_cpus) == (0, 1), "the first has all that it can use, the second what was left"
    by_both = "".join(f"; training {name!r} (pid {os.getpid()}) has {count}" for name, count in _counts(3, 1))
    waits = _take_cpus(third, "third", (1, 1))
    assert sorted(waits.split("; ")) == sorted(
        f"this machine has 4 CPUs{by_both}; the local cluster waits for CPUs: 1".split("; ")
    )
    first.release()
    assert _take_cpus(third, "third", (1, 1)) == ""
    assert [third.num_cpus, third.warning] == [0, ""]


def _counts(*counts: int) -> list[tuple[str, int]]:
    return [*zip(("first", "second"), counts, strict=True)]


def test_a_cluster_with_a_number_of_cpus_does_not_wait_and_says_that_the_machine_is_oversubscribed(
    cpus: int, make: Make
) -> None:
    first, second = make(), make()
    assert _take_cpus(first, "first", (1, 8)) == "", "a group that cannot fit takes all there is"
    assert _take_cpus(second, "second", (1, 8), num_cpus=2) == ""
    assert second.warning == (
        "This machine is oversubscribed, so trainings are slow: this machine has 4 CPUs; training 'first' "
        f"(pid {os.getpid()}) has 4; this one has 2"
    )


def test_neither_the_same_run_nor_processes_with_other_cpus_are_waited_for(
    cpus: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _take_cpus(make(), "first", (4, 4)) == ""
    assert _take_cpus(make(), "first", (4, 4)) == "", "as of a flow run that was resumed while its old process lives"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {secrets.randbits(40)})
    assert _take_cpus(make(), "second") == "", "as of another job of Slurm"


def test_an_index_that_means_another_gpu_to_another_process_is_another_gpu(
    make: Make, smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = [f"GPU-{secrets.token_hex(8)}" for _ in range(2)]

    def of_job(uuid: str, visible: str) -> str:
        smi(f"echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: {uuid})'")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return _take(make())

    assert [of_job(uuid, "0") for uuid in uuids] == ["", ""], "as two jobs of Slurm"
    assert of_job(uuids[0], uuids[0]).startswith(f"GPU {uuids[0]} is used by"), "another name of the first"


def test_an_nvidia_smi_that_cannot_be_ended_is_not_waited_for(
    smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi("sleep 20 &\nsleep 20")  # the first keeps the output open when the shell is killed
    monkeypatch.setattr(devices, "_SMI_SECONDS", 0.2)
    began = time.monotonic()
    assert devices._uuids() == {}
    assert time.monotonic() - began < 10
