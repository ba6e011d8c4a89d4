"""Plain Ray Train, without anything of the package around the loop.

As a script: trains as a JSON file on the command line says, one training after the other, in a cluster that is there.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def train(training: dict[str, Any]) -> str:
    """Train, and return what it failed of."""
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        getattr(import_module("tests.support.session_loops"), training["loop"]),
        train_loop_config=training["config"],
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=training["name"],
            storage_path=training["storage"],
            failure_config=ray.train.FailureConfig(max_failures=training.get("max_failures", 0)),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        return str(error)
    return ""


def main() -> None:
    """Train, and write the error of each training."""
    import ray

    address, file = sys.argv[1:]
    # Ray's cleaner of placement groups would otherwise ask the cluster that was started last on this machine.
    ray.init(address, runtime_env={"env_vars": {"RAY_ADDRESS": address}}, log_to_driver=False)
    errors = [train(training) for training in json.loads(Path(file).read_text())]
    Path(file).with_suffix(".errors").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
