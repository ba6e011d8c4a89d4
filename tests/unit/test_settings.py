"""What an operator sets in the environment."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prefect_elastic_train.settings import ElasticTrainSettings, get_settings

#: Environment variable, its text, and a default that differs from it.
VARIABLES = {
    "PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS": ("0.5", 0.0),
    "PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": ("60", 300.0),
    "PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS": ("3", 8.0),
    "PREFECT_ELASTIC_TRAIN_FLOW_RUN_CHECK_SECONDS": ("1", 3.0),
    "PREFECT_ELASTIC_TRAIN_LOCAL_CLUSTER_TIMEOUT_SECONDS": ("30", 120.0),
    "PREFECT_ELASTIC_TRAIN_LOG_LINES_PER_SECOND": ("5", 50.0),
}


def _field(variable: str) -> str:
    return variable.removeprefix("PREFECT_ELASTIC_TRAIN_").lower()


def test_the_variables_in_the_tests_are_all_there_are() -> None:
    assert {_field(variable) for variable in VARIABLES} == ElasticTrainSettings.model_fields.keys()


@pytest.mark.parametrize(("variable", "text", "default"), [(name, *values) for name, values in VARIABLES.items()])
def test_every_setting_is_read_from_its_variable(
    variable: str, text: str, default: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert getattr(ElasticTrainSettings(), _field(variable)) == default
    monkeypatch.setenv(variable, text)
    assert getattr(ElasticTrainSettings(), _field(variable)) == float(text)


@pytest.mark.parametrize(
    ("variable", "text", "rule"),
    [
        ("PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS", "-1", "greater than or equal to 0"),
        ("PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS", "0", "greater than 0"),
        ("PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS", "soon", "valid number"),
        ("PREFECT_ELASTIC_TRAIN_FLOW_RUN_CHECK_SECONDS", "0", "greater than 0"),
        ("PREFECT_ELASTIC_TRAIN_LOCAL_CLUSTER_TIMEOUT_SECONDS", "0", "greater than 0"),
        ("PREFECT_ELASTIC_TRAIN_LOG_LINES_PER_SECOND", "0", "greater than 0"),
    ],
)
def test_a_bad_variable_is_refused_by_name_value_and_rule(
    variable: str, text: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValidationError) as refused:
        ElasticTrainSettings()
    for words in (_field(variable), text, rule):
        assert words in str(refused.value)


def test_variables_of_others_and_the_mark_of_a_process_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_PROCESS_MARK", "0123")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    ElasticTrainSettings()


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.1), (20, 0.1), (64, 0.32), (400, 2.0), (4096, 2.0)])
def test_the_poll_interval_grows_with_the_workers_within_bounds(
    workers: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS", raising=False)
    assert ElasticTrainSettings().poll_interval(workers) == pytest.approx(seconds)
    settings: Any = ElasticTrainSettings(poll_interval_seconds=0.7)
    assert settings.poll_interval(workers) == 0.7


def test_a_process_reads_its_settings_once() -> None:
    assert get_settings() is get_settings()
