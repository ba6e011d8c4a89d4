"""Metrics of trainings on the endpoint of Prefect's client metrics. Belongs to the flow process.

Prefect serves the registry of ``prometheus_client`` in each flow process if ``PREFECT_CLIENT_METRICS_ENABLED`` is set.
"""

from prometheus_client import Gauge

from prefect_elastic_train.report.measurements import METRICS, PREFIX, measure
from prefect_elastic_train.report.run_report import RunReport

#: Module state, as the registry is: a metric has one object in a process, for all trainings.
_GAUGES = {
    name: Gauge(f"{PREFIX}{name}", metric.help, [*filter(None, ["run", metric.label])])
    for name, metric in METRICS.items()
}


def update_metrics(report: RunReport, now: float) -> None:
    """Set the metrics of a run. ``now``: seconds since the epoch."""
    for sample in measure(report, now):
        _GAUGES[sample.name].labels(**sample.labels).set(sample.value)
