"""What a `kill -9` costs: elastic_train against raw Ray Train and torchrun: `python -m benchmarks.recovery`.

In each run of a side a worker is killed, then the driver (torchrun: a worker only). The raw driver is
restarted by a shell loop around the script, as by hand; elastic_train restarts its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.common import (
    OURS,
    POLL_SECONDS,
    RAW_DEFAULT,
    RAW_SAME_POLL,
    TORCHRUN,
    Side,
    SideFailedError,
    SideRun,
    Workbench,
    machine_lines,
    markdown_table,
    parse_arguments,
    ratio_target,
    rotated,
    summary,
    warm_up,
)
from benchmarks.loops import WORKERS, LoopSettings

CHECKPOINT_EVERY = 10
STEP_SECONDS = 0.05
LOOP = LoopSettings(steps=100_000, step_seconds=STEP_SECONDS, checkpoint_every=CHECKPOINT_EVERY)
CHECKPOINTS_BEFORE_KILL = 3

SIDES = (OURS, RAW_DEFAULT, RAW_SAME_POLL, TORCHRUN)
WORKER, DRIVER = "worker", "driver"
ROWS = [f"{case}/{side.name}" for case in (WORKER, DRIVER) for side in SIDES if (case, side) != (DRIVER, TORCHRUN)]
DRIVER_ARGUMENT = {"ours": "prefect_elastic_train.driver", "raw": "benchmarks.sides"}
"""What is in the command line of a side's driver process, and of no other process of that side."""


@dataclass(frozen=True)
class Sample:
    """What one kill cost.

    Attributes:
        seconds: From the kill to the end of the first step by a new process.
        redone: Steps that rank 0 had done before the kill and did again.
        world_size: Number of workers that went on.
    """

    seconds: float
    redone: int
    world_size: int


def kill_and_measure(run: SideRun, side: Side, case: str, after_step: int) -> Sample:
    """Kill a worker or the driver once rank 0 has done `after_step`, and wait for the first new step."""
    run.wait_for_line(lambda line: line.rank == 0 and line.step >= after_step, f"step {after_step}")
    if case == WORKER:
        victim = next(line.pid for line in reversed(run.ledger.read()) if line.rank == WORKERS - 1)
    else:
        drivers = run.processes_running(DRIVER_ARGUMENT[side.entry_point])
        if len(drivers) != 1:
            raise run.failed(f"has {len(drivers)} driver processes instead of one: {drivers}")
        victim = drivers[0].pid
    before = run.ledger.read()
    old = {line.pid for line in before}
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    new = run.wait_for_line(lambda line: line.pid not in old, f"a new step after the kill of the {case}")
    done = max(line.step for line in run.ledger.read() if line.rank == 0 and line.at <= killed_at)
    return Sample(new.at - killed_at, max(0, done - new.step + 1), new.world_size)


def measure(workbench: Workbench, side: Side, cases: list[str], phase: int) -> Iterator[tuple[str, Sample]]:
    """Run a side and kill what `cases` names, one after the other.

    Args:
        workbench: Where to run it.
        side: What to run.
        cases: `WORKER`, `DRIVER` or both.
        phase: Each kill comes so many steps after a checkpoint.

    Yields:
        Each case with what it cost.
    """
    with workbench.run(side, LOOP, restart_forever=side.entry_point == "raw") as run:
        for case in cases:
            lines = run.ledger.read()
            resumed_at = lines[-1].resumed_from if lines else 0
            step = resumed_at + CHECKPOINTS_BEFORE_KILL * CHECKPOINT_EVERY + phase
            yield case, kill_and_measure(run, side, case, step)


def phases(repeats: int) -> list[int]:
    """Moments of the kills in steps after a checkpoint, spread evenly over the checkpoint interval."""
    return [int((repeat + 0.5) * CHECKPOINT_EVERY / repeats) for repeat in range(repeats)]


def targets(samples: dict[str, list[Sample]]) -> list[str]:
    """The medians against what this project promises."""
    seconds = defaultdict(list, {row: [sample.seconds for sample in taken] for row, taken in samples.items()})
    redone = defaultdict(list, {row: [float(sample.redone) for sample in taken] for row, taken in samples.items()})
    lines = []
    for case, baseline, limit in ((WORKER, RAW_DEFAULT, 0.8), (DRIVER, RAW_DEFAULT, 0.75)):
        ours, other = f"{case}/{OURS.name}", f"{case}/{baseline.name}"
        lines.append(ratio_target(f"recovery [s], {ours} to {other}", seconds[ours], seconds[other], limit))
    for case in (WORKER, DRIVER):
        ours, other = f"{case}/{OURS.name}", f"{case}/{RAW_SAME_POLL.name}"
        lines.append(ratio_target(f"steps redone, {ours} to {other}", redone[ours], redone[other], limit=1))
    return lines


def main() -> int:
    """Measure the sides in turn and print the table and the targets.

    Returns:
        1 if a run failed, else 0. A missed target is printed, not an error.
    """
    arguments = parse_arguments((__doc__ or "").splitlines()[0], ROWS)
    cases = {side: [case for case in (WORKER, DRIVER) if f"{case}/{side.name}" in arguments.only] for side in SIDES}
    chosen = [side for side in SIDES if cases[side]]
    samples: dict[str, list[Sample]] = defaultdict(list)
    failed = 0
    load_before = os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=OURS in chosen) as workbench:
        for repeat, phase in enumerate(phases(arguments.repeats)):
            for side in rotated(chosen, repeat):
                progress = f"# {repeat + 1}/{arguments.repeats}"
                try:
                    for case, sample in measure(workbench, side, cases[side], phase):
                        samples[f"{case}/{side.name}"].append(sample)
                        print(f"{progress} {case}/{side.name}: {sample}", flush=True)
                except SideFailedError as error:
                    failed += 1
                    print(f"{progress} {side.name} failed: {error}", flush=True)
    print(f"\n{machine_lines('benchmarks.recovery', load_before)}\n")
    print(
        f"{WORKERS} workers, steps of {STEP_SECONDS:g} s, a checkpoint every {CHECKPOINT_EVERY} steps. "
        f"Median (min–max) of up to {arguments.repeats} kills; same poll is {POLL_SECONDS} s.\n"
    )
    rows = [
        [
            row,
            str(len(samples[row])),
            summary([sample.seconds for sample in samples[row]]),
            summary([sample.redone for sample in samples[row]], digits=0),
            ", ".join(map(str, sorted({sample.world_size for sample in samples[row]}))),
        ]
        for row in ROWS
        if row in arguments.only
    ]
    header = ["killed/side", "kills", "to the first new step [s]", "steps redone", "workers after"]
    print(markdown_table(header, rows))
    print("\nTargets:")
    print("\n".join(targets(samples)))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
