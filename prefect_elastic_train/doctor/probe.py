"""``python -m prefect_elastic_train.doctor.probe <spec file>``: a driver that joins its cluster and trains nothing."""

import os
import sys
from pathlib import Path

import typer

from prefect_elastic_train.core import events
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import read_spec
from prefect_elastic_train.driver.joining import join_cluster


def _send(event: events.Event) -> None:
    typer.echo(f"{events.EVENT_TAG}{events.encode_event(event)}")


if __name__ == "__main__":
    _send(events.ClusterWanted())
    try:
        cluster = join_cluster(read_spec(Path(sys.argv[1])))
    except AttemptFailedError as error:
        _send(events.AttemptEnded(outcome=error.outcome, message=str(error)))
    else:
        amounts = [f"{cluster.resources[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if name in cluster.resources]
        message = f"joined the cluster at {cluster.address}: {', '.join(amounts)}"
        _send(events.AttemptEnded(outcome=Outcome.COMPLETED, message=message))
    os._exit(0)  # Ray's shutdown takes seconds, and the supervisor stops a local head at once
