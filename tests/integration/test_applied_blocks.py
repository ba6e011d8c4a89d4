"""Saved blocks that change while a training runs: the log says so, and `elastic-train runs apply` makes it use them."""

import os
import subprocess
import sys
from pathlib import Path

from prefect_elastic_train import ElasticScaling
from tests.support.processes import Start, read_ledger, wait_for
from tests.support.session_training import STEPS, TWO, SessionTraining


def test_a_changed_block_waits_for_the_next_attempt_or_for_runs_apply_which_loses_no_step(
    start: Start, api: str, tmp_path: Path
) -> None:
    ElasticScaling(**{**TWO, "min_workers": 1, "max_workers": 1}, standby="off").save("applied", overwrite=True)
    training = SessionTraining(start, tmp_path, scaling="applied")
    training.group(1)
    ElasticScaling(**TWO, standby="off").save("applied", overwrite=True)
    wait_for(
        lambda: "Saved blocks have changed: the next attempt uses" in training.flow.log, 60, "the change to be told"
    )
    assert {line["world"] for line in read_ledger(training.ledger)} == {1}
    run = training.flow.run
    assert run
    command = [Path(sys.executable).with_name("elastic-train"), "runs", "apply", run.name]
    applied = subprocess.run(command, env={**os.environ, "PREFECT_API_URL": api}, capture_output=True, text=True)
    assert "after its next checkpoint" in applied.stdout, applied.stderr
    training.group(2)
    assert training.end(attempts=2, worker_failures=0) == [1, 2]
    steps = [line["step"] for line in read_ledger(training.ledger) if line["rank"] == 0]
    assert sorted(steps) == list(range(1, STEPS + 1)), "no step is done again"
    assert "a new attempt starts, which uses their values" in training.flow.log
