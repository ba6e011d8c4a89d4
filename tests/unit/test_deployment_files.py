"""`prefect.yaml` and the Kubernetes variant: what Prefect reads."""

import json
from pathlib import Path

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel

from blocks.profiles import PROFILES, profile_blocks
from prefect_elastic_train.core.settings import FailureSettings, KubeRaySettings, ScalingSettings
from prefect_elastic_train.kubernetes.manifests import render
from tests.unit.support import REPOSITORY
from tests.unit.test_block_documents import ENVIRONMENT

FILES = [REPOSITORY / "prefect.yaml", REPOSITORY / "prefect-kubernetes.yaml"]
STEP = "prefect_elastic_train.blocks.steps.saved_blocks"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_deployment_refers_to_blocks_of_the_profiles_and_to_nothing_else(file: Path) -> None:
    profiles = {
        f"{block.get_block_type_slug()}/{name}" for name in PROFILES for block in profile_blocks(name, ENVIRONMENT)
    }
    model = PrefectYamlModel.model_validate(yaml.safe_load(file.read_text()))
    assert model.deployments
    for deployment in model.deployments:
        assert deployment.enforce_parameter_schema
        assert "elastic-train" in (deployment.tags or [])
        [step] = deployment.build or [{STEP: {"id": "blocks"}}]  # the evaluation starts with no blocks
        given = {key: name for key, name in step[STEP].items() if key != "id"}
        assert set(given.values()) <= profiles
        plain = {"data_dir", "prepare_with", "train_with", "evaluate_with"}
        templates = {key: f"{{{{ blocks.{key} }}}}" for key in given}
        chosen = {key: value for key, value in deployment.parameters.items() if key not in plain}
        assert chosen.items() <= templates.items()
        assert not any(getattr(schedule, "active", True) for schedule in deployment.schedules or [])


def test_the_kubernetes_deployments_set_variables_of_the_rendered_work_pool() -> None:
    texts = render(ScalingSettings(), FailureSettings(), KubeRaySettings(image="registry.example.com/training:1"))
    known = json.loads(texts["work-pool.json"])["variables"]["properties"]
    model = PrefectYamlModel.model_validate(yaml.safe_load(FILES[1].read_text()))
    for deployment in model.deployments:
        assert deployment.work_pool
        assert deployment.work_pool.name == "training"
        assert set(deployment.work_pool.job_variables or {}) <= set(known)
