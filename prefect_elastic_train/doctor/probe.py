"""``python -m prefect_elastic_train.doctor.probe <spec file>``: a driver that joins its cluster, and trains nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    ClusterConnected,
    ClusterWanted,
    Event,
    encode_event,
)
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.spec import read_spec
from prefect_elastic_train.driver.joining import connect


def main(arguments: list[str]) -> int:
    """Join, and tell the cluster's resources, or what keeps a driver from joining."""
    spec = read_spec(Path(arguments[0]))
    _tell(ClusterWanted(sequence=1))
    try:
        address, _, resources = connect(spec)
    except AttemptFailedError as error:
        _tell(AttemptEnded(sequence=2, outcome=error.outcome, message=str(error)))
        return 1
    _tell(ClusterConnected(sequence=2, address=address, resources=resources))
    _tell(AttemptEnded(sequence=3, outcome=Outcome.COMPLETED))
    import ray

    if spec.cluster.is_local:  # it is ended in a moment
        os._exit(0)
    ray.shutdown()
    return 0


def _tell(event: Event) -> None:
    sys.stdout.write(f"{EVENT_TAG}{encode_event(event)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
