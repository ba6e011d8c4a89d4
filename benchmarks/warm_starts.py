"""Measure what forked workers, standby workers and the pre-started driver save: `python -m benchmarks.warm_starts`.

The sides differ in their warm starts. In one run of each side, a worker is killed several times, then the driver.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import nullcontext

from benchmarks.cluster import GrowingCluster
from benchmarks.common import (
    Side,
    SideFailedError,
    SideRun,
    Workbench,
    machine_lines,
    markdown_table,
    parse_arguments,
    summary,
    warm_up,
)
from benchmarks.loops import WORKERS, LoopSettings
from benchmarks.recovery import DRIVER, STEP_SECONDS, WORKER, kill_and_measure
from benchmarks.sides import FORK, NO_STANDBY, PRESTART

CHECKPOINT_EVERY = 10
WARM_SECONDS = 30.0
"""Training time of each worker group before the next kill: standbys have booted, and the next driver has started."""
FIRST_STEP = "first step"
CASES = [FIRST_STEP, WORKER, DRIVER]


def _side(name: str, *variables: str) -> Side:
    return Side(name, "ours-warm", dict.fromkeys(variables, "1"), needs_prefect=True)


LOCAL = [
    _side("local: forked, pre-started", FORK, PRESTART),
    _side("local: forked", FORK, NO_STANDBY),
    _side("local: standbys, pre-started", PRESTART),
    _side("local: none", NO_STANDBY),
]
JOINED = [
    _side("joined: standbys, pre-started", PRESTART),
    _side("joined: standbys"),
    _side("joined: none", NO_STANDBY),
]
SIDES = LOCAL + JOINED


def measure(workbench: Workbench, side: Side, kills: int, cluster: GrowingCluster | None) -> dict[str, list[float]]:
    """Return the seconds to the first step, and those from each kill to the first new step."""
    loop = LoopSettings(steps=100_000, step_seconds=STEP_SECONDS, checkpoint_every=CHECKPOINT_EVERY)
    seconds: dict[str, list[float]] = defaultdict(list)
    with workbench.run(side, loop, cluster=cluster, failures=2 * kills) as run:
        first = run.wait_for_line(lambda line: True, "the first step")
        seconds[FIRST_STEP].append(first.at - run.started)
        for case in [WORKER] * kills + [DRIVER] * kills:
            seconds[case].append(_kill_when_warm(run, side, case))
    return seconds


def _kill_when_warm(run: SideRun, side: Side, case: str) -> float:
    warm_at = time.time() + WARM_SECONDS
    is_due = lambda line: line.rank == 0 and line.at > warm_at and line.step % CHECKPOINT_EVERY == 5  # noqa: E731
    return kill_and_measure(run, side, case, is_due).seconds


def main() -> int:
    """Measure the sides one after the other and print the table.

    Returns:
        1 if a run failed, else 0.
    """
    names = [side.name for side in SIDES]
    arguments = parse_arguments((__doc__ or "").splitlines()[0], names)
    chosen = [side for side in SIDES if side.name in arguments.only]
    samples: dict[str, dict[str, list[float]]] = {}
    load_before = os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=True) as workbench:
        for side in chosen:
            with workbench.cluster() if side in JOINED else nullcontext() as cluster:
                for _ in range(WORKERS if cluster else 0):
                    cluster.add_node()
                try:
                    samples[side.name] = measure(workbench, side, arguments.repeats, cluster)
                    print(f"# {side.name}: {dict(samples[side.name])}", flush=True)
                except SideFailedError as error:
                    print(f"# {side.name} failed: {error}", flush=True)
    print(f"\n{machine_lines('benchmarks.warm_starts', load_before)}\n")
    rows = [[name, *(summary(seconds[case]) for case in CASES)] for name, seconds in samples.items()]
    header = ["warm starts", "to the first step [s]", "worker killed [s]", "driver killed [s]"]
    print(markdown_table(header, rows))
    return int(len(samples) < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
