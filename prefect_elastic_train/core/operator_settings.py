"""What an operator sets once for all trainings, wherever Prefect's own settings may stand.

It imports Prefect's settings, so nothing that drivers load imports this: what those need is in their spec.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from pydantic import Field, NonNegativeFloat, PositiveFloat, StringConstraints, ValidationError
from pydantic_settings import SettingsConfigDict

from prefect_elastic_train.core.outcomes import ConfigurationError

_BlockName = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^(([a-z0-9-]+/)?[a-z0-9-]+)?$")]


class ElasticTrainSettings(PrefectBaseSettings):
    """Settings of this package, read from where Prefect reads its own, the first of these that has one.

    Environment variables ``PREFECT_ELASTIC_TRAIN_*``, the same in ``.env``, the table ``[elastic_train]`` of
    ``prefect.toml``, ``[tool.prefect.elastic_train]`` of ``pyproject.toml``, and the active Prefect profile. Files are
    those of the folder that the process was started in.

    Example:
        ``PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS=0.5`` polls the workers twice a second.
    """

    model_config: ClassVar[SettingsConfigDict] = build_settings_config(("elastic_train",), frozen=True)
    model_config["use_attribute_docstrings"] = True

    poll_interval_seconds: NonNegativeFloat = 0.0
    """How often the controller polls its workers. 0: 0.1 s, growing with max_workers."""
    liveness_timeout_seconds: PositiveFloat = 300.0
    """A driver whose controller gives no sign of life for so long counts as lost."""
    stop_grace_seconds: PositiveFloat = 8.0
    """How long a driver may take to end after SIGINT before SIGKILL."""
    flow_run_check_seconds: PositiveFloat = 3.0
    """How often a training looks whether its flow run was cancelled or has ended."""
    local_cluster_timeout_seconds: PositiveFloat = 120.0
    """How long a local cluster may take to start."""
    log_lines_per_second: PositiveFloat = 20.0
    """How many lines a second of each source of output reach the Prefect log."""
    reporting: bool = True
    """Whether the report, the progress and the run's events are written to Prefect."""
    report_interval_seconds: float = Field(default=10.0, ge=5)
    """How often the report is updated while nothing but training happens."""
    default_scaling: _BlockName = ""
    """Saved ElasticScaling of trainings that give none. Empty: one CPU worker."""
    default_failures: _BlockName = ""
    """Saved FailureBudget of trainings that give none. Empty: its defaults."""
    default_checkpoints: _BlockName = ""
    """Saved CheckpointPolicy of trainings that give none. Empty: all checkpoints are kept."""
    default_storage: _BlockName = ""
    """Saved storage of trainings that give none. Empty: ~/elastic_train_runs."""
    default_cluster: _BlockName = ""
    """Saved RayCluster of trainings that give none. Empty: a local cluster each."""

    def poll_interval(self, max_workers: int) -> float:
        """Return the seconds between polls: short, as ``report()`` waits for one; longer for large groups."""
        return self.poll_interval_seconds or min(2.0, max(0.1, 0.005 * max_workers))


@cache
def get_settings() -> ElasticTrainSettings:
    """Return the settings of this process, or raise a ConfigurationError."""
    try:
        return ElasticTrainSettings()
    except ValidationError as error:
        told = [f"{variable_of(one['loc'][0])}={one['input']!r} is not allowed: {one['msg']}" for one in error.errors()]
        raise ConfigurationError("; ".join(told)) from None


def variable_of(setting: object) -> str:
    """Return the environment variable of a setting."""
    return f"{ElasticTrainSettings.model_config.get('env_prefix', '')}{str(setting).upper()}"


def default_block_name(argument: str) -> str:
    """Return the name of the saved block that stands for an argument of ``elastic_train``; empty if none does."""
    return str(getattr(get_settings(), f"default_{argument}"))
