"""`prefect.yaml` and the Kubernetes variant: what Prefect reads, and how long pods may take to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.server.api import collections_data

from blocks.profiles import PROFILES, profile_blocks
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from tests.unit.support import REPOSITORY
from tests.unit.test_block_documents import ENVIRONMENT

FILES = [REPOSITORY / "prefect.yaml", REPOSITORY / "kubernetes" / "prefect.yaml"]
TEMPLATE = REPOSITORY / "kubernetes" / "base-job-template.json"
STEP = "prefect_elastic_train.blocks.steps.saved_blocks"
#: What a worker group may take to stop, as docs/faults.md says.
WORKERS_STOP_SECONDS = 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
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


def test_the_base_job_template_is_prefects_but_for_the_grace_of_a_pod_and_its_image() -> None:
    known = Path(collections_data.__path__[0]) / "views" / "aggregate-worker-metadata.json"
    prefects = json.loads(known.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    ours = json.loads(TEMPLATE.read_text())
    del ours["variables"]["required"]
    del ours["variables"]["properties"]["termination_grace_period_seconds"]
    del ours["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for template in (prefects, ours):
        del template["variables"]["properties"]["image"]
    assert ours == prefects


def test_a_pod_has_longer_to_end_than_a_training() -> None:
    template = json.loads(TEMPLATE.read_text())
    grace = template["variables"]["properties"]["termination_grace_period_seconds"]
    needed = WORKERS_STOP_SECONDS + ElasticTrainSettings().stop_grace_seconds
    assert grace["default"] > grace["minimum"] >= 2 * needed
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == "{{ termination_grace_period_seconds }}"
    model = PrefectYamlModel.model_validate(yaml.safe_load(FILES[1].read_text()))
    for deployment in model.deployments:
        variables: Any = deployment.work_pool and deployment.work_pool.job_variables
        assert set(variables) <= set(template["variables"]["properties"])
        assert variables["termination_grace_period_seconds"] >= grace["minimum"]
