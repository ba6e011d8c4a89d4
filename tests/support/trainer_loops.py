"""The train loop of a code block of the documentation, killed where a test wants."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
from pathlib import Path
from typing import Any


def disturbed(config: dict[str, Any]) -> None:
    """Run ``train_loop`` of a file, and write a digest of the weights that each rank has in the end.

    Config: ``file``; ``folder``, for the digests; ``kills``, each a number of done steps, a rank and a moment, which is
    ``training``, ``evaluation`` or ``after evaluation``; the rest is the loop's.
    """
    import ray.train
    import torch

    from prefect_elastic_train.loop import training_session

    torch.set_num_threads(1)
    rank, models, evaluated = ray.train.get_context().get_world_rank(), list[Any](), list[int]()

    def look(module: Any, *_: Any) -> None:
        models.append(module)
        models[:] = [max(models, key=lambda one: sum(part.numel() for part in one.parameters()))]
        moment = "evaluation" if not module.training else "after evaluation" if evaluated else "training"
        evaluated[:] = [] if module.training else [1]
        session = training_session.current
        for done, of, when in config.get("kills", ()):
            mark = Path(config["folder"], f"killed-{done}-{of}-{when.replace(' ', '-')}")
            if session and session.done >= done and (rank, moment) == (of, when) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    torch.nn.modules.module.register_module_forward_pre_hook(look)
    runpy.run_path(config["file"], run_name="of_the_page")["train_loop"](config)
    # Of the module in DistributedDataParallel, if it is in one.
    weights = [one.detach().numpy().tobytes() for one in models[0].state_dict().values()]
    Path(config["folder"], f"weights-{rank}.json").write_text(json.dumps(hashlib.sha256(b"".join(weights)).hexdigest()))


def boosted(config: dict[str, Any]) -> None:
    """Run ``train_loop`` of a file, which reports each round of boosting.

    Config: ``file``; ``folder``, for marks; ``kills``, each a number of reports in a worker process and a rank; the
    rest is the loop's.
    """
    import ray.train

    rank, report, reports = ray.train.get_context().get_world_rank(), ray.train.report, []

    def report_or_die(*arguments: Any, **options: Any) -> None:
        report(*arguments, **options)
        reports.append(1)
        mark = Path(config["folder"], f"killed-{len(reports)}-{rank}")
        if [len(reports), rank] in config.get("kills", ()) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    ray.train.report = report_or_die
    runpy.run_path(config["file"], run_name="of_the_page")["train_loop"](config)
