"""How much of the wall time counts while things die: `python -m benchmarks.goodput`.

The same training under the same seeded schedule of kills: elastic_train; the same with a session and recovery points
every half second, which lets it write fewer checkpoints; raw Ray Train in a shell loop that starts it again; elastic
torchrun in the same shell loop. A worker or the driver is killed (torchrun: its agent), by a Poisson process. A kill
without a living target is left out, and no kill waits for a recovery.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import (
    OURS,
    OURS_POINTS,
    RAW_DEFAULT,
    TORCHRUN,
    Side,
    SideFailedError,
    SideRun,
    Workbench,
    machine_lines,
    markdown_table,
    parse_arguments,
    rotated,
    summary,
    warm_up,
)
from benchmarks.loops import WORKERS, LoopSettings, state_after
from prefect_elastic_train.rehearsal.schedule import DRIVER, WORKER, PlannedFault
from tests.support.schedules import poisson

STEP_SECONDS, CHECKPOINT_EVERY = 0.1, 20
POINTS_EVERY, CHECKPOINT_EVERY_WITH_POINTS = 5, 100
PATIENCE = 6.0
"""A side that takes so many times as long as undisturbed has failed."""
FAILURES = 1000
SIDES = (OURS, OURS_POINTS, RAW_DEFAULT, TORCHRUN)
DRIVERS = {
    "ours": "prefect_elastic_train.driver",
    "ours-points": "prefect_elastic_train.driver",
    "raw": "benchmarks.sides",
    "torchrun": "torch.distributed.run",
}
"""What is in the command line of a side's driver or agent, and of no other process of that side but its workers."""


@dataclass(frozen=True)
class Sample:
    """One run of one side.

    Attributes:
        goodput: Share of the wall time that its steps take at least, from the start of the process; 0 if it failed.
        redone: Steps of rank 0 that were done again.
        step: Median time between two steps without a pause, in seconds.
        start: Seconds from the start of the process to the end of the first step.
        paused: Seconds in all pauses of more than a second between two new steps.
        pause: The longest of them.
        kills: How many processes were killed.
        is_right: Whether the weights are those of an undisturbed training, and all workers have done each step.
    """

    goodput: float
    redone: int
    step: float
    start: float
    paused: float
    pause: float
    kills: int
    is_right: bool


def kill(run: SideRun, side: Side, fault: PlannedFault) -> bool:
    """Kill a process of a side, if there is one of the kind."""
    if fault.kind == WORKER:
        newest = {line.rank: line.pid for line in run.ledger.read()}
        victims = [newest[rank] for rank in sorted(newest) if psutil.pid_exists(newest[rank])]
    else:
        drivers = run.processes_running(DRIVERS[side.entry_point])
        # A younger one is pre-started, or a worker of torchrun.
        victims = [min(drivers, key=psutil.Process.create_time).pid] if drivers else []
    with suppress(psutil.Error):
        victim = psutil.Process(fault.choose(victims)) if victims else None
        # Workers of torchrun outlive their agent, and would train on beside those of the next one.
        own = victim.children(recursive=True) if victim and side.entry_point == "torchrun" else []
        if victim is not None and victim.status() != psutil.STATUS_ZOMBIE:
            for process in [victim, *own]:
                process.kill()
            return True
    return False


def measure(workbench: Workbench, side: Side, steps: int, mean: float, seed: int) -> Sample:
    """Run a side to its end under the schedule of a seed."""
    every = CHECKPOINT_EVERY_WITH_POINTS if side is OURS_POINTS else CHECKPOINT_EVERY
    loop = LoopSettings(steps=steps, step_seconds=STEP_SECONDS, checkpoint_every=every, points_every=POINTS_EVERY)
    most = PATIENCE * steps * STEP_SECONDS
    with workbench.run(side, loop, restart_forever=not side.needs_prefect, failures=FAILURES) as run:
        kills, due = 0, run.started
        for fault in poisson((WORKER, DRIVER), seed, mean):
            due += fault.wait_seconds
            while time.time() < min(due, run.started + most) and not run.has_ended():
                time.sleep(0.1)
            if run.has_ended() or time.time() < due:
                break
            kills += kill(run, side, fault)
        wall = run.wait(timeout=max(60.0, run.started + most - time.time()))
        lines = [line for line in run.ledger.read() if line.rank == 0]
        new, furthest = [run.started], 0
        for line in sorted(lines, key=lambda one: one.at):
            if line.step > furthest:
                new, furthest = [*new, line.at], line.step
        gaps = [after - before for before, after in itertools.pairwise(new)]
        last = run.checkpoints()
        return Sample(
            goodput=steps * STEP_SECONDS / wall,
            redone=len(lines) - furthest,
            step=statistics.median(gaps[1:]),
            start=gaps[0],
            paused=sum(gap for gap in gaps[1:] if gap > 1),
            pause=max(gaps[1:]),
            kills=kills,
            is_right=furthest == steps
            and all(line.world_size == WORKERS for line in lines)
            and bool(last)
            and is_right(last[-1], steps),
        )


def is_right(file: Path, steps: int) -> bool:
    """Whether a checkpoint is that of an undisturbed training."""
    import torch

    saved, undisturbed = torch.load(file, weights_only=True), state_after(steps)
    same = all(torch.equal(saved["model"][name], value) for name, value in undisturbed["model"].items())
    return same and saved["step"] == steps


def targets(samples: dict[str, list[Sample]], mean: float) -> list[str]:
    """The medians against what this project promises."""
    medians = {name: statistics.median(one.goodput for one in taken) for name, taken in samples.items() if taken}
    lines = []
    for side, limit in ((RAW_DEFAULT, 1.25 if mean <= 60 else 1.05), (TORCHRUN, 1.0)):
        if OURS.name in medians and side.name in medians:
            ratio = medians[OURS.name] / medians[side.name]
            verdict = "PASS" if ratio >= limit else "FAIL"
            lines.append(f"- goodput, ours to {side.name}: ratio {ratio:.3f} (>= {limit:g}): {verdict}")
    if OURS_POINTS.name in medians:
        ours, torchrun = medians[OURS_POINTS.name], medians.get(TORCHRUN.name)
        lines.append(f"- goodput, {OURS_POINTS.name}: {ours:.3f} (>= 0.93): {'PASS' if ours >= 0.93 else 'FAIL'}")
        if torchrun is not None:
            above = ours - torchrun
            verdict = "PASS" if above >= 0.08 else "FAIL"
            lines.append(f"- goodput, {OURS_POINTS.name} above {TORCHRUN.name}: {above:.3f} (>= 0.08): {verdict}")
    wrong = sum(not one.is_right for one in samples[OURS.name])
    return [*lines, f"- wrong results of ours: {wrong} (0): {'FAIL' if wrong else 'PASS'}"]


def main() -> int:
    """Measure the sides in turn and print the table and the targets.

    Returns:
        1 if a run failed, else 0. A missed target is printed, not an error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--mean", type=float, default=60.0, help="seconds between two kills, on average (default: 60)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of steps, undisturbed (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the first repeat's schedule (default: 1)")
    arguments = parse_arguments((__doc__ or "").splitlines()[0], [side.name for side in SIDES], parser)
    steps = round(60 * arguments.minutes / STEP_SECONDS / CHECKPOINT_EVERY) * CHECKPOINT_EVERY
    chosen = [side for side in SIDES if side.name in arguments.only]
    samples: dict[str, list[Sample]] = {side.name: [] for side in SIDES}
    failed, load_before = 0, os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=any(side.needs_prefect for side in chosen)) as workbench:
        for repeat in range(arguments.repeats):
            for side in rotated(chosen, repeat):
                try:
                    sample = measure(workbench, side, steps, arguments.mean, arguments.seed + repeat)
                except SideFailedError as error:
                    failed += 1
                    print(f"# {repeat + 1}/{arguments.repeats} {side.name} failed: {error}", flush=True)
                    sample = Sample(
                        goodput=0.0,
                        redone=0,
                        step=math.inf,
                        start=math.inf,
                        paused=0.0,
                        pause=math.inf,
                        kills=0,
                        is_right=False,
                    )
                samples[side.name].append(sample)
                print(f"# {repeat + 1}/{arguments.repeats} {side.name}: {sample}", flush=True)
    print(f"\n{machine_lines('benchmarks.goodput', load_before)}\n")
    print(
        f"{steps} steps of {STEP_SECONDS} s by {WORKERS} workers, a checkpoint every {CHECKPOINT_EVERY}, "
        f"{OURS_POINTS.name} every {CHECKPOINT_EVERY_WITH_POINTS} and a recovery point every {POINTS_EVERY}; "
        f"a kill every {arguments.mean:g} s on average. Median (min–max) of up to {arguments.repeats} runs.\n"
    )
    rows = [
        [
            side.name,
            str(len(taken)),
            summary([one.goodput for one in taken], 3),
            summary([one.kills for one in taken], 0),
            summary([one.redone for one in taken], 0),
            summary([one.step for one in taken], 4),
            summary([one.start for one in taken], 1),
            summary([one.paused for one in taken], 1),
            summary([one.pause for one in taken], 1),
            str(sum(not one.is_right for one in taken)),
        ]
        for side in chosen
        for taken in [samples[side.name]]
    ]
    heads = [
        "side",
        "runs",
        "goodput",
        "kills",
        "steps redone",
        "a step [s]",
        "to the first step [s]",
        "pauses [s]",
        "longest pause [s]",
        "wrong results",
    ]
    print(markdown_table(heads, rows))
    print("\nTargets:")
    print("\n".join(targets(samples, arguments.mean)))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
