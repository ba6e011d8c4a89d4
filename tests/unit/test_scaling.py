"""Valid and invalid combinations of workers and accelerators, and the resources that Ray gets for them."""

from typing import Any

import pytest
import ray
from pydantic import ValidationError
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, TPUAcceleratorManager
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.tpu import get_tpu_num_slices_for_workers, get_tpu_version_from_type

from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.core.tpu_slices import SliceShape, slice_shape
from prefect_elastic_train.driver.ray_configs import resources_per_worker, scaling_config

#: Slices of four hosts with four chips each.
SLICES = {"accelerator": "tpu", "topology": "4x4", "accelerator_type": "TPU-V6E", "min_workers": 4, "max_workers": 8}


def tpus(**resources: float) -> dict[str, Any]:
    """Those slices, for workers that hold such resources."""
    return SLICES | {"resources_per_worker": resources}


REFUSED = [
    (SLICES | {"max_workers": 6}, "max_workers (6) must be multiples of 4, the workers with TPU 4 that fill a slice"),
    (SLICES | {"accelerator_type": "A100"}, "'A100' is not a TPU type of Ray; use one of TPU-V2, "),
    (SLICES | {"topology": "8x4", "min_workers": 8}, "topology '8x4' does not exist for TPU-V6E; use one of 1x1, "),
    (tpus(TPU=8), "requests TPU 8, and a host of TPU-V6E 4x4 has 4; use a number that divides it"),
    (tpus(CPU=1, TPU=0), "has TPU 0, and accelerator is 'tpu'; correct one of them"),
    ({"accelerator": "tpu", "resources_per_worker": {"TPU": 3}}, "requests TPU 3; Ray gives a worker one of 1, 2, 4"),
    (SLICES | {"accelerator_type": ""}, "needs both topology (such as '4x4') and accelerator_type"),
    ({"accelerator": "tpu", "topology": "2x2"}, "got '2x2' and ''"),
    (SLICES | {"label_selector": {"zone": "a"}}, "cannot be combined with a label_selector ({'zone': 'a'})"),
    (SLICES | {"placement_strategy": "STRICT_PACK"}, "or a strict placement_strategy (STRICT_PACK)"),
    (SLICES | {"accelerator": "gpu"}, "topology ('4x4') is the shape of a TPU slice, and accelerator is 'gpu'"),
    (
        {"label_selector": [{}], "max_workers": 2},
        "label_selector has 1 entries, and max_workers is 2; give",
    ),
    ({"resources_per_worker": {"TPU": 4}}, "has TPU 4, and accelerator is 'cpu'"),
    ({"accelerator": "gpu", "resources_per_worker": {"GPU": 1.5}}, "GPU 1.5 must be a fraction of one GPU or a whole"),
    ({"resources_per_worker": {"CPU": 1, "disk": 0.00001}}, "must have a resource of at least 0.0001"),
]

#: What is taken, and what a worker then gets.
TAKEN = [
    ({"resources_per_worker": {"CPU": 2, "GPU": 0, "TPU": 0}}, {"CPU": 2}),
    ({"accelerator": "gpu", "max_workers": 7}, {"GPU": 1}),
    ({"accelerator": "tpu"}, {"TPU": 1}),
    (SLICES | {"accelerator_type": "v6e", "topology": " 4X4"}, {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001}),
    (tpus(CPU=0.5, memory=1e9), {"CPU": 0.5, "TPU": 4, "memory": 1e9, "accelerator_type:TPU-V6E": 0.001}),
    (SLICES | {"topology": "2x4", "min_workers": 1}, {"CPU": 1, "TPU": 8, "accelerator_type:TPU-V6E": 0.001}),
]


@pytest.mark.parametrize(("values", "says"), REFUSED)
def test_what_ray_could_not_place_is_refused_with_what_to_do(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ScalingSettings(**values)
    assert refused.value.error_count() == 1
    assert says in str(refused.value)


@pytest.mark.parametrize(("values", "resources"), TAKEN)
def test_what_ray_can_place_is_taken_and_completed(values: dict[str, Any], resources: dict[str, float]) -> None:
    assert resources_per_worker(ScalingSettings(**values)) == resources
    # The worker actors of Ray Train are made of these; a bad amount is refused only there.
    ray.remote(**bundle_to_remote_args(resources))(object)


def test_every_slice_that_ray_can_reserve_is_taken() -> None:
    for version, topologies in VALID_TPU_TOPOLOGY.items():
        for topology in topologies:
            shape = slice_shape(topology, version, {})
            counts = {"min_workers": shape.workers, "max_workers": 3 * shape.workers}
            asked = {"accelerator": "tpu", "topology": topology, "accelerator_type": version, **counts}
            config = scaling_config(ScalingSettings(**asked))
            resources = config.resources_per_worker
            slices = get_tpu_num_slices_for_workers(topology, config.accelerator_type, config.max_workers, resources)
            assert slices == 3
            # What Ray checks, late, when it reserves a slice; and the label by which it finds one.
            generation = get_tpu_version_from_type(shape.accelerator_type)
            assert TPUAcceleratorManager.is_valid_tpu_accelerator_topology(generation, shape.topology)
            assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(shape.pod_type)


def test_the_shape_of_a_slice_is_what_ray_says_and_its_nodes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slice_shape("4x4", "TPU-V6E", {}) == SliceShape("4x4", "TPU-V6E", "v6e-16", 16, 4, 4)
    assert slice_shape("2x4", "v6e", {"CPU": 1, "TPU": 4}) == SliceShape("2x4", "TPU-V6E", "v6e-8", 8, 2, 4)
    monkeypatch.setenv("RAY_TPU_RESOURCE_PER_CHIP", "2")
    assert slice_shape("2x2x2", "TPU-V7X", {}) == SliceShape("2x2x2", "TPU-V7X", "v7x-16", 16, 2, 8)
    assert slice_shape("2x2x2", "TPU-V7X", {"TPU": 1}).workers == 16
