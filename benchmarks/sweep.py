"""Measure a sweep with `elastic_train.map` against the same trainings one by one: `python -m benchmarks.sweep`.

Each trains one worker on a local cluster, with a loop that keeps one core busy. Prefect uses its configured API.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

from prefect import flow

from prefect_elastic_train import elastic_train

LOOP = "benchmarks.sweep:busy_loop"


def busy_loop(config: dict[str, Any]) -> None:
    """Use one core for about ``seconds`` of processor time, and report ten times."""
    import ray.train

    for step in range(1, 11):
        until = time.process_time() + config["seconds"] / 10
        while time.process_time() < until:
            pass
        ray.train.report({"step": step, "total_steps": 10})


def main() -> None:
    """Run both sides once, and print their seconds and end states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="processor time of each training's loop")
    arguments = parser.parse_args()

    @flow
    def sweep(at_once: bool, storage: str) -> list[str]:
        options: dict[str, Any] = {"framework": "none", "storage": storage}
        configs = [{"seconds": arguments.seconds}] * arguments.trainings
        if at_once:
            futures = elastic_train.map(LOOP, train_loop_config=configs, run_name="sweep", **options)
            return [f"Completed: {result.metrics}" for result in futures.result()]
        for number, config in enumerate(configs):
            elastic_train(LOOP, train_loop_config=config, run_name=f"single-{number}", **options)
        return ["Completed"] * len(configs)

    seconds = []
    for at_once in (False, True):
        with tempfile.TemporaryDirectory() as storage:
            began = time.monotonic()
            states = sweep(at_once, storage)
            seconds.append(time.monotonic() - began)
        print(f"{'map' if at_once else 'one after the other'}: {seconds[-1]:.1f} s, {states}", flush=True)
    print(f"map / one after the other: {seconds[1] / seconds[0]:.2f}, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
