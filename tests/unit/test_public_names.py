"""The package's public face: its names, and how little importing it costs."""

from __future__ import annotations

import json

import pytest

import prefect_elastic_train
from tests.unit.support import python

PUBLIC_NAMES = [
    "AttemptFailedError",
    "CheckpointGoneError",
    "CheckpointPolicy",
    "ConfigurationError",
    "ElasticScaling",
    "ElasticTrainError",
    "FailureBudget",
    "FsspecStorage",
    "LocalStorage",
    "Outcome",
    "RayCluster",
    "S3Storage",
    "StorageFaultError",
    "TrainingResult",
    "TrainingTimeoutError",
    "__version__",
    "aelastic_train",
    "checkpoint_directory",
    "elastic_train",
]

MODULES = [
    "prefect_elastic_train",
    "prefect_elastic_train.loop",
    "prefect_elastic_train.blocks",
    "prefect_elastic_train.orchestration.task",
]

_LOAD_ONE_AFTER_THE_OTHER = """
import importlib, json
heavy, loaded = ("ray", "torch", "jax", "matplotlib", "pyarrow", "prefect"), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = [package for package in heavy if package in sys.modules]
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Which heavy packages are loaded after importing each module, in one fresh interpreter."""
    found: dict[str, list[str]] = json.loads(python(_LOAD_ONE_AFTER_THE_OTHER, *MODULES).stdout)
    return found


def test_the_public_names_are_exactly_these() -> None:
    assert prefect_elastic_train.__all__ == PUBLIC_NAMES
    assert dir(prefect_elastic_train) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(prefect_elastic_train, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_says_which() -> None:
    with pytest.raises(AttributeError, match="'prefect_elastic_train' has no attribute 'train_elastically'"):
        _ = prefect_elastic_train.train_elastically


def test_importing_the_package_loads_not_even_prefect(loaded: dict[str, list[str]]) -> None:
    assert loaded["prefect_elastic_train"] == []


@pytest.mark.parametrize("module", MODULES)
def test_importing_loads_neither_ray_nor_torch_nor_jax(module: str, loaded: dict[str, list[str]]) -> None:
    assert set(loaded[module]) <= {"prefect"}
