"""Deployments of the flows that the tests disturb: ``python -m tests.support.served_flows <name>``."""

from __future__ import annotations

import sys

from prefect import serve

from tests.support.flow_script import atrain, train

if __name__ == "__main__":
    name = sys.argv[1]
    serve(train.to_deployment(name), atrain.to_deployment(name), limit=10)  # type: ignore[arg-type]
