"""How the processes of a JAX worker group are set up and taken apart, as far as it needs no cluster."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxConfig
from ray.train.v2.jax.config import _JAX_MULTISLICE_OVERRIDE_KEYS, _JaxBackend
from ray.util.tpu import get_tpu_coordinator_env_vars

from prefect_elastic_train.elastic import jax_backend
from prefect_elastic_train.elastic.jax_backend import (
    MULTI_SLICE_VARIABLES,
    RunJaxBackend,
    RunJaxConfig,
    forget_other_slices,
    run_jax_config,
)
from tests.support.processes import free_port
from tests.unit.support import REPOSITORY

CPUS = ScalingConfig(num_workers=2)
TPUS = ScalingConfig(num_workers=2, use_tpu=True, topology="2x4", accelerator_type="TPU-V6E")


class _OwnBackend(_JaxBackend):  # type: ignore[misc]
    """A backend of the user."""


@dataclass
class _OwnConfig(JaxConfig):  # type: ignore[misc]
    """A configuration of the user with a backend of its own."""

    @property
    def backend_cls(self) -> type[_OwnBackend]:
        return _OwnBackend


@pytest.mark.parametrize(
    ("given", "scaling", "devices"),
    [
        (None, CPUS, (False, False)),
        (None, ScalingConfig(num_workers=2, use_gpu=True), (False, True)),
        (None, TPUS, (True, False)),
        (JaxConfig(use_tpu=True), CPUS, (True, False)),
        (JaxConfig(use_gpu=True), CPUS, (False, True)),
        (JaxConfig(), TPUS, (False, False)),
    ],
)
def test_the_users_configuration_counts_and_else_what_the_workers_have(
    given: JaxConfig | None, scaling: ScalingConfig, devices: tuple[bool, bool]
) -> None:
    chosen = run_jax_config(given, scaling)
    assert isinstance(chosen, RunJaxConfig)
    assert chosen.backend_cls is RunJaxBackend
    assert (chosen.use_tpu, chosen.use_gpu) == devices


def test_a_configuration_with_a_backend_of_its_own_is_used_as_it_is() -> None:
    own = _OwnConfig(use_tpu=True)
    assert run_jax_config(own, TPUS) is own


def test_all_variables_that_ray_sets_for_several_slices_are_forgotten_for_one_and_no_others() -> None:
    set_by_ray = get_tpu_coordinator_env_vars("10.0.0.1", num_slices=2, slice_id=1)
    assert set(set_by_ray) == set(MULTI_SLICE_VARIABLES)
    assert set(MULTI_SLICE_VARIABLES) >= _JAX_MULTISLICE_OVERRIDE_KEYS
    environment = {"TPU_WORKER_ID": "0", **set_by_ray}
    forget_other_slices(environment)
    assert environment == {"TPU_WORKER_ID": "0"}
    forget_other_slices(environment)
    assert environment == {"TPU_WORKER_ID": "0"}, "there need not be any"


class _Group:
    """A worker group that remembers what it is asked for."""

    def __init__(self, slices: int) -> None:
        self.num_slices = slices
        self.asked: list[Any] = []

    def get_worker_group_context(self) -> _Group:
        return self

    def execute(self, function: Any) -> None:
        self.asked.append(function)


@pytest.mark.parametrize(("slices", "forgets"), [(1, [forget_other_slices]), (2, [])])
def test_workers_on_one_slice_forget_the_others_before_ray_sets_them_up(
    slices: int, forgets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_JaxBackend, "on_start", lambda self, group, config: group.asked.append("set up"))
    group = _Group(slices)
    RunJaxBackend().on_start(group, RunJaxConfig(use_tpu=True))
    assert group.asked == [*forgets, "set up"]


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variable that JAX's platform is read from, put back afterwards."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    return monkeypatch


@pytest.mark.parametrize("named", ["cpu", "cuda"])
def test_a_worker_alone_gets_its_platform_and_its_devices_stay(platform: pytest.MonkeyPatch, named: str) -> None:
    platform.setenv("CUDA_VISIBLE_DEVICES", "3")
    jax_backend._join(named, address="", size=1, rank=0)
    assert os.environ["JAX_PLATFORMS"] == named
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "the device that Ray gave to it"


def test_the_users_platform_stays(platform: pytest.MonkeyPatch) -> None:
    platform.setenv("JAX_PLATFORMS", "cuda,cpu")
    jax_backend._join("cpu", address="", size=1, rank=0)
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"


@pytest.mark.parametrize("name", ["on_start", "on_shutdown"])
def test_ray_calls_what_we_override_with_these_arguments(name: str) -> None:
    theirs, ours = getattr(_JaxBackend, name), getattr(RunJaxBackend, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


PROCESS = """
import os, sys, time
from prefect_elastic_train.elastic.jax_backend import _is_joined, _join, _leave
address, rank = sys.argv[1], int(sys.argv[2])
assert not _is_joined()
_join("cpu", address, 2, rank)
assert _is_joined()
import jax
from jax.experimental.multihost_utils import process_allgather
print("gathered", process_allgather(rank + 1).tolist(), flush=True)
if "alone" in sys.argv:
    sys.stdin.readline()
began = time.monotonic()
_leave(1.0)
print("left", _is_joined(), round(time.monotonic() - began, 1), flush=True)
os._exit(0)
"""


def _start(address: str, rank: int, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("JAX_PLATFORMS", None)
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, address, str(rank), *more],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_compute_together_and_part_in_silence() -> None:
    address = f"127.0.0.1:{free_port()}"
    processes = [_start(address, rank) for rank in (0, 1)]
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        lines = [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        assert lines[0] == "gathered [1, 2]"
        assert lines[1].startswith("left False"), "no longer joined"
        assert "Terminating process" not in errors


def test_a_process_that_waits_for_a_dead_one_is_free_again_when_its_patience_ends() -> None:
    address = f"127.0.0.1:{free_port()}"
    coordinator, other = (_start(address, rank, "alone") for rank in (0, 1))
    assert other.stdout is not None
    assert any(line.startswith("gathered") for line in other.stdout)
    other.send_signal(signal.SIGKILL)
    other.communicate(timeout=10)
    out, errors = coordinator.communicate("go on\n", timeout=60)
    assert coordinator.returncode == 0, errors
    patience = next(line.split() for line in out.splitlines() if line.startswith("left"))
    assert 0.9 <= float(patience[2]) < 3
