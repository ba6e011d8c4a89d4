"""Metrics of the training on Ray's metrics endpoints, for Prometheus. Belongs to the driver."""

import logging
from collections.abc import Callable, Iterable
from threading import Event

from ray.util.metrics import Gauge

from prefect_elastic_train.report.measurements import Sample

logger = logging.getLogger("prefect_elastic_train.driver")

_SECONDS = 10.0  # between two updates; Ray exports metrics as often


def export_metrics(measure: Callable[[], Iterable[Sample]], closed: Event) -> None:
    """Set Ray's metrics every ten seconds until ``closed`` is set. After an error, which is logged, there are no more.

    Ray names them ``ray_elastic_train_...``. This process must be connected to Ray.
    """
    gauges: dict[str, Gauge] = {}
    is_closed = False
    try:
        while not is_closed:
            for name, text, labels, value in measure():
                if name not in gauges:
                    gauges[name] = Gauge(name, text, (*labels,))
                gauges[name].set(value, labels)
            is_closed = closed.wait(_SECONDS)
    except Exception:
        logger.warning("The metrics for Prometheus end; training goes on", exc_info=True)
