"""A flow that trains with the arguments of a JSON file, and writes how it ended into another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    RayCluster,
    elastic_train,
)


@flow(name="fault test", log_prints=True)
def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train once."""
    call = (lambda *a, **k: elastic_train.submit(*a, **k).result()) if arguments.get("submit") else elastic_train
    result = call(
        arguments.get("loop", "tests.support.loops:ledger_loop"),
        train_loop_config=arguments.get("config"),
        framework=arguments.get("framework", "torch"),
        scaling=ElasticScaling(**arguments.get("scaling", {"min_workers": 2, "max_workers": 2})),
        failures=FailureBudget(**{"driver_restart_delay_seconds": 0.5, **arguments.get("failures", {})}),
        checkpoints=CheckpointPolicy(**arguments.get("checkpoints", {})),
        storage=LocalStorage(path=arguments["storage"]),
        cluster=RayCluster(**arguments.get("cluster", {})),
        run_name=arguments.get("run_name"),
        resume=arguments.get("resume", False),
        resume_from=arguments.get("resume_from"),
    )
    return result.model_dump(mode="json")


def main() -> None:
    """Run the flow and write its state."""
    arguments = json.loads(Path(sys.argv[1]).read_text())
    state = train(arguments, return_state=True)
    outcome: dict[str, Any] = {"state": state.type.value, "name": state.name, "message": state.message or ""}
    if state.is_completed():
        outcome["result"] = state.result()
    else:
        error = state.result(raise_on_failure=False)
        outcome["error"] = str(error)
        outcome["outcome"] = str(getattr(getattr(error, "outcome", None), "value", ""))
    Path(arguments["result_file"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
