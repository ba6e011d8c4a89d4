"""Metrics of trainings on the endpoint of Prefect's client metrics. Belongs to the flow process.

Prefect serves the registry of ``prometheus_client`` in each flow process if ``PREFECT_CLIENT_METRICS_ENABLED`` is set.
"""

import threading

from prometheus_client import Gauge

from prefect_elastic_train.report.measurements import measure
from prefect_elastic_train.report.run_report import RunReport

#: Module state, as the registry is: a metric has one object in a process, for all trainings.
_gauges: dict[str, Gauge] = {}
_lock = threading.Lock()


def update_metrics(report: RunReport, now: float) -> None:
    """Set the metrics of a run. ``now``: seconds since the epoch."""
    for name, text, labels, value in measure(report, now):
        with _lock:
            if name not in _gauges:
                _gauges[name] = Gauge(name, text, [*labels])
        _gauges[name].labels(**labels).set(value)
