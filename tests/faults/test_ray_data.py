"""Ray Data through kills and resizes: with a session each row counts once, without one the epoch begins again."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.faults.test_loop_session import GPUS
from tests.support.clusters import ElasticCluster
from tests.support.processes import Start, read_ledger
from tests.support.session_training import TWO, SessionTraining

pytestmark = pytest.mark.full

LENGTH = 4000


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Four Parquet files with four row groups each."""
    made = tmp_path / "numbers"
    made.mkdir()
    for number, rows in enumerate(np.split(np.arange(LENGTH), 4)):
        pyarrow.parquet.write_table(pyarrow.table({"id": rows}), made / f"{number}.parquet", row_group_size=250)
    return str(made)


def test_every_row_counts_once_in_each_epoch_with_two_one_and_three_workers_and_a_kill(
    start: Start, cluster: ElasticCluster, tmp_path: Path, folder: str
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    training = SessionTraining(
        start, tmp_path, "none", GPUS, length=LENGTH, cluster=cluster.block, parquet_folder=folder
    )
    cluster.remove(training.group(2)[1]["node"])
    training.group(1)
    cluster.add_gpu(), cluster.add_gpu()
    three = training.group(3)
    training.group(3, dead=[three[1]["pid"]])
    assert training.end(attempts=1, worker_failures=2) == [2, 1, 3, 3]


def test_without_a_session_a_restart_begins_the_epoch_again(start: Start, ledger: str, folder: str) -> None:
    flow = start(
        loop="tests.support.session_loops:epoch_loop",
        config={"ledger": ledger, "dies": 20},
        scaling=TWO,
        parquet_folder=folder,
        splits=True,
    )
    assert flow.completed(300)["worker_failures"] == 1
    lines = read_ledger(ledger)
    first = [row for line in lines if line["group"] == lines[0]["group"] for row in line["seen"]]
    later = [row for line in lines if line["group"] != lines[0]["group"] for row in line["seen"]]
    assert len(first) >= 300
    assert set(first) < set(later), "the rows before the kill are read again"
