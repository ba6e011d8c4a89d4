"""Flows that train with the arguments of a JSON file or of a deployment's run, and write how that ended.

As a script: ``python -m tests.support.flow_script <arguments file>``, optionally for a flow run that exists; or
``python -m tests.support.flow_script --serve <name>``, which serves them as deployments.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, serve, task
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.task_runners import ProcessPoolTaskRunner

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    RayCluster,
    S3Storage,
    aelastic_train,
    elastic_train,
    loop,
)
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses
from tests.support.scripted_driver import MODULE


def training(arguments: dict[str, Any]) -> dict[str, Any]:
    """What elastic_train is called with; a storage is a directory, the fields of a bucket, or a saved block.

    A scaling is its fields, or a saved block.
    """
    storage = arguments["storage"]
    scaling = arguments.get("scaling", {})
    cluster = arguments.get("cluster", {})
    if "address" not in cluster:  # it does not wait for CPUs that trainings of other tests use
        cluster = {"num_cpus": os.cpu_count(), **cluster}
    as_they_are = ("run_name", "resume", "timeout_seconds", "worker_runtime_env")
    given = {name: arguments[name] for name in as_they_are if name in arguments}
    if backend := arguments.get("torch_backend"):
        from ray.train.torch import TorchConfig

        given["torch_config"] = TorchConfig(backend=backend)
    if folder := arguments.get("parquet_folder"):
        from ray.train import DataConfig

        given["datasets"] = {"train": lambda: _numbers(folder)}
        given["dataset_config"] = DataConfig(datasets_to_split="all" if arguments.get("splits") else [])
    return {
        "train_loop": arguments.get("loop", "tests.support.loops:hashing_loop"),
        "train_loop_config": arguments.get("config"),
        "framework": arguments.get("framework", "none"),
        # Two cores have better things to do in the tests of something else than to boot a second worker beside each.
        "scaling": ElasticScaling(**{"standby": "off", **scaling}) if isinstance(scaling, dict) else scaling,
        "failures": FailureBudget(**{"driver_restart_delay_seconds": 0.5, **arguments.get("failures", {})}),
        "checkpoints": CheckpointPolicy(**arguments.get("checkpoints", {})),
        "storage": S3Storage(**storage) if isinstance(storage, dict) else storage,
        "cluster": RayCluster(**cluster),
        **given,
    }


def _numbers(folder: str) -> Any:
    """The Ray Data dataset of a folder of Parquet files with a column ``id``."""
    return loop.read_parquet(folder).map_batches(lambda batch: {**batch, "twice": 2 * batch["id"]})


def _begin(arguments: dict[str, Any]) -> None:
    """Write id and process of the flow run for the test to find, and let a script be its driver if it has one."""
    if "script" in arguments:
        TrainingProcesses.driver_command = (sys.executable, "-m", MODULE, arguments["script"])
    if "flow_run_file" in arguments:
        line = json.dumps({"flow_run_id": flow_run.id, "pid": os.getpid(), "at": time.time()})
        with Path(arguments["flow_run_file"]).open("a") as file:
            file.write(line + "\n")


@task(name="user's task")
def train_in_task(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train once, in a task of the user's own."""
    return elastic_train(**training(arguments)).model_dump(mode="json")


@flow(name="fault test subflow", log_prints=True)
def train_in_subflow(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train once, in a flow that another one calls."""
    return elastic_train(**training(arguments)).model_dump(mode="json")


@flow(name="fault test", log_prints=True)
def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train once, where the test wants it."""
    _begin(arguments)
    if arguments.get("die_at_once"):
        os.kill(os.getpid(), 9)
    within = arguments.get("within", "the flow")
    if within == "a submitted task":
        return train_in_task.submit(arguments).result()
    if within == "two trainings at once":
        futures = [elastic_train.submit(**training(arguments)) for _ in range(2)]
        ended = [future.result(raise_on_failure=False) for future in futures]
        raise next(one for one in ended if isinstance(one, Exception))
    if within == "subflows":
        train_in_subflow(arguments)
    if within in ("a subflow", "subflows"):
        return train_in_subflow(arguments)
    call = (lambda **k: elastic_train.submit(**k).result()) if arguments.get("submit") else elastic_train
    return call(**training(arguments)).model_dump(mode="json")


@flow(name="async fault test", log_prints=True)
async def atrain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train once, without holding the event loop."""
    _begin(arguments)
    return (await aelastic_train(**training(arguments))).model_dump(mode="json")


def _run(arguments: dict[str, Any]) -> Any:
    """Run the flow, as a new flow run or as one that exists, and return its final state."""
    chosen: Any = (atrain if arguments.get("asynchronous") else train).with_options(
        timeout_seconds=arguments.get("flow_timeout"),
        **({"task_runner": ProcessPoolTaskRunner(max_workers=2)} if arguments.get("process_pool") else {}),
    )
    existing = None
    if "flow_run_id" in arguments:
        with get_client(sync_client=True) as client:
            existing = client.read_flow_run(UUID(arguments["flow_run_id"]))
    state = run_flow(chosen, flow_run=existing, parameters={"arguments": arguments}, return_type="state")
    return asyncio.run(state) if arguments.get("asynchronous") else state


def main() -> None:
    """Run the flow and write its state, or serve both flows."""
    if sys.argv[1] == "--serve":
        serve(train.to_deployment(sys.argv[2]), atrain.to_deployment(sys.argv[2]), limit=10)  # type: ignore[arg-type]
        return
    arguments = json.loads(Path(sys.argv[1]).read_text())
    state = _run(arguments)
    outcome: dict[str, Any] = {"state": state.type.value, "name": state.name}
    if state.is_completed():
        outcome["result"] = state.result()
    else:
        error = state.result(raise_on_failure=False)
        outcome["error"] = str(error)
        outcome["outcome"] = str(getattr(getattr(error, "outcome", None), "value", ""))
    Path(arguments["result_file"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
