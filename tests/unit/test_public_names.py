"""The package's public face: its names, and how little importing it costs."""

import json

import pytest

import prefect_elastic_train
from tests.unit.support import python

MODULES = [
    "prefect_elastic_train",
    "prefect_elastic_train.loop",
    "prefect_elastic_train.trainers",
    "prefect_elastic_train.blocks",
    "prefect_elastic_train.orchestration.task",
    "prefect_elastic_train.train_flow",
]

_LOAD_ONE_AFTER_THE_OTHER = """
import importlib, json
heavy, loaded = ("ray", "torch", "jax", "lightning", "transformers", "matplotlib", "pyarrow", "prefect"), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = [package for package in heavy if package in sys.modules]
print(json.dumps(loaded))
"""


def test_the_public_names_are_there_and_no_others() -> None:
    assert prefect_elastic_train.__all__ == dir(prefect_elastic_train)
    assert all(getattr(prefect_elastic_train, name) is not None for name in dir(prefect_elastic_train))
    with pytest.raises(AttributeError, match="'prefect_elastic_train' has no attribute 'train_elastically'"):
        _ = prefect_elastic_train.train_elastically


def test_importing_loads_neither_ray_nor_torch_nor_jax_and_the_package_alone_not_even_prefect() -> None:
    loaded = json.loads(python(_LOAD_ONE_AFTER_THE_OTHER, *MODULES).stdout)
    assert loaded["prefect_elastic_train"] == []
    assert all(set(packages) <= {"prefect"} for packages in loaded.values())
