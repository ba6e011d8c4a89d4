"""How the processes of a JAX worker group are set up, as far as it needs no cluster; the rest is in the fault tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxConfig
from ray.train.v2.jax.config import _JaxBackend
from ray.util.tpu import get_tpu_coordinator_env_vars

from prefect_elastic_train.elastic import jax_backend
from prefect_elastic_train.elastic.jax_backend import RunJaxBackend, RunJaxConfig, forget_other_slices, run_jax_config

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
    assert run_jax_config(own, scaling) is own, "it has a backend of its own"


def test_all_variables_that_ray_sets_for_several_slices_are_forgotten_for_one_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_several = get_tpu_coordinator_env_vars("10.0.0.1", num_slices=2, slice_id=1)
    for name, value in {"TPU_WORKER_ID": "0", **of_several}.items():
        monkeypatch.setenv(name, value)
    forget_other_slices()
    forget_other_slices()  # there need not be any
    assert os.environ["TPU_WORKER_ID"] == "0"
    assert of_several
    assert not set(of_several) & set(os.environ)


@pytest.mark.parametrize(("slices", "forgets"), [(1, [forget_other_slices]), (2, [])])
def test_workers_on_one_slice_forget_the_others_before_ray_sets_them_up(
    slices: int, forgets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(_JaxBackend, "on_start", lambda *told: asked.append("set up"))
    context = SimpleNamespace(num_slices=slices)
    group = SimpleNamespace(get_worker_group_context=lambda: context, execute=asked.append)
    RunJaxBackend().on_start(group, RunJaxConfig(use_tpu=True))
    assert asked == [*forgets, "set up"]


@pytest.mark.parametrize(("given", "chosen"), [("", "cpu"), ("cuda,cpu", "cuda,cpu")])
def test_a_worker_alone_gets_its_platform_unless_the_user_names_one_and_keeps_its_devices(
    monkeypatch: pytest.MonkeyPatch, given: str, chosen: str
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    jax_backend._join("cpu", address="", size=1, rank=0)
    assert (os.environ["JAX_PLATFORMS"], os.environ["CUDA_VISIBLE_DEVICES"]) == (chosen, "3")
