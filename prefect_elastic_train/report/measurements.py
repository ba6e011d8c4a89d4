"""The measurements of a run as metrics for Prometheus. Belongs to the flow process and the driver."""

from collections.abc import Iterator
from typing import NamedTuple

from .run_report import COUNTERS, RunReport


class Sample(NamedTuple):
    """A value of a metric. All metrics are gauges, since a new process continues from the history.

    Attributes:
        name: Name of the metric.
        help: Its help text.
        labels: The run, and for some metrics another label.
        value: The value.
    """

    name: str
    help: str
    labels: dict[str, str]
    value: float


def measure(report: RunReport, now: float) -> Iterator[Sample]:
    """Yield a value of each metric that is known at the time ``now`` (seconds since the epoch)."""
    tally = report.tally
    account = tally.account(now)
    rates = report.rates if report.state == "training" else {}
    steps_per_second = next((rates[counter] for counter in COUNTERS if counter in rates), 0.0)
    values: list[tuple[str, str, float]] = [
        ("goodput_ratio", "Share of the wall time in which workers trained and their work was kept", account.goodput),
        ("workers", "Workers of the worker group", report.world_size),
        ("steps", "Optimizer steps done by the session", tally.step),
        ("steps_redone", "Optimizer steps done again after failures", tally.steps_redone),
        ("steps_per_second", "Steps per second since the last restart", steps_per_second),
        ("samples_per_second", "Samples per second since the last restart", rates.get("samples", 0.0)),
        ("checkpoints", "Committed checkpoints", report.checkpoints_made),
        ("checkpoint_written_bytes", "Size of all committed checkpoints", tally.checkpoint_bytes),
        ("storage_retries", "Repeated requests to the storage", tally.storage_retries),
        ("storage_wait_seconds", "Time that a process waited for the storage", tally.storage_wait_seconds),
    ]
    if report.progress:
        values.append(("progress_ratio", "Progress of the training", report.progress.fraction))
    if report.checkpoints:
        at = report.checkpoints[-1].at
        values.append(("checkpoint_timestamp_seconds", "Time of the newest commit, in seconds since the epoch", at))
    run = {"run": report.run_name}
    for name, text, value in values:
        yield Sample(f"elastic_train_{name}", text, run, value)
    for activity, seconds in account.model_dump(exclude={"wall_seconds", "stopped_seconds"}).items():
        labels = {**run, "activity": activity.removesuffix("_seconds")}
        yield Sample("elastic_train_wall_time_seconds", "Wall time of the run by activity", labels, seconds)
    restarts = {
        "worker_failure": tally.worker_failures,
        "preemption": tally.preemptions,
        "driver_restart": report.driver_restarts,
        "resize": tally.resizes,
    }
    for cause, count in restarts.items():
        labels = {**run, "cause": cause}
        yield Sample("elastic_train_restarts", "Restarts of the worker group or the driver by cause", labels, count)
