"""Settings that an operator makes once for all trainings, in the places of Prefect's own settings.

Belongs to the flow process and the CLI. It imports Prefect's settings, so no module that drivers load imports it;
drivers get values from their spec.
"""

from functools import cache
from typing import Annotated

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from pydantic import Field, NonNegativeFloat, PositiveFloat, StringConstraints, ValidationError

from .outcomes import ConfigurationError
from .time_limits import STOP_GRACE_SECONDS, TERMINATION_GRACE_SECONDS

_BlockName = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^(([a-z0-9-]+/)?[a-z0-9-]+)?$")]


class ElasticTrainSettings(PrefectBaseSettings, use_attribute_docstrings=True):
    """Settings of this package. Each is read from the first of Prefect's sources that has it.

    The sources are environment variables ``PREFECT_ELASTIC_TRAIN_*``, the same in ``.env``, the table
    ``[elastic_train]`` of ``prefect.toml``, ``[tool.prefect.elastic_train]`` of ``pyproject.toml``, and the active
    Prefect profile. Files are read from the working directory at the start of the process.

    Example:
        ``PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS=0.5`` polls the workers twice a second.
    """

    model_config = build_settings_config(("elastic_train",), frozen=True)

    poll_interval_seconds: NonNegativeFloat = 0.0
    """How often the controller polls its workers. 0: 0.1 s, growing with max_workers."""
    liveness_timeout_seconds: PositiveFloat = 300.0
    """A driver whose controller sends no event for this long counts as lost."""
    stop_grace_seconds: PositiveFloat = STOP_GRACE_SECONDS
    """How long a driver may take to exit after SIGINT before SIGKILL."""
    termination_grace_seconds: NonNegativeFloat = TERMINATION_GRACE_SECONDS
    """How long, up to 25 s, a session may take to save after SIGTERM to the flow process. 0: no save."""
    flow_run_check_seconds: PositiveFloat = 3.0
    """How often a training checks if its flow run was cancelled or has ended."""
    local_cluster_timeout_seconds: PositiveFloat = 120.0
    """How long a local cluster may take to start."""
    log_lines_per_second: PositiveFloat = 20.0
    """Lines per second of each source of output that are written to the Prefect log."""
    reporting: bool = True
    """Write the report, the progress and the run's events to Prefect."""
    report_interval_seconds: float = Field(default=10.0, ge=5)
    """How often the report is updated while training runs without incidents."""
    default_scaling: _BlockName = ""
    """Saved ElasticScaling of trainings that set none. Empty: one CPU worker."""
    default_failures: _BlockName = ""
    """Saved FailureBudget of trainings that set none. Empty: its defaults."""
    default_checkpoints: _BlockName = ""
    """Saved CheckpointPolicy of trainings that set none. Empty: all checkpoints are kept."""
    default_storage: _BlockName = ""
    """Saved storage of trainings that set none. Empty: ~/elastic_train_runs."""
    default_cluster: _BlockName = ""
    """Saved RayCluster of trainings that set none. Empty: a local cluster each."""

    def poll_interval(self, max_workers: int) -> float:
        """Return the seconds between two polls of the workers by the controller.

        The interval is short, because ``report()`` waits for a poll. It is longer for many workers.
        """
        return self.poll_interval_seconds or min(2.0, max(0.1, 0.005 * max_workers))


@cache
def get_settings() -> ElasticTrainSettings:
    """Return the settings of this package, which are read once a process.

    Raises:
        ConfigurationError: A setting has a value that is not allowed.
    """
    try:
        return ElasticTrainSettings()
    except ValidationError as error:
        problems = [
            f"{variable_of(item['loc'][0])}={item['input']!r} is not allowed: {item['msg']}" for item in error.errors()
        ]
        raise ConfigurationError("; ".join(problems)) from None


def variable_of(setting: object) -> str:
    """Return a setting's environment variable, such as ``PREFECT_ELASTIC_TRAIN_REPORTING`` for ``reporting``."""
    return f"{ElasticTrainSettings.model_config.get('env_prefix', '')}{str(setting).upper()}"
