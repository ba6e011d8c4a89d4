"""The train loop of the tests in a browser: it lasts, and it fails once, for the report that somebody looks at."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from tests.support.loops import write_ledger

#: What the loop fails with, and at which step of its first life.
ERROR, FAILING_STEP = "the disk of rank 0 caught fire", 25
CHECKPOINT_EVERY = 10


def failing_once_loop(config: dict[str, Any]) -> None:
    """Report a falling loss, with a checkpoint every ten steps; rank 0 raises once, and never again.

    Config: ``steps``; ``sleep`` (seconds a step); ``ledger`` (file; one beside it remembers the failure).
    """
    import tempfile

    import ray.train

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    failed = f"{config['ledger']}.failed"
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "step.json")) as file:
            step = json.load(file)["step"]
    resumed_from = step
    while step < config["steps"]:
        step += 1
        time.sleep(config.get("sleep", 0.1))
        if rank == 0 and step == FAILING_STEP and not os.path.exists(failed):
            open(failed, "w").close()
            raise RuntimeError(ERROR)
        write_ledger(config["ledger"], rank=rank, world=world, step=step, resumed_from=resumed_from)
        saved = None
        if step % CHECKPOINT_EVERY == 0 or step == config["steps"]:
            folder = tempfile.mkdtemp()
            if rank == 0:
                with open(os.path.join(folder, "step.json"), "w") as file:
                    json.dump({"step": step}, file)
            saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step, "total_steps": config["steps"], "loss": 1 / step}, checkpoint=saved)
