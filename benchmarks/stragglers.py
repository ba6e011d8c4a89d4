"""How soon a rank that is slower than the other one is reported: `python -m benchmarks.stragglers --repeats 10`.

Two processes train with DDP on gloo, each pinned to one CPU core. After some steps, a busy process uses a part of the
second core, or the same part of both. The windows that both sessions measure are compared as the controller does.
Without Ray and Prefect.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

from benchmarks.common import machine_lines, markdown_table
from prefect_elastic_train.controller import straggler_watch
from prefect_elastic_train.loop.phases import Window
from tests.support.processes import ROOT, free_port

STEPS = 84
SLOW_FROM = 24
SHARES = {"beside rank 1": 0.5, "beside both ranks": 0.9}
"""The part of the time for which the busy process runs."""
_BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.02 * share
    while time.perf_counter() < end: pass
    time.sleep(0.02 * (1 - share))
"""


def train(rank: int, port: str, slow_from: int, share: str) -> None:
    """Train as one rank, from a step on (0: never) beside a busy process. Print the windows and the times of steps."""
    import torch
    import torch.distributed as dist

    from prefect_elastic_train import loop

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    layers = torch.nn.Sequential(*[torch.nn.Linear(800, 800) for _ in range(12)])
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    windows: dict[int, float] = {}
    ended_at: list[float] = []
    busy: subprocess.Popen[bytes] | None = None
    try:
        with loop.session(loop.TorchState(model=model, optimizer=optimizer), steps=STEPS, global_batch=256) as session:
            for (batch,) in session.batches(torch.utils.data.TensorDataset(torch.randn(1024, 800))):
                if 0 < session.done == slow_from:
                    busy = subprocess.Popen([sys.executable, "-c", _BUSY, share])  # on the same processor
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                session.step()
                report = session.phases.report(session.done)
                windows |= {window.step: window[1:] for window in report.windows} if report else {}
                ended_at.append(time.perf_counter())
    finally:
        if busy:
            busy.kill()
            busy.wait()
    print(json.dumps([windows, ended_at]))


def find(load: str) -> tuple[list[int], int, float]:
    """Return the ranks that were found, the number of slow steps until then, and the slow rank's relative time."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        slow_from = SLOW_FROM if rank or load == "beside both ranks" else 0
        command = [sys.executable, "-m", "benchmarks.stragglers", "--rank", f"{rank},{port},{slow_from},{SHARES[load]}"]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [json.loads(process.communicate(timeout=300)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    windows = [[Window(int(step), *times) for step, times in output[0].items()] for output in outputs]
    found: list[int] = []
    watch = straggler_watch.StragglerWatch(lambda event: found.append(event.rank))
    watch.begin_group([SimpleNamespace(metadata=SimpleNamespace(node_id=str(rank))) for rank in range(2)])
    found_at = 0
    for step, now in enumerate(outputs[0][1], 1):
        sent = [[window for window in of_rank if window.step <= step] for of_rank in windows]
        with patch.object(straggler_watch.time, "monotonic", lambda now=now: now):
            watch.check([SimpleNamespace(phase=SimpleNamespace(windows=newest)) for newest in sent])
        found_at = found_at or (step if found else 0)
    return found, max(0, found_at - SLOW_FROM), windows[1][-1].seconds / windows[0][-1].seconds


def main() -> None:
    """Run the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, port, slow_from, share = arguments.rank.split(",")
        train(int(rank), port, int(slow_from), share)
        return
    load_before = os.getloadavg()[0]
    rows = []
    for load in SHARES:
        runs = [find(load) for _ in range(arguments.repeats)]
        named = [sum(rank in found for found, _, _ in runs) for rank in range(2)]
        steps = sorted(steps for found, steps, _ in runs if found)
        factors = sorted(factor for _, _, factor in runs)
        rows.append(
            [
                f"busy process {load}",
                f"{factors[0]:.2f}–{factors[-1]:.2f}",
                *(f"{count} of {len(runs)}" for count in named),
                f"{steps[0]}–{steps[-1]}" if steps else "–",
            ]
        )
    headings = ["load", "time of rank 1 to rank 0", "rank 0 named", "rank 1 named", "steps until then"]
    print(f"{machine_lines('benchmarks.stragglers', load_before)}\n\n{markdown_table(headings, rows)}")


if __name__ == "__main__":
    main()
