"""What a `kill -9` costs: elastic_train against raw Ray Train and torchrun: `python -m benchmarks.recovery`.

In each run of a side a worker is killed, then the driver (torchrun: a worker only). The raw driver is
restarted by a shell loop around the script, as by hand; elastic_train restarts its own. Where a node is lost, the side
trains on a cluster of two.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import psutil

from benchmarks.cluster import KILL, GrowingCluster
from benchmarks.common import (
    OURS,
    OURS_POINTS,
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
    phases,
    ratio_target,
    rotated,
    summary,
    warm_up,
)
from benchmarks.loops import WORKERS, LedgerLine, LoopSettings

DEFAULT_CHECKPOINT_EVERY = 10
STEP_SECONDS = 0.05
WARM_SECONDS = {"worker": 45.0, "driver": 75.0, "node": 45.0}
"""Seconds of training before a worker, driver or node of ours is killed. By then its standby workers, or its
pre-started driver, are ready."""
PEER_WARM_SECONDS = 20.0
"""The same for Ray Train and torchrun, which start nothing in advance."""

SIDES = (OURS, OURS_POINTS, RAW_DEFAULT, RAW_SAME_POLL, TORCHRUN)
WORKER, DRIVER, NODE = "worker", "driver", "node"
RAW_ON_NODES = Side("raw-default", "raw-growing")
ROWS = [f"{case}/{side.name}" for case in (WORKER, DRIVER) for side in SIDES if (case, side) != (DRIVER, TORCHRUN)]
ROWS += [f"{NODE}/{side.name}" for side in (OURS, OURS_POINTS, RAW_ON_NODES)]
DRIVER_ARGUMENT = {
    "ours": "prefect_elastic_train.driver",
    "ours-points": "prefect_elastic_train.driver",
    "ours-warm": "prefect_elastic_train.driver",
    "raw": "benchmarks.sides",
}
"""What is in the command line of a side's driver process, and of no other process of that side."""


@dataclass(frozen=True)
class Sample:
    """What one kill cost.

    Attributes:
        seconds: From the kill to the end of the first step by a new process.
        redone: Steps that rank 0 did twice, whether the old process had done them before the kill or after it.
        old_ran_on: From the kill to the end of the last step by an old process of rank 0; 0 if there was none.
        world_size: Number of workers that went on.
        parts: What the seconds went to, in order; of ours, which notes it in the run's history.
    """

    seconds: float
    redone: int
    old_ran_on: float
    world_size: int
    parts: dict[str, float] = field(default_factory=dict)


def kill_and_measure(
    run: SideRun, side: Side, case: str, is_due: Callable[[LedgerLine], bool], cluster: GrowingCluster | None = None
) -> Sample:
    """Kill a worker, the driver or a node of `cluster` once a step `is_due`, and wait for the first new step."""
    run.wait_for_line(is_due, f"the step to kill the {case} after")
    if case == WORKER:
        victim = next(line.pid for line in reversed(run.ledger.read()) if line.rank == WORKERS - 1)
        kill = partial(os.kill, victim, signal.SIGKILL)
    elif cluster is not None:
        kill = partial(cluster.take_node, KILL)
    else:
        drivers = run.processes_running(DRIVER_ARGUMENT[side.entry_point])
        if not drivers:
            raise run.failed("has no driver process")
        victim = min(drivers, key=psutil.Process.create_time).pid  # a younger one is pre-started
        kill = partial(os.kill, victim, signal.SIGKILL)
    before = run.ledger.read()
    old = {line.pid for line in before}
    killed_at = time.time()
    kill()
    new = run.wait_for_line(lambda line: line.pid not in old, f"a new step after the kill of the {case}")
    last = max((line for line in run.ledger.read() if line.rank == 0 and line.pid in old), key=lambda line: line.at)
    return Sample(
        seconds=new.at - killed_at,
        redone=max(0, last.step - new.step + 1),
        old_ran_on=max(0.0, last.at - killed_at),
        world_size=new.world_size,
        parts=parts_of(run, killed_at, new.at) if side.needs_prefect else {},
    )


def parts_of(run: SideRun, killed_at: float, new_at: float) -> dict[str, float]:
    """What the seconds from a kill to the first new step went to, by the run's history."""
    time.sleep(2.0)  # it is written now and then
    events = [event for event in run.history() if event["at"] > killed_at]
    found = {event["kind"]: event for event in reversed(events)}  # the first of each kind
    started = found["worker_group_started"]
    since, parts = killed_at, dict[str, float]()
    attempt, failed = found.get("attempt_started"), found.get("worker_failed")
    begun_at = started["at"] - sum(started["parts"].values())
    marks = [("detection", failed["at"])] if failed else []
    if attempt:
        marks = [("the driver's process", attempt["driver_started_at"]), ("joining, fence", attempt["at"])]
        marks += [("the controller's process", begun_at)]
    for name, at in marks:
        parts[name], since = at - since, at
    return parts | started["parts"] | {"restore, first step": new_at - started["at"]}


def measure(
    workbench: Workbench, side: Side, cases: list[str], phase: int, checkpoint_every: int, upload_seconds: float
) -> Iterator[tuple[str, Sample]]:
    """Run a side and kill what `cases` names, one after the other.

    Args:
        workbench: Where to run it.
        side: What to run.
        cases: Any of `WORKER`, `DRIVER` and `NODE`.
        phase: Each kill comes so many steps after a checkpoint.
        checkpoint_every: Steps from one checkpoint to the next.
        upload_seconds: Time by which each upload of a checkpoint takes longer.

    Yields:
        Each case with what it cost.
    """

    def is_due(line: LedgerLine) -> bool:
        is_warm = line.at >= warm_at and line.world_size == WORKERS
        return line.rank == 0 and is_warm and line.step % checkpoint_every == phase % checkpoint_every

    loop = LoopSettings(
        steps=100_000,
        step_seconds=STEP_SECONDS,
        checkpoint_every=checkpoint_every,
        upload_seconds=upload_seconds,
    )
    with workbench.run(side, loop, restart_forever=side.entry_point == "raw") as run:
        for case in [case for case in cases if case != NODE]:
            run.wait_for_line(lambda line: True, "the first step")
            warm_at = time.time() + (WARM_SECONDS[case] if side.needs_prefect else PEER_WARM_SECONDS)
            yield case, kill_and_measure(run, side, case, is_due)
    if NODE in cases:
        on_nodes = RAW_ON_NODES if side is RAW_DEFAULT else side
        with workbench.cluster() as cluster:
            cluster.add_node()
            cluster.add_node()
            with workbench.run(on_nodes, loop, cluster=cluster) as run:
                run.wait_for_line(lambda line: True, "the first step")
                warm_at = time.time() + (WARM_SECONDS[NODE] if side.needs_prefect else PEER_WARM_SECONDS)
                yield NODE, kill_and_measure(run, on_nodes, NODE, is_due, cluster)


def targets(samples: dict[str, list[Sample]]) -> list[str]:
    """The medians against what this project promises."""
    seconds = defaultdict(list, {row: [sample.seconds for sample in taken] for row, taken in samples.items()})
    redone = defaultdict(list, {row: [float(sample.redone) for sample in taken] for row, taken in samples.items()})
    lines = []
    for case, baseline, limit in ((WORKER, TORCHRUN, 0.5), (WORKER, RAW_DEFAULT, 0.2), (DRIVER, RAW_DEFAULT, 0.3)):
        ours, other = f"{case}/{OURS.name}", f"{case}/{baseline.name}"
        lines.append(ratio_target(f"recovery [s], {ours} to {other}", seconds[ours], seconds[other], limit))
    for case in (WORKER, DRIVER):
        ours, other = f"{case}/{OURS.name}", f"{case}/{RAW_SAME_POLL.name}"
        lines.append(redone_target(f"steps redone, mean, {ours} to {other}", redone[ours], redone[other]))
    for case in (WORKER, DRIVER, NODE):
        if taken := samples.get(f"{case}/{OURS_POINTS.name}"):
            worst = max(sample.redone for sample in taken)
            verdict = "PASS" if worst <= 1 else "FAIL"
            lines.append(f"- steps redone, worst, {case}/{OURS_POINTS.name}: {worst} (<= 1): {verdict}")
    return lines


def redone_target(what: str, ours: list[float], other: list[float]) -> str:
    """One line that holds the means against each other.

    The kills come at moments that are spread over the checkpoint interval, so each single value is one of a
    saw-tooth and only the mean says what a kill costs. Ours may be above by the standard error of the other.
    """
    if len(ours) < 2 or len(other) < 2:
        return f"- {what}: not measured (takes two kills each)"
    mine, theirs = statistics.mean(ours), statistics.mean(other)
    error = statistics.stdev(other) / len(other) ** 0.5
    verdict = "PASS" if mine <= theirs + error else "FAIL"
    return f"- {what}: {mine:.1f} to {theirs:.1f} (<= that and its standard error, {error:.1f}): {verdict}"


def main() -> int:
    """Measure the sides in turn and print the table and the targets.

    Returns:
        1 if a run failed, else 0. A missed target is printed, not an error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=DEFAULT_CHECKPOINT_EVERY,
        help=f"steps of {STEP_SECONDS:g} s from one checkpoint to the next (default: {DEFAULT_CHECKPOINT_EVERY})",
    )
    parser.add_argument(
        "--upload-seconds",
        type=float,
        default=0.0,
        help="by which each upload of ours-points takes longer (default: 0)",
    )
    parser.add_argument(
        "--peer-repeats", type=int, help="runs of raw Ray Train and torchrun (default: as of the others)"
    )
    arguments = parse_arguments((__doc__ or "").splitlines()[0], ROWS, parser)
    every: int = arguments.checkpoint_every
    if every < 1:
        parser.error(f"--checkpoint-every {every}: must be at least 1")
    cases = {
        side: [case for case in (WORKER, DRIVER, NODE) if f"{case}/{side.name}" in arguments.only] for side in SIDES
    }
    chosen = [side for side in SIDES if cases[side]]
    samples: dict[str, list[Sample]] = defaultdict(list)
    failed = 0
    load_before = os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=any(side.needs_prefect for side in chosen)) as workbench:
        for repeat in range(arguments.repeats):
            for side in rotated(chosen, repeat):
                repeats = arguments.repeats if side.needs_prefect else arguments.peer_repeats or arguments.repeats
                if repeat >= repeats:
                    continue
                phase = phases(repeats, every)[repeat]
                progress = f"# {repeat + 1}/{arguments.repeats}"
                try:
                    for case, sample in measure(workbench, side, cases[side], phase, every, arguments.upload_seconds):
                        samples[f"{case}/{side.name}"].append(sample)
                        print(f"{progress} {case}/{side.name}: {sample}", flush=True)
                except SideFailedError as error:
                    failed += 1
                    print(f"{progress} {side.name} failed: {error}", flush=True)
    print(f"\n{machine_lines('benchmarks.recovery', load_before)}\n")
    print(
        f"{WORKERS} workers, steps of {STEP_SECONDS:g} s, a checkpoint every {every} steps. "
        f"Median (min–max) of up to {arguments.repeats} kills; same poll is {POLL_SECONDS} s.\n"
    )
    rows = [
        [
            row,
            str(len(samples[row])),
            summary([sample.seconds for sample in samples[row]]),
            summary([sample.redone for sample in samples[row]], digits=0),
            summary([sample.old_ran_on for sample in samples[row]]),
            ", ".join(map(str, sorted({sample.world_size for sample in samples[row]}))),
        ]
        for row in ROWS
        if row in arguments.only
    ]
    header = [
        "killed/side",
        "kills",
        "to the first new step [s]",
        "steps redone",
        "old rank 0 ran on [s]",
        "workers after",
    ]
    print(markdown_table(header, rows))
    for row in [f"{case}/{side.name}" for side in (OURS, OURS_POINTS) for case in (WORKER, DRIVER, NODE)]:
        taken = samples[row]
        parts = dict.fromkeys(part for sample in taken for part in sample.parts)
        rows = [[part, summary([sample.parts.get(part, 0.0) for sample in taken])] for part in parts]
        print(f"\n{markdown_table([f'What the seconds of {row} went to', '[s]'], rows)}")
    print("Targets:")
    print("\n".join(targets(samples)))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
