"""The measurements of a run as metrics for Prometheus. Belongs to the flow process and the driver."""

from collections.abc import Iterator
from typing import NamedTuple

from .run_report import COUNTERS, RunReport

PREFIX = "elastic_train_"


class Metric(NamedTuple):
    """A metric: its help text, and the name of its label beside ``run``; empty: none."""

    help: str
    label: str = ""


#: All are gauges, since a new process continues from the history. Names without :data:`PREFIX`.
METRICS = {
    "goodput_ratio": Metric("Share of the wall time in which workers trained and their work was kept"),
    "wall_time_seconds": Metric("Wall time of the run by activity", "activity"),
    "restarts": Metric("Restarts of the worker group or the driver by cause", "cause"),
    "workers": Metric("Workers of the worker group"),
    "steps": Metric("Optimizer steps done by the session"),
    "steps_redone": Metric("Optimizer steps done again after failures"),
    "steps_per_second": Metric("Steps per second since the last restart"),
    "samples_per_second": Metric("Samples per second since the last restart"),
    "progress_ratio": Metric("Progress of the training"),
    "checkpoints": Metric("Committed checkpoints"),
    "checkpoint_written_bytes": Metric("Size of all committed checkpoints"),
    "checkpoint_timestamp_seconds": Metric("Time of the newest commit, in seconds since the epoch"),
    "storage_retries": Metric("Repeated requests to the storage"),
    "storage_wait_seconds": Metric("Time for which the controller or a rank waited for the storage"),
}


class Sample(NamedTuple):
    """A value of a metric, with its labels."""

    name: str
    labels: dict[str, str]
    value: float


def measure(report: RunReport, now: float) -> Iterator[Sample]:
    """Yield a value of each metric that is known at the time ``now`` (seconds since the epoch)."""
    tally = report.tally
    account = tally.account(now)
    rates = report.rates if report.state == "training" else {}
    seconds = account.model_dump(exclude={"wall_seconds", "stopped_seconds"})
    values: dict[str, float | dict[str, float]] = {
        "goodput_ratio": account.goodput,
        "wall_time_seconds": {name.removesuffix("_seconds"): spent for name, spent in seconds.items()},
        "restarts": {name.replace(" ", "_"): count for name, count in report.restarts.items()},
        "workers": report.world_size,
        "steps": tally.step,
        "steps_redone": tally.steps_redone,
        "steps_per_second": next((rates[counter] for counter in COUNTERS if counter in rates), 0.0),
        "samples_per_second": rates.get("samples", 0.0),
        "checkpoints": report.checkpoints_made,
        "checkpoint_written_bytes": tally.checkpoint_bytes,
        "storage_retries": tally.storage_retries,
        "storage_wait_seconds": tally.storage_wait_seconds,
    }
    if report.progress:
        values["progress_ratio"] = report.progress.fraction
    if report.checkpoints:
        values["checkpoint_timestamp_seconds"] = report.checkpoints[-1].at
    for name, value in values.items():
        by_label = value if isinstance(value, dict) else {"": value}
        for label, number in by_label.items():
            labels = {METRICS[name].label: label} if METRICS[name].label else {}
            yield Sample(name, {"run": report.run_name, **labels}, number)
