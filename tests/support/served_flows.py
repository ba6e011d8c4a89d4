"""Deployments of the flows that the tests disturb: ``python -m tests.support.served_flows``."""

from __future__ import annotations

from prefect import serve

from tests.support.flow_script import atrain, train

if __name__ == "__main__":
    serve(train.to_deployment("served"), atrain.to_deployment("served"), limit=10)  # type: ignore[arg-type]
