"""What an operator sets once for all trainings, from the environment."""

from __future__ import annotations

from functools import cache

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["ElasticTrainSettings", "get_settings"]


class ElasticTrainSettings(BaseSettings):
    """Settings read from environment variables that begin with ``PREFECT_ELASTIC_TRAIN_``.

    Example:
        ``PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS=0.5`` polls the workers twice a second.
    """

    model_config = SettingsConfigDict(env_prefix="PREFECT_ELASTIC_TRAIN_", extra="ignore")

    poll_interval_seconds: float = Field(
        default=0.0,
        ge=0,
        description="How often the controller polls its workers. 0: 0.1 s, growing with max_workers.",
    )
    liveness_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="A driver whose controller gives no sign of life for so long counts as lost.",
    )
    stop_grace_seconds: float = Field(
        default=8.0, gt=0, description="How long a driver may take to end after SIGINT before SIGKILL."
    )
    flow_run_check_seconds: float = Field(
        default=3.0, gt=0, description="How often a training looks whether its flow run was cancelled or has ended."
    )
    local_cluster_timeout_seconds: float = Field(
        default=120.0, gt=0, description="How long a local cluster may take to start."
    )
    log_lines_per_second: float = Field(
        default=50.0, gt=0, description="How many lines a second of the run's output reach the Prefect log."
    )

    def poll_interval(self, max_workers: int) -> float:
        """Give the poll interval in seconds for a worker group of up to ``max_workers``.

        Short, since ``report()`` waits for a poll and what was not polled is lost with a worker; longer for
        large groups, since a poll costs a call to each worker.
        """
        return self.poll_interval_seconds or min(2.0, max(0.1, 0.005 * max_workers))


@cache
def get_settings() -> ElasticTrainSettings:
    """Give the settings of this process."""
    return ElasticTrainSettings()
