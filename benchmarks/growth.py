"""What it costs when a node comes, and when one goes, against raw Ray Train: `python -m benchmarks.growth`.

One worker trains on a Ray cluster that then gets a second node, which later goes again: it is announced that it does,
or, in every other repeat, it is just gone. The loop that asks is the plain
loop with one question a step, `prefect_elastic_train.loop.resize_requested()`.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster import DRAIN, KILL
from benchmarks.common import (
    POLL_SECONDS,
    SAME_POLL,
    Side,
    SideFailedError,
    Workbench,
    machine_lines,
    markdown_table,
    parse_arguments,
    phases,
    rotated,
    summary,
    warm_up,
)
from benchmarks.loops import WORKERS, LoopSettings
from benchmarks.sides import NO_STANDBY, RESIZE_CHECK_SECONDS
from prefect_elastic_train.rehearsal.node_cluster import NodeClusterError

CHECKPOINT_EVERY = 20
STEP_SECONDS = 0.1
STEPS_BEFORE_NODE = 3 * CHECKPOINT_EVERY
SECONDS_BEFORE_END = 30.0
"""So long the two workers train before their number falls again."""
ENDINGS = (DRAIN, KILL)
STEPS_OF_A_POLL = math.ceil(POLL_SECONDS / STEP_SECONDS) + 1
"""Steps that may end while the controller waits for its next poll, wherever in a step the wait begins."""

ASKING = Side("ours-asking", "ours-growing", needs_prefect=True)
PLAIN = Side("ours-plain", "ours-growing", needs_prefect=True)
BARE = Side("ours-no-standby", "ours-growing", {NO_STANDBY: "1"}, needs_prefect=True)
RAW_DEFAULT = Side("raw-default", "raw-growing")
RAW_SAME_POLL = Side("raw-same-poll", "raw-growing", SAME_POLL)
SIDES = (ASKING, PLAIN, BARE, RAW_DEFAULT, RAW_SAME_POLL)


@dataclass(frozen=True)
class Sample:
    """What one growth cost.

    Attributes:
        redone: Steps that rank 0 did twice.
        seconds: From the node's arrival to the end of rank 0's first new step in the group of two.
        nothing_new: From the end of rank 0's last step that was kept to the end of its first new one.
        arrived: Steps from the last regular checkpoint to the node's arrival.
        nothing_new_after: As `nothing_new`, when the node goes again.
    """

    redone: int
    seconds: float
    nothing_new: float
    arrived: int
    nothing_new_after: float


def measure(workbench: Workbench, side: Side, phase: int, ending: str) -> Sample:
    """Let a side train with one worker, add a node for another, wait for the first new step of both, and take it back.

    The node comes after the same step each time, and the checkpoints around it are shifted. So the moments that a
    side chooses by a clock of its own, begun with the worker group, are spread over the checkpoint interval too.

    Args:
        workbench: Where to run it.
        side: What to run.
        phase: The node is asked for so many steps after a checkpoint; it is there a moment later.
        ending: How it goes: `DRAIN` or `KILL`.
    """
    loop = LoopSettings(
        steps=100_000,
        step_seconds=STEP_SECONDS,
        checkpoint_every=CHECKPOINT_EVERY,
        checkpoint_offset=phase,
        asks=side is ASKING,
    )
    with workbench.cluster() as cluster:
        cluster.add_node()
        with workbench.run(side, loop, cluster=cluster) as run:
            run.wait_for_line(lambda line: line.step >= STEPS_BEFORE_NODE, f"step {STEPS_BEFORE_NODE}")
            arrived_at = cluster.add_node()
            new = run.wait_for_line(
                lambda line: line.rank == 0 and line.world_size == WORKERS, f"a step with {WORKERS} workers"
            )
            old = [line for line in run.ledger.read() if line.world_size == 1]
            pids = {line.pid for line in old}
            if len(pids) != 1:
                raise run.failed(f"restarted its only worker: processes {sorted(pids)}")
            time.sleep(SECONDS_BEFORE_END)
            cluster.take_node(ending)
            alone = run.wait_for_line(
                lambda line: line.world_size == 1 and line.at > new.at, "a step with the worker that is left"
            )
            both = [line for line in run.ledger.read() if line.world_size == WORKERS and line.rank == 0]
    last = old[-1].step
    kept_at = max((line.at for line in old if line.step <= new.resumed_from), default=old[0].at)
    before_arrival = max(line.step for line in old if line.at <= arrived_at)
    return Sample(
        redone=last - new.resumed_from,
        seconds=new.at - arrived_at,
        nothing_new=new.at - kept_at,
        arrived=loop.steps_after_checkpoint(before_arrival),
        nothing_new_after=alone.at - max(line.at for line in both if line.step <= alone.resumed_from),
    )


def redone_target(side: Side, redone: Sequence[int], limit: int) -> str:
    """One line that holds a side's worst growth against what this project promises."""
    if not redone:
        return f"- steps redone, {side.name}: not measured (<= {limit})"
    return (
        f"- steps redone, {side.name}: at most {max(redone)} (<= {limit}): {'PASS' if max(redone) <= limit else 'FAIL'}"
    )


def targets(samples: dict[str, list[Sample]]) -> list[str]:
    """The worst growths against what this project promises, and beside them raw Ray Train's."""
    redone = defaultdict(list, {name: [sample.redone for sample in taken] for name, taken in samples.items()})
    lines = [
        redone_target(ASKING, redone[ASKING.name], 0),
        redone_target(PLAIN, redone[PLAIN.name], STEPS_OF_A_POLL),
    ]
    for side in (RAW_DEFAULT, RAW_SAME_POLL):
        worst = f"at most {max(redone[side.name])}" if redone[side.name] else "not measured"
        lines.append(f"- steps redone, {side.name}: {worst} (no target; a checkpoint interval is {CHECKPOINT_EVERY})")
    return lines


def main() -> int:
    """Measure the sides in turn and print the table and the targets.

    Returns:
        1 if a run failed, else 0. A missed target is printed, not an error.
    """
    arguments = parse_arguments((__doc__ or "").splitlines()[0], [side.name for side in SIDES])
    chosen = [side for side in SIDES if side.name in arguments.only]
    samples: dict[str, list[Sample]] = {side.name: [] for side in SIDES}
    after: dict[str, list[float]] = defaultdict(list)
    failed = 0
    load_before = os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=any(side.needs_prefect for side in chosen)) as workbench:
        for repeat, phase in enumerate(phases(arguments.repeats, CHECKPOINT_EVERY)):
            for side in rotated(chosen, repeat):
                progress = f"# {repeat + 1}/{arguments.repeats} {side.name}"
                try:
                    ending = ENDINGS[repeat % len(ENDINGS)]
                    sample = measure(workbench, side, phase, ending)
                except (SideFailedError, NodeClusterError) as error:
                    failed += 1
                    print(f"{progress} failed: {error}", flush=True)
                    continue
                samples[side.name].append(sample)
                after[f"{side.name}/{ending}"].append(sample.nothing_new_after)
                print(f"{progress}: {sample}", flush=True)
    print(f"\n{machine_lines('benchmarks.growth', load_before)}\n")
    print(
        f"1 worker, then {WORKERS}; steps of {STEP_SECONDS:g} s, a checkpoint every {CHECKPOINT_EVERY} steps. "
        f"Median (min–max) of up to {arguments.repeats} growths; same poll is {POLL_SECONDS} s.\n"
        f"All sides look for capacity every {RESIZE_CHECK_SECONDS:g} s, and no stability delay keeps ours from using "
        "a node at once.\nOurs looks at the nodes themselves, raw Ray Train at a list that Ray renews every 20 s; "
        "that is in its seconds from the node's arrival.\n"
    )
    rows = [
        [
            side.name,
            str(len(samples[side.name])),
            summary([sample.redone for sample in samples[side.name]], digits=0),
            summary([sample.seconds for sample in samples[side.name]]),
            summary([sample.nothing_new for sample in samples[side.name]]),
        ]
        for side in chosen
    ]
    header = ["side", "growths", "steps redone", "from the node's arrival to the first new step [s]", "nothing new [s]"]
    print(markdown_table(header, rows))
    endings = [[name, str(len(taken)), summary(taken)] for name, taken in sorted(after.items())]
    print("\n" + markdown_table(["side/how the node goes", "times", "nothing new [s]"], endings))
    print("\nTargets:")
    print("\n".join(targets(samples)))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
