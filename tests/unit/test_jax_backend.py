"""How the processes of a JAX worker group are set up, as far as it needs no cluster; the rest is in the fault tests."""

import os
import sys
from types import SimpleNamespace

import pytest
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxConfig
from ray.train.v2.jax.config import _JaxBackend
from ray.util.tpu import get_tpu_coordinator_env_vars

from prefect_elastic_train.controller.jax_backend import RunJaxBackend, RunJaxConfig, run_jax_config
from prefect_elastic_train.worker import jax_processes

CPUS = ScalingConfig(num_workers=2)
TPUS = ScalingConfig(num_workers=2, use_tpu=True, topology="2x4", accelerator_type="TPU-V6E")


class _OwnConfig(JaxConfig):  # type: ignore[misc]
    """A configuration of the user with a backend of its own."""

    backend_cls = type("_OwnBackend", (_JaxBackend,), {})


@pytest.mark.parametrize(
    ("given", "scaling", "devices"),
    [
        (None, CPUS, (False, False)),
        (None, ScalingConfig(num_workers=2, use_gpu=True), (False, True)),
        (None, TPUS, (True, False)),
        (JaxConfig(), TPUS, (False, False)),
    ],
)
def test_the_users_configuration_counts_and_else_what_the_workers_have(
    given: JaxConfig | None, scaling: ScalingConfig, devices: tuple[bool, bool]
) -> None:
    chosen = run_jax_config(given, scaling)
    assert chosen.backend_cls is RunJaxBackend
    assert (chosen.use_tpu, chosen.use_gpu) == devices
    own = _OwnConfig()
    assert run_jax_config(own, scaling) is own  # it has a backend of its own


@pytest.mark.parametrize("slices", [1, 2])
def test_workers_on_one_slice_forget_all_that_ray_sets_for_several_before_it_sets_them_up(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_several = get_tpu_coordinator_env_vars("10.0.0.1", num_slices=2, slice_id=1)
    for name, value in {"TPU_WORKER_ID": "0", **of_several}.items():
        monkeypatch.setenv(name, value)
    left = []
    monkeypatch.setattr(_JaxBackend, "on_start", lambda *told: left.append(set(of_several) & set(os.environ)))
    context = SimpleNamespace(num_slices=slices)
    group = SimpleNamespace(get_worker_group_context=lambda: context, execute=lambda function: function())
    for _ in range(2):  # there need not be any
        RunJaxBackend().on_start(group, RunJaxConfig(use_tpu=True))
    assert of_several
    assert left == [set() if slices == 1 else set(of_several)] * 2
    assert os.environ["TPU_WORKER_ID"] == "0"


@pytest.mark.parametrize(("given", "chosen"), [("", "cpu"), ("cuda,cpu", "cuda,cpu")])
def test_a_worker_alone_gets_its_platform_unless_the_user_names_one_and_keeps_its_devices(
    monkeypatch: pytest.MonkeyPatch, given: str, chosen: str
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    config = SimpleNamespace(update=lambda name, value: told.append((name, value)))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))  # imported before, with another platform
    told = []
    jax_processes.join("cpu", address="", size=1, rank=0)
    assert told == ([] if given else [("jax_platforms", "cpu")])
    assert (os.environ["JAX_PLATFORMS"], os.environ["CUDA_VISIBLE_DEVICES"]) == (chosen, "3")
