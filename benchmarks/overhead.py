"""What elastic_train costs while nothing fails, against raw Ray Train: `python -m benchmarks.overhead`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from benchmarks.common import (
    OURS,
    POLL_SECONDS,
    RAW_DEFAULT,
    RAW_SAME_POLL,
    Side,
    SideFailedError,
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
from benchmarks.sides import NO_STANDBY

REPORTS = 20
RATES = "rates"
"""What `--only` calls the steps a second beside standby workers."""
UNTHROTTLED_REPORTS = 5
"""The first reports only fill queues, so the time per report is taken after them."""

BUSY = LoopSettings(steps=3200, step_seconds=0.0, checkpoint_every=50, work_seconds=0.03)
"""Keeps a core busy with each worker, so that a standby worker which takes processor time costs steps."""
BUSY_FROM_SECONDS = 85.0
"""Standby workers and the pre-started driver are ready by then: they start from the tenth second on."""
BARE = Side("ours-no-standby", "ours", {NO_STANDBY: "1"}, needs_prefect=True)

LOOP = LoopSettings(steps=REPORTS, step_seconds=0.0, checkpoint_every=1)
SIDES = (OURS, RAW_DEFAULT, RAW_SAME_POLL)


@dataclass(frozen=True)
class Sample:
    """One run of one side, in seconds: to the first step, for each report, and for the whole process."""

    first_step: float
    report: float
    wall: float


def measure(workbench: Workbench, side: Side) -> Sample:
    """Run a side from a fresh process to its end."""
    with workbench.run(side, LOOP) as run:
        wall = run.wait()
        times = [line.at for line in run.ledger.read() if line.rank == 0]
        if len(times) != REPORTS:
            raise run.failed(f"did {len(times)} steps instead of {REPORTS}")
        throttled = times[UNTHROTTLED_REPORTS:]
        per_report = (throttled[-1] - throttled[0]) / (len(throttled) - 1)
        return Sample(times[0] - run.started, per_report, wall)


def measure_rate(workbench: Workbench, side: Side) -> float:
    """Steps a second of a loop that keeps all cores busy, beside standby workers that are parked."""
    with workbench.run(side, BUSY) as run:
        run.wait(timeout=300.0)
        times = [line.at for line in run.ledger.read() if line.rank == 0]
        booting = [at for at in times if 10.0 <= at - times[0] < BUSY_FROM_SECONDS]
        late = [at for at in times if at - times[0] >= BUSY_FROM_SECONDS]
        print(
            f"#   from the tenth second until then {len(booting) / (BUSY_FROM_SECONDS - 10.0):.2f} steps/s", flush=True
        )
        return (len(late) - 1) / (late[-1] - late[0])


def targets(samples: dict[str, list[Sample]], rates: dict[str, list[float]]) -> list[str]:
    """The medians against what this project promises."""
    first_steps = {name: [sample.first_step for sample in taken] for name, taken in samples.items()}
    reports = {name: [sample.report for sample in taken] for name, taken in samples.items()}
    walls = {name: [sample.wall for sample in taken] for name, taken in samples.items()}
    return [
        ratio_target(
            "to the first step [s], ours to raw-default", first_steps[OURS.name], first_steps[RAW_DEFAULT.name], 0.65
        ),
        ratio_target(
            "steps a second without standby workers to with them", rates[BARE.name], rates[OURS.name], 1 / 0.99
        ),
        ratio_target(
            "time per report with checkpoint [s], ours to raw-default",
            reports[OURS.name],
            reports[RAW_DEFAULT.name],
            limit=0.1,
        ),
        ratio_target(
            "end to end [s], ours to raw-same-poll, Prefect server already running",
            walls[OURS.name],
            walls[RAW_SAME_POLL.name],
            limit=1.05,
            extra=3,
        ),
    ]


def main() -> int:
    """Measure the sides in turn and print the table and the targets.

    Returns:
        1 if a run failed, else 0. A missed target is printed, not an error.
    """
    arguments = parse_arguments(__doc__ or "", [*(side.name for side in SIDES), RATES])
    chosen = [side for side in SIDES if side.name in arguments.only]
    samples: dict[str, list[Sample]] = {side.name: [] for side in SIDES}
    rates: dict[str, list[float]] = {side.name: [] for side in (OURS, BARE)}
    failed = 0
    load_before = os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=OURS in chosen or RATES in arguments.only) as workbench:
        for repeat in range(arguments.repeats):
            for side in rotated(chosen, repeat) if chosen else ():
                try:
                    sample = measure(workbench, side)
                except SideFailedError as error:
                    failed += 1
                    print(f"# {repeat + 1}/{arguments.repeats} {side.name} failed: {error}", flush=True)
                    continue
                samples[side.name].append(sample)
                print(f"# {repeat + 1}/{arguments.repeats} {side.name}: {sample}", flush=True)
            for side in rotated((OURS, BARE), repeat) if RATES in arguments.only else ():
                rates[side.name].append(measure_rate(workbench, side))
                print(f"# {repeat + 1}/{arguments.repeats} {side.name}: {rates[side.name][-1]:.3f} steps/s", flush=True)
    print(f"\n{machine_lines('benchmarks.overhead', load_before)}\n")
    print(
        f"{WORKERS} workers, {REPORTS} reports with a checkpoint each. Median (min–max) in seconds of up to "
        f"{arguments.repeats} runs, each in a fresh process; same poll is {POLL_SECONDS} s.\n"
    )
    rows = [
        [
            side.name,
            str(len(samples[side.name])),
            summary([sample.first_step for sample in samples[side.name]]),
            summary([sample.report for sample in samples[side.name]], digits=3),
            summary([sample.wall for sample in samples[side.name]]),
        ]
        for side in chosen
    ]
    print(markdown_table(["side", "runs", "to the first step", "per report", "end to end"], rows))
    print()
    print(markdown_table(["busy side", "steps a second"], [[name, summary(taken, 3)] for name, taken in rates.items()]))
    print("\nTargets:")
    print("\n".join(targets(samples, rates)))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
