"""``python -m prefect_elastic_train.doctor.probe <spec file>``: a driver that joins its cluster, and trains nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prefect_elastic_train.core import events
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import read_spec
from prefect_elastic_train.driver.fit import connect


def _tell(event: events.Event) -> None:
    sys.stdout.write(f"{events.EVENT_TAG}{events.encode_event(event)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _tell(events.ClusterWanted())
    try:
        address, _, resources = connect(read_spec(Path(sys.argv[1])))
    except AttemptFailedError as error:
        _tell(events.AttemptEnded(outcome=error.outcome, message=str(error)))
    else:
        _tell(events.ClusterConnected(address=address, resources=resources))
        _tell(events.AttemptEnded(outcome=Outcome.COMPLETED))
    os._exit(0)  # Ray's own goodbye takes seconds, and a local head is ended in a moment
