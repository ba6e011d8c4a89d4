"""Metrics of the training on Ray's metrics endpoints, for Prometheus. Belongs to the driver."""

import logging
from collections.abc import Callable, Iterable
from threading import Event

from ray.util.metrics import Gauge

from prefect_elastic_train.report.measurements import METRICS, PREFIX, Sample

logger = logging.getLogger("prefect_elastic_train.driver")

_SECONDS = 10.0  # between two updates; Ray exports metrics as often


def export_metrics(measure: Callable[[], Iterable[Sample]], closed: Event) -> None:
    """Set Ray's metrics every ten seconds until ``closed`` is set. After an error, which is logged, there are no more.

    Ray names them ``ray_elastic_train_...``. This process must be connected to Ray.
    """
    try:
        gauges = {
            name: Gauge(f"{PREFIX}{name}", metric.help, (*filter(None, ["run", metric.label]),))
            for name, metric in METRICS.items()
        }
        is_closed = False
        while not is_closed:
            for sample in measure():
                gauges[sample.name].set(sample.value, sample.labels)
            is_closed = closed.wait(_SECONDS)
    except Exception:
        logger.warning("The metrics for Prometheus end; training goes on", exc_info=True)
