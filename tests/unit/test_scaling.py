"""Which workers may be asked for, on which accelerators: what is refused together, and what Ray takes as it is."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
import ray
from hypothesis import assume, given
from hypothesis import strategies as st
from prefect.client.schemas.objects import BlockDocument
from pydantic import ValidationError
from ray._private.accelerators.tpu import RAY_TPU_RESOURCE_PER_CHIP_ENV_VAR, VALID_TPU_TOPOLOGY, TPUAcceleratorManager
from ray.train import ScalingConfig
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.tpu import get_tpu_num_slices_for_workers

from prefect_elastic_train import ElasticScaling
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import ScalingSettings, plain
from prefect_elastic_train.core.slices import SliceShape, slice_shape
from prefect_elastic_train.elastic.translate import resources_per_worker, scaling_config
from tests.unit.support import examples, python

#: Slices of four hosts with four chips each.
SLICES = {
    "accelerator": "tpu",
    "topology": "4x4",
    "accelerator_type": "TPU-V6E",
    "min_workers": 4,
    "max_workers": 8,
}

#: One worker that is alone on its slice.
ALONE = {"min_workers": 1, "max_workers": 1}

V6E_TOPOLOGIES = "use 1x1, 2x2, 2x4, 2x8, 4x4, 4x8, 8x8, 8x16, 16x16"

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "min-not-whole-slices": (
        SLICES | {"min_workers": 3},
        ["min_workers (3) must be a multiple of 4", "TPU-V6E 4x4 (16 TPUs)", "use 4 for min_workers"],
    ),
    "max-not-whole-slices": (
        SLICES | {"max_workers": 6},
        ["max_workers (6) must be a multiple of 4", "TPU-V6E 4x4 (16 TPUs)", "use 4 or 8 for max_workers"],
    ),
    "min-and-max-not-whole-slices": (
        SLICES | {"min_workers": 5, "max_workers": 13},
        [
            "min_workers (5) and max_workers (13) must be multiples of 4",
            "use 4 or 8 for min_workers, 12 or 16 for max_workers",
        ],
    ),
    "min-not-whole-slices-of-small-workers": (
        SLICES | {"min_workers": 12, "max_workers": 16, "resources_per_worker": {"TPU": 2}},
        ["min_workers (12) must be a multiple of 8, the workers with TPU 2", "use 8 or 16 for min_workers"],
    ),
    "one-worker-on-many-hosts": (
        SLICES | ALONE,
        ["min_workers (1) and max_workers (1) must be multiples of 4", "use 4 for min_workers, 4 for max_workers"],
    ),
    "unknown-type": (
        SLICES | {"accelerator_type": "A100"},
        ["accelerator_type 'A100' is no TPU type that Ray knows", "use one of TPU-V2, ", "TPU-V6E, TPU-V7X"],
    ),
    "unknown-type-of-one-worker": (
        {"accelerator": "tpu", "accelerator_type": "TPU-V99"},
        ["accelerator_type 'TPU-V99' is no TPU type that Ray knows", "use one of TPU-V2, "],
    ),
    "type-by-another-name": (
        SLICES | {"accelerator_type": "TPU-V5E"},
        ["accelerator_type 'TPU-V5E' is no TPU type that Ray knows", "TPU-V5LITEPOD (v5e)"],
    ),
    "malformed-topology": (
        SLICES | {"topology": "4x"},
        ["topology '4x' does not exist for TPU-V6E", "chips along each side", V6E_TOPOLOGIES],
    ),
    "unknown-topology": (SLICES | {"topology": "5x5"}, ["topology '5x5' does not exist for TPU-V6E", V6E_TOPOLOGIES]),
    "turned-topology": (
        SLICES | {"topology": "8x4", "min_workers": 8},
        ["topology '8x4' does not exist for TPU-V6E", "use 4x8"],
    ),
    "topology-of-another-type": (
        SLICES | {"accelerator_type": "TPU-V5P"},
        ["topology '4x4' does not exist for TPU-V5P", "use 2x2x1, 2x2x2, ", "or one of 88 larger ones"],
    ),
    "no-tpu-per-worker": (
        SLICES | {"resources_per_worker": {"CPU": 1, "TPU": 0}},
        ["says TPU 0, and accelerator is 'tpu'", "ask for more than 0", "set accelerator to 'cpu'"],
    ),
    "more-tpus-than-a-slice": (
        SLICES | {"resources_per_worker": {"TPU": 32}},
        ["asks for TPU 32 on slices of TPU-V6E 4x4", "more than a whole slice has (16)", "use 1, 2 or 4"],
    ),
    "more-tpus-than-a-host": (
        SLICES | {"resources_per_worker": {"TPU": 8}},
        ["asks for TPU 8 on slices of TPU-V6E 4x4", "more than a host of the slice has (4)", "use 1, 2 or 4"],
    ),
    "uneven-tpus": (
        SLICES | {"resources_per_worker": {"TPU": 3}},
        ["asks for TPU 3", "does not divide the 16 of a slice evenly", "use 1, 2 or 4, or leave TPU out for the 4"],
    ),
    "half-a-tpu": (
        SLICES | {"min_workers": 32, "max_workers": 32, "resources_per_worker": {"TPU": 0.5}},
        ["asks for TPU 0.5", "Ray does not give to a worker on a host with 4", "use 1, 2 or 4"],
    ),
    "three-tpus-of-one-worker": (
        {"accelerator": "tpu", "resources_per_worker": {"TPU": 3}},
        ["asks for TPU 3; Ray gives a worker 1, 2, 4 or 8 TPUs"],
    ),
    "several-workers-without-a-slice": (
        {"accelerator": "tpu", "max_workers": 4},
        ["more than one worker (max_workers 4) needs topology", "got '' and ''; give both"],
    ),
    "several-workers-without-a-type": (
        SLICES | {"accelerator_type": ""},
        ["more than one worker (max_workers 8) needs topology", "got '4x4' and ''; give both"],
    ),
    "several-workers-without-a-topology": (
        SLICES | {"topology": " "},
        ["more than one worker (max_workers 8) needs topology", "got '' and 'TPU-V6E'; give both"],
    ),
    "topology-without-a-type": (
        {"accelerator": "tpu", "topology": "2x2"},
        ["topology ('2x2') says nothing without the type", "give accelerator_type too", "or remove topology"],
    ),
    "label-selector-on-slices": (
        SLICES | {"label_selector": {"zone": "a"}},
        ["label_selector ({'zone': 'a'}) cannot be combined with topology ('4x4')", "remove label_selector"],
    ),
    "label-selector-on-a-slice-of-one-host": (
        SLICES | ALONE | {"topology": "2x2", "label_selector": {"zone": "a"}},
        ["label_selector ({'zone': 'a'}) cannot be combined with topology ('2x2')", "remove label_selector"],
    ),
    "strict-pack-on-several-hosts": (
        SLICES | {"placement_strategy": "STRICT_PACK"},
        ["'STRICT_PACK' puts all workers on one host", "8 workers with TPU 4", "TPU-V6E 4x4 has (4 TPUs): use 'PACK'"],
    ),
    "strict-pack-on-several-slices-of-one-host": (
        SLICES | ALONE | {"topology": "2x2", "max_workers": 2, "placement_strategy": "STRICT_PACK"},
        ["'STRICT_PACK' puts all workers on one host", "2 workers with TPU 4", "use 'PACK'"],
    ),
    "strict-spread-of-workers-that-share-hosts": (
        SLICES | {"min_workers": 8, "resources_per_worker": {"TPU": 2}, "placement_strategy": "STRICT_SPREAD"},
        ["'STRICT_SPREAD' gives each worker a host of its own", "workers with TPU 2", "use 'SPREAD', or TPU 4"],
    ),
    "topology-of-gpus": (
        SLICES | {"accelerator": "gpu"},
        ["topology ('4x4') is the shape of a TPU slice, and accelerator is 'gpu'", "set accelerator to 'tpu', or"],
    ),
    "topology-of-cpus": (
        SLICES | {"accelerator": "cpu"},
        ["topology ('4x4') is the shape of a TPU slice, and accelerator is 'cpu'", "or remove topology"],
    ),
    "tpus-of-cpu-workers": (
        {"resources_per_worker": {"TPU": 4}},
        ["asks for TPU 4, and accelerator is 'cpu'", "set accelerator to 'tpu', or remove TPU"],
    ),
    "tpus-of-gpu-workers": (
        {"accelerator": "gpu", "resources_per_worker": {"TPU": 4}},
        ["asks for TPU 4, and accelerator is 'gpu'", "set accelerator to 'tpu', or remove TPU"],
    ),
    "gpus-of-cpu-workers": (
        {"resources_per_worker": {"GPU": 0.5}},
        ["asks for GPU 0.5, and accelerator is 'cpu'", "set accelerator to 'gpu', or remove GPU"],
    ),
    "gpus-of-tpu-workers": (
        SLICES | {"resources_per_worker": {"GPU": 1}},
        ["asks for GPU 1, and accelerator is 'tpu'", "set accelerator to 'gpu', or remove GPU"],
    ),
    "no-gpu-per-gpu-worker": (
        {"accelerator": "gpu", "resources_per_worker": {"CPU": 1, "GPU": 0}},
        ["says GPU 0, and accelerator is 'gpu'", "remove GPU from resources_per_worker for the default"],
    ),
    "one-and-a-half-gpus": (
        {"accelerator": "gpu", "resources_per_worker": {"GPU": 1.5}},
        [
            "\nresources_per_worker\n",
            "GPU 1.5 is neither a share of one GPU nor a whole number",
            "at most 1, or for 1 or 2",
        ],
    ),
    "less-than-ray-can-count": (
        {"resources_per_worker": {"CPU": 0.00005}},
        ["\nresources_per_worker\n", "resource 'CPU' must be 0 or at least 0.0001", "got 5e-05"],
    ),
    "nothing-at-all": (
        {"resources_per_worker": {"CPU": 0}},
        ["\nresources_per_worker\n", "a worker must hold some resource", "leave the field empty for the default"],
    ),
}

#: Those of them that Ray's own configuration takes; they would fail, or wait for ever, in the middle of a run.
FAIL_LATE_IN_RAY = {
    "unknown-type-of-one-worker",
    "turned-topology",
    "topology-of-another-type",
    "more-tpus-than-a-host",
    "half-a-tpu",
    "three-tpus-of-one-worker",
    "topology-without-a-type",
    "label-selector-on-a-slice-of-one-host",
    "strict-pack-on-several-hosts",
    "strict-pack-on-several-slices-of-one-host",
    "strict-spread-of-workers-that-share-hosts",
    "topology-of-gpus",
    "topology-of-cpus",
    "no-gpu-per-gpu-worker",
    "one-and-a-half-gpus",
    "less-than-ray-can-count",
    "nothing-at-all",
}

#: What is taken, and what a worker then gets.
TAKEN: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "cpu": ({"max_workers": 7}, {"CPU": 1}),
    "custom-resources": (
        {"max_workers": 7, "resources_per_worker": {"CPU": 0, "fast-disk": 1}},
        {"fast-disk": 1},
    ),
    "no-accelerators-said-aloud": ({"resources_per_worker": {"CPU": 2, "GPU": 0, "TPU": 0}}, {"CPU": 2}),
    "gpu": ({"accelerator": "gpu", "max_workers": 7}, {"GPU": 1}),
    "third-of-a-gpu": (
        {"accelerator": "gpu", "max_workers": 7, "resources_per_worker": {"GPU": 0.33}},
        {"GPU": 0.33},
    ),
    "gpus-of-a-type": (
        {"accelerator": "gpu", "accelerator_type": " A100 ", "resources_per_worker": {"CPU": 8, "GPU": 2}},
        {"CPU": 8, "GPU": 2, "accelerator_type:A100": 0.001},
    ),
    "labelled-gpus": ({"accelerator": "gpu", "label_selector": {"zone": "a"}}, {"GPU": 1}),
    "slices-of-four-hosts": (SLICES, {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001}),
    "type-as-google-spells-it": (
        SLICES | {"accelerator_type": "v6e", "topology": " 4X4"},
        {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001},
    ),
    "small-workers": (
        SLICES | {"min_workers": 8, "resources_per_worker": {"CPU": 3, "TPU": 2}},
        {"CPU": 3, "TPU": 2, "accelerator_type:TPU-V6E": 0.001},
    ),
    "slices-without-a-word-on-tpus": (
        SLICES | {"resources_per_worker": {"CPU": 0.5, "memory": 1e9}},
        {"CPU": 0.5, "TPU": 4, "memory": 1e9, "accelerator_type:TPU-V6E": 0.001},
    ),
    "slices-without-a-cpu": (
        SLICES | {"resources_per_worker": {"CPU": 0, "TPU": 4}},
        {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001},
    ),
    "spread-slices": (
        SLICES | {"placement_strategy": "STRICT_SPREAD"},
        {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001},
    ),
    "one-chip": (
        SLICES | ALONE | {"topology": "1x1", "max_workers": 3},
        {"CPU": 1, "TPU": 1, "accelerator_type:TPU-V6E": 0.001},
    ),
    "one-host-with-four-chips": (
        SLICES | ALONE | {"topology": "2x2", "max_workers": 3},
        {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001},
    ),
    "one-host-with-eight-chips": (
        SLICES | ALONE | {"topology": "2x4", "max_workers": 3},
        {"CPU": 1, "TPU": 8, "accelerator_type:TPU-V6E": 0.001},
    ),
    "two-hosts-of-the-same-slice": (
        SLICES | {"topology": "2x4", "resources_per_worker": {"TPU": 4}, "placement_strategy": "STRICT_SPREAD"},
        {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V6E": 0.001},
    ),
    "one-packed-slice": (
        SLICES
        | {"topology": "2x2", "max_workers": 4, "placement_strategy": "STRICT_PACK"}
        | {"resources_per_worker": {"TPU": 1}},
        {"CPU": 1, "TPU": 1, "accelerator_type:TPU-V6E": 0.001},
    ),
    "cube": (
        SLICES | {"topology": "2x2x2", "accelerator_type": "tpu7x", "min_workers": 2},
        {"CPU": 1, "TPU": 4, "accelerator_type:TPU-V7X": 0.001},
    ),
    "one-tpu-anywhere": ({"accelerator": "tpu"}, {"TPU": 1}),
    "one-worker-anywhere": (
        {"accelerator": "tpu", "resources_per_worker": {"CPU": 8}, "label_selector": {"zone": "a"}},
        {"CPU": 8, "TPU": 1},
    ),
    "one-worker-of-a-type": (
        {"accelerator": "tpu", "accelerator_type": "v4"},
        {"TPU": 1, "accelerator_type:TPU-V4": 0.001},
    ),
}

#: What a block looked like before it had settings for growth and for waiting.
OLD_DOCUMENT = {
    "min_workers": 2,
    "max_workers": 8,
    "accelerator": "gpu",
    "resources_per_worker": {"CPU": 4.0},
    "resize_check_interval_seconds": 60.0,
    "wait_for_max_seconds": 0.0,
    "placement_strategy": "PACK",
    "label_selector": {},
    "topology": "",
    "accelerator_type": "A100",
}


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_ray_could_not_place_is_refused_with_what_to_do(values: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        ElasticScaling(**values)
    assert refused.value.error_count() == 1
    for words in says:
        assert words in str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_ray_refuses_the_same_or_is_known_to_find_out_late(name: str) -> None:
    values = REFUSED[name][0]
    try:
        ScalingConfig(
            num_workers=(values.get("min_workers", 1), values.get("max_workers", 1)),
            use_gpu=values.get("accelerator") == "gpu",
            use_tpu=values.get("accelerator") == "tpu",
            resources_per_worker=values.get("resources_per_worker"),
            placement_strategy=values.get("placement_strategy", "PACK"),
            label_selector=values.get("label_selector"),
            topology=values.get("topology", "").strip() or None,
            accelerator_type=values.get("accelerator_type") or None,
        )
    except ValueError:
        assert name not in FAIL_LATE_IN_RAY
    else:
        assert name in FAIL_LATE_IN_RAY


@pytest.mark.parametrize(("values", "resources"), TAKEN.values(), ids=TAKEN.keys())
def test_what_ray_can_place_is_taken_and_completed(values: dict[str, Any], resources: dict[str, float]) -> None:
    assert resources_per_worker(ScalingSettings(**values)) == resources


def test_every_slice_that_ray_can_reserve_is_taken() -> None:
    for version, topologies in VALID_TPU_TOPOLOGY.items():
        for topology in topologies:
            shape = slice_shape(topology, version, {})
            config = scaling_config(
                ScalingSettings(
                    accelerator="tpu",
                    topology=topology,
                    accelerator_type=version,
                    min_workers=shape.workers,
                    max_workers=3 * shape.workers,
                )
            )
            assert (
                get_tpu_num_slices_for_workers(
                    config.topology, config.accelerator_type, config.max_workers, config.resources_per_worker
                )
                == 3
            )
            # What Ray checks, late, when it reserves a slice; and the label by which it finds one.
            assert TPUAcceleratorManager.is_valid_tpu_accelerator_topology(shape.accelerator_type, shape.topology)
            assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(shape.pod_type)


@pytest.mark.parametrize(
    ("topology", "accelerator_type", "resources", "expected"),
    [
        ("4x4", "TPU-V6E", {}, SliceShape("4x4", "TPU-V6E", "v6e-16", 16, 4, 4)),
        ("4x4", "v6e", {"TPU": 1.0}, SliceShape("4x4", "TPU-V6E", "v6e-16", 16, 16, 1)),
        ("2x4", "v6e", {}, SliceShape("2x4", "TPU-V6E", "v6e-8", 8, 1, 8)),
        ("2x4", "v6e", {"CPU": 1, "TPU": 4}, SliceShape("2x4", "TPU-V6E", "v6e-8", 8, 2, 4)),
        ("1x1", "TPU-V5LITEPOD", {}, SliceShape("1x1", "TPU-V5LITEPOD", "v5litepod-1", 1, 1, 1)),
        ("2X2X2 ", " TPU-V4", {}, SliceShape("2x2x2", "TPU-V4", "v4-16", 8, 2, 4)),
    ],
)
def test_the_shape_of_a_slice_is_what_ray_says(
    topology: str, accelerator_type: str, resources: dict[str, float], expected: SliceShape
) -> None:
    assert slice_shape(topology, accelerator_type, resources) == expected


def test_chips_are_counted_as_the_nodes_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAY_TPU_RESOURCE_PER_CHIP_ENV_VAR, "2")
    assert slice_shape("2x2x2", "TPU-V7X", {}) == SliceShape("2x2x2", "TPU-V7X", "v7x-16", 16, 2, 8)
    assert slice_shape("2x2x2", "TPU-V7X", {"TPU": 1}).workers == 16


ACCELERATORS = st.sampled_from(["cpu", "gpu", "tpu"])
AMOUNTS = st.sampled_from([0, 0.00001, 0.25, 0.5, 1, 1.5, 2, 3, 4, 8, 16, 1e9]) | st.floats(0, 64)
RESOURCES = st.dictionaries(st.sampled_from(["CPU", "GPU", "TPU", "memory", "fast-disk"]), AMOUNTS, max_size=3)
TOPOLOGIES = sorted({topology for topologies in VALID_TPU_TOPOLOGY.values() for topology in topologies})


@st.composite
def scaling(draw: st.DrawFn) -> dict[str, Any]:
    """Give settings of which a good part is right."""
    accelerator = draw(ACCELERATORS)
    workers = sorted(draw(st.tuples(*[st.integers(1, 4)] * 2)))
    values: dict[str, Any] = {
        "accelerator": accelerator,
        "resources_per_worker": draw(st.just({}) | RESOURCES),
        "placement_strategy": draw(st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])),
        "label_selector": draw(st.sampled_from([{}, {"zone": "a"}])),
        "accelerator_type": draw(st.sampled_from(["", "A100"])),
    }
    per_slice = 1
    if accelerator == "tpu" and draw(st.booleans()):
        version = draw(st.sampled_from(sorted(VALID_TPU_TOPOLOGY)))
        values["accelerator_type"] = draw(st.sampled_from([version, f"TPU-{version.upper()}", ""]))
        values["topology"] = draw(st.sampled_from(sorted(VALID_TPU_TOPOLOGY[version])) | st.sampled_from(TOPOLOGIES))
        values["label_selector"] = {}
        per_slice = draw(st.sampled_from([1, 2, 4]))
        if draw(st.booleans()):
            values["resources_per_worker"] = {"TPU": draw(st.sampled_from([1, 2, 4, 8]))}
        try:
            per_slice = slice_shape(
                values["topology"], values["accelerator_type"], values["resources_per_worker"]
            ).workers
        except ValueError:
            pass
    return values | {"min_workers": workers[0] * per_slice, "max_workers": workers[1] * per_slice}


@examples(200)
@given(values=scaling())
def test_whatever_is_taken_is_taken_by_ray(values: dict[str, Any]) -> None:
    try:
        settings = ScalingSettings(**values)
    except ValidationError:
        assume(False)
        return
    config = scaling_config(settings)
    assert config.num_workers == (settings.min_workers, settings.max_workers)
    # The worker actors of Ray Train are made of these; a bad amount is refused only there.
    ray.remote(**bundle_to_remote_args(config._resources_per_worker_not_none))(object)
    asked = {name: amount for name, amount in settings.resources_per_worker.items() if amount}
    assert config._resources_per_worker_not_none | asked == config._resources_per_worker_not_none
    if settings.topology:
        shape = slice_shape(config.topology, config.accelerator_type, config.resources_per_worker)
        assert config.min_workers % shape.workers == config.max_workers % shape.workers == 0
        assert shape.workers * shape.chips_per_worker == shape.chips


def test_no_ray_is_loaded_for_cpus_and_gpus() -> None:
    answer = python(
        "from prefect_elastic_train.core.settings import ScalingSettings\n"
        "ScalingSettings(accelerator='gpu', max_workers=8, resources_per_worker={'GPU': 2})\n"
        "print('ray' in sys.modules)"
    )
    assert answer.stdout.strip() == "False"


def _document(data: dict[str, Any]) -> BlockDocument:
    schema = ElasticScaling._to_block_schema(block_type_id=uuid4())
    return BlockDocument(
        name="spot",
        data=data,
        block_schema_id=uuid4(),
        block_schema=schema,
        block_type_id=uuid4(),
        block_type=ElasticScaling._to_block_type(),
    )


def test_a_block_that_was_saved_without_the_newer_settings_loads_with_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefect.events.utilities.should_emit_events", lambda: False)  # which would start a server
    loaded = ElasticScaling._load_from_block_document(_document(OLD_DOCUMENT))
    assert plain(ScalingSettings, loaded) == ScalingSettings(**OLD_DOCUMENT)
    assert loaded.stability_delay_seconds == 30
    assert loaded.resize_patience_seconds == 1800
    assert loaded.capacity_timeout_seconds == 0


def test_a_saved_block_that_no_slice_can_satisfy_says_so_when_it_is_loaded() -> None:
    with pytest.raises(ConfigurationError, match=r"elastic-scaling/spot (.|\n)*must be a multiple of 4"):
        ElasticScaling._load_from_block_document(_document(SLICES | {"max_workers": 6}))
