"""A training's run in Weights & Biases, with the training's ``run_id`` as its id."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .tracked_run import Row

#: Command that prints the state of a run by a file of W&B as JSON.
_INSPECT = (sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json")


class Backend:
    """A run in W&B, online or offline. ``options`` are arguments of ``wandb.init``. See :attr:`TrackedRun.backend`."""

    def __init__(self, ids: Mapping[str, str], parameters: Mapping[str, Any], dir: str, **options: Any) -> None:
        import wandb

        # A process that is offline begins at step 0, and W&B does not read what processes before it have written.
        files = Path(dir).glob(f"wandb/offline-run-*-{ids['run_id']}/*.wandb")
        steps = [json.loads(subprocess.check_output([*_INSPECT, file]))["step"] or 0 for file in files]
        Path(dir).mkdir(parents=True, exist_ok=True)
        fixed = {"dir": dir, "id": ids["run_id"], "resume": "allow", "reinit": "create_new"}
        run = self._run = wandb.init(
            config={"elastic_train": ids, **parameters},
            settings=wandb.Settings(console="off", silent=True),
            **({"name": ids["run_name"], "project": "elastic-train"} | options | fixed),
        )
        self.link = run.dir if run.offline else run.url
        last = max(run.step - 1, *steps, 0)
        self.last = defaultdict[str, int](lambda: last)

    def log(self, rows: Sequence[Row], checkpoint: str) -> None:
        for step, at, metrics in rows:
            self._run.log({**metrics, "_timestamp": at}, step)
        self._run.summary["checkpoint"] = checkpoint

    def finish(self, status: str, checkpoint: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", "checkpoint")
        with suppress(ValueError):  # W&B refuses a folder that this node does not have, and an empty URI
            artifact.add_reference(checkpoint if "://" in checkpoint else f"file://{checkpoint}", checksum=False)
            self._run.log_artifact(artifact)
        self._run.finish(int(status != "FINISHED"))
