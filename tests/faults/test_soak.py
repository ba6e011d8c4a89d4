"""Long random runs of faults: once in `make test-all`, many times in `make soak`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.faults.conftest import ROUNDS, STEPS, final_weights, same_weights, train_config
from tests.support.processes import FlowProcess, read_ledger, steps_of, wait_for

Start = Callable[..., FlowProcess]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_drivers_and_workers_killed_at_random_change_nothing_of_the_final_weights(
    start: Start, ledger: str, undisturbed: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    flow = start(
        config=train_config(ledger, sleep=0.3),
        failures={
            "max_failures": -1,
            "driver_restarts": 30,
            "max_attempts_without_progress": 30,
            "driver_restart_delay_seconds": 0,
        },
    )
    kills = 0
    while kills < 6 and flow.process.poll() is None:
        time.sleep(chance.uniform(5, 25))
        if chance.random() < 0.5:
            victim = flow.driver()
        else:
            pids = [line["pid"] for line in read_ledger(ledger)[-2:]]
            alive = [pid for pid in pids if psutil.pid_exists(pid)]
            victim = psutil.Process(chance.choice(alive)) if alive else None
        if victim is not None:
            try:
                victim.kill()
                kills += 1
            except psutil.Error:
                continue
    outcome = flow.wait(600)
    assert outcome["state"] == "COMPLETED"
    assert kills > 0
    assert set(steps_of(ledger)) == set(range(1, STEPS + 1))
    assert same_weights(final_weights(outcome["result"]["checkpoint_uri"]), undisturbed)
    wait_for(lambda: flow.marked() == [], 15, "all processes to end")
