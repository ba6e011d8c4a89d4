"""A rank that is slow by itself is found, and ranks that wait for it, or that are slow together, are not."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prefect_elastic_train import loop
from prefect_elastic_train.controller import straggler_watch
from prefect_elastic_train.controller.straggler_watch import StragglerWatch
from prefect_elastic_train.loop.phases import WINDOW, PhaseReport, Window
from tests.support.processes import ROOT, free_port

NODES = [SimpleNamespace(metadata=SimpleNamespace(node_id=f"node-{rank}")) for rank in range(4)]


class _Watched:
    """A worker group whose ranks send windows at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> None:
        self.now = 100.0
        monkeypatch.setattr(straggler_watch.time, "monotonic", lambda: self.now)
        self.events: list[Any] = []
        self.watch = StragglerWatch(self.events.append)
        self.watch.begin_group(NODES[:ranks])

    def poll(self, *windows: dict[int, float], seconds: float = 1.0, spread: float = 0.0) -> None:
        self.now += seconds
        reports = [
            PhaseReport("step", 0.1, 1, {}, 1, [Window(step, own, spread) for step, own in sent.items()])
            for sent in windows
        ]
        self.watch.check([SimpleNamespace(phase=report) for report in reports])


def train(rank: int, port: int) -> None:
    """Train with DDP. Rank 1 sleeps in each forward pass; rank 0 sleeps after each step, while rank 1 waits for it.

    Print the windows.
    """
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with loop.session(loop.TorchState(model=model, optimizer=optimizer), steps=26, global_batch=4) as session:
        for (batch,) in session.batches(torch.utils.data.TensorDataset(torch.ones(16, 8)), micro_batch=2):
            time.sleep(0.05 * rank)
            model(batch).sum().backward()
            if session.is_last_part:
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                time.sleep(0.1 * (1 - rank))
                report = session.phases.report(session.done)
    print(json.dumps(report.windows if report else []))


def test_a_ranks_own_time_is_without_its_waits_for_others_and_ends_with_its_last_gradient() -> None:
    port = free_port()
    codes = [f"from tests.unit.test_stragglers import train; train({rank}, {port})" for rank in range(2)]
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for code in codes]
    try:
        outputs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    own = [{step: seconds for step, seconds, _ in output} for output in outputs]
    assert own[0].keys() == own[1].keys() == {WINDOW, 2 * WINDOW}
    for step, seconds in own[1].items():
        assert seconds >= 0.1, "two batches"
        assert own[0][step] < 0.1


def test_a_straggler_is_slow_in_three_windows_in_a_row_compared_to_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = _Watched(monkeypatch, ranks=4)
    for number, seconds in enumerate([0.14, 0.14, 0.1, 0.14, 0.14, 0.14], 1):
        assert watched.events == []
        watched.poll({WINDOW * number: 0.1}, {WINDOW * number: seconds}, *[{WINDOW * number: 0.11}] * 2)
    [found] = watched.events
    assert (found.rank, found.node_id, found.usual_seconds) == (1, "node-1", 0.11)


@pytest.mark.parametrize(
    ("windows", "spread"),
    [
        ([{12: 1.0}, {12: 1.19}], 0.0),
        ([{12: 1.0}, {12: 1.59}], 0.3),  # within the spreads of both
        ([{12: 1.0}, {24: 9.0}], 0.0),  # they have no window in common
        ([{12: 1.0}, {}], 0.0),
    ],
)
def test_ranks_below_the_factor_or_within_the_spread_or_without_a_common_window_are_no_stragglers(
    monkeypatch: pytest.MonkeyPatch, windows: list[dict[int, float]], spread: float
) -> None:
    watched = _Watched(monkeypatch)
    for number in range(6):
        sent = [{step + 12 * number: seconds for step, seconds in of_rank.items()} for of_rank in windows]
        watched.poll(*sent, spread=spread)
    assert watched.events == []


def test_windows_of_fast_steps_are_compared_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(monkeypatch)
    for number in range(1, 20):
        watched.poll({WINDOW * number: 0.001}, {WINDOW * number: 0.002}, seconds=0.1)
    assert watched.events == []
    watched.poll({999: 0.001}, {999: 0.002})
    assert [event.rank for event in watched.events] == [1]
