"""``python -m prefect_elastic_train.doctor.probe <spec file>``: joins a cluster as a driver does, and says what it has.

A process of its own, since Ray takes its token and much else from the environment, and ends the process that loses its
head.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.spec import read_spec
from prefect_elastic_train.driver.joining import connect

__all__ = ["ANSWER_TAG", "main"]

#: What the line with the answer begins with.
ANSWER_TAG = "@elastic-train-probe "


def main(arguments: list[str]) -> int:
    """Join, and print the cluster's resources, or what keeps a driver from joining."""
    spec = read_spec(Path(arguments[0]))
    try:
        address, _, resources = connect(spec)
    except AttemptFailedError as error:
        _answer(problem=str(error))
        return 1
    _answer(address=address, resources=resources)
    import ray

    if spec.cluster.is_local:  # it is ended in a moment
        os._exit(0)
    ray.shutdown()
    return 0


def _answer(**answer: object) -> None:
    sys.stdout.write(f"{ANSWER_TAG}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
