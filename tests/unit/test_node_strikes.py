"""The strikes against nodes: how long they count, and where they are recorded."""

import time
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

from prefect_elastic_train.controller import node_strikes
from prefect_elastic_train.controller.failures import HungLoopError, is_of_node
from prefect_elastic_train.controller.node_strikes import NodeStrikes
from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.loop.replays import WrongResultError
from prefect_elastic_train.storage.store import LocalRunStore
from prefect_elastic_train.worker.rank_failures import portable_failure


def _strikes(folder: Path, run_id: str = "a", **settings: float) -> NodeStrikes:
    return NodeStrikes(LocalRunStore(str(folder)), run_id, FailureSettings(**settings))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that have passed."""
    passed = [1000.0]
    monkeypatch.setattr(node_strikes.time, "time", lambda: sum(passed))
    return passed


def test_a_node_is_struck_after_enough_strikes_for_twice_the_time_that_failures_count(
    tmp_path: Path, now: list[float]
) -> None:
    strikes = _strikes(tmp_path, forgive_after_seconds=100)
    for reason in ("crashed", "hung"):
        strikes.add({"n0": reason})
        now.append(60.0)
    assert strikes.nodes_to_leave_out() == {}
    strikes.add({"n0": "crashed", "n1": "crashed"})
    assert strikes.nodes_to_leave_out() == {"n0": "crashed; hung"}
    now.append(79.0)
    assert strikes.nodes_to_leave_out() == {"n0": "crashed; hung"}
    now.append(2.0)
    assert strikes.nodes_to_leave_out() == {}, "the first one counts no more"


def test_the_next_driver_knows_the_strikes_and_damaged_records_are_none(tmp_path: Path) -> None:
    _strikes(tmp_path).add({"n0": "slow"}, count=3)
    assert _strikes(tmp_path).nodes_to_leave_out() == {"n0": "slow"}
    assert _strikes(tmp_path, node_strikes=0).nodes_to_leave_out() == {}
    [record] = (tmp_path / ".elastic_train/strikes").iterdir()
    for content in ('{"n0": 3}', "[[1]]", "torn", "7"):
        record.write_text(content)
        assert _strikes(tmp_path).nodes_to_leave_out() == {}


def test_runs_with_shared_strikes_use_the_strikes_of_each_other(tmp_path: Path) -> None:
    for run in ("a", "b", "c"):
        own = _strikes(tmp_path / run, run, shared_strikes=True)
        own.add({"n0": "crashed"})
        assert bool(own.nodes_to_leave_out()) == (run == "c")
    assert _strikes(tmp_path / "d", "d", shared_strikes=True).nodes_to_leave_out() == {"n0": "crashed"}
    assert _strikes(tmp_path / "d", "d").nodes_to_leave_out() == {}


def test_strikes_count_though_the_storage_does_not_take_them(tmp_path: Path) -> None:
    (tmp_path / ".elastic_train").write_text("not a folder")
    strikes = _strikes(tmp_path, forgive_after_seconds=0)
    began = time.monotonic()
    strikes.add({"n0": "crashed"}, count=3)
    assert strikes.nodes_to_leave_out() == {"n0": "crashed"}
    assert time.monotonic() - began < 10


def test_deaths_hangs_and_wrong_results_are_strikes_and_consequences_and_the_loops_own_errors_are_not() -> None:
    waiting = HungLoopError()
    waiting.is_consequence = True
    wrong = portable_failure(UserExceptionWithTraceback(WrongResultError("step 9: rank 1 on n1 has …"), "Traceback …"))
    strikes = {error: is_of_node(error) for error in (ActorDiedError(), HungLoopError(), wrong, waiting, ValueError())}
    assert [*strikes.values()] == [True, True, True, False, False]
