"""Trainings whose checkpoints are in a bucket, and a store that makes trouble."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.digits import REQUIRED_ACCURACY
from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.supervisor.processes import marked_processes
from tests.faults.conftest import CHECKPOINT_EVERY, STEPS, hash_training
from tests.support.buckets import BUCKET, Bucket
from tests.support.loops import hash_after
from tests.support.processes import (
    ROOT,
    FlowProcess,
    RayHead,
    assert_every_step_counts_once,
    generations,
    read_ledger,
    steps_of,
    wait_for,
)
from tests.support.s3 import WRITES, FaultProxy, MotoServer, Which

Start = Callable[..., FlowProcess]


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    """A real S3 server."""
    with MotoServer(tmp_path_factory.mktemp("moto") / "log") as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def bucket(moto: MotoServer) -> Iterator[Bucket]:
    """A prefix of its own, behind a proxy of its own."""
    with FaultProxy(moto.endpoint_url) as proxy:
        yield Bucket(moto, proxy, f"runs-{secrets.token_hex(4)}")


def _is_right(bucket: Bucket, outcome: dict[str, Any], steps: int = STEPS) -> bool:
    """Tell whether the newest checkpoint is that of an undisturbed run."""
    state = json.loads(bucket.fetch(outcome["result"]["checkpoint_uri"], "state.json").read_text())
    return bool(state == [steps, hash_after(steps)])


def _train(start: Start, bucket: Bucket, ledger: str, head: RayHead, name: str = "flow", **more: Any) -> FlowProcess:
    config = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "sleep": 0.05, "ledger": ledger}
    config |= more.pop("config", {})
    storage = {**bucket.block, **more.pop("storage", {})}
    return start(name, **hash_training(ledger, storage=storage, cluster=head.block, config=config, **more))


def _in_mid_training(bucket: Bucket) -> None:
    wait_for(lambda: len(bucket.records("commits")) >= 2, 120, "two commits")


@pytest.mark.full  # make test kills a driver whose run is in a bucket in test_secrets.py
def test_killed_driver_resumes_from_the_bucket_and_leaves_no_parts_of_uploads(
    start: Start, ledger: str, bucket: Bucket, head: RayHead
) -> None:
    flow = _train(start, bucket, ledger, head, config={"ballast_bytes": 40 * 2**20})
    _in_mid_training(bucket)
    driver = flow.driver()
    assert driver is not None
    driver.kill()
    outcome = flow.wait(240)
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    assert outcome["result"]["attempts"] == 2
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert _is_right(bucket, outcome)
    assert bucket.moto.incomplete_uploads(BUCKET) == []
    assert not [key for key in bucket.all_keys() if ".preflight" in key]


@pytest.mark.parametrize(
    ("outage_seconds", "fault_rate"),
    [pytest.param(15.0, 0.05, id="15 s"), pytest.param(60.0, 0.1, id="60 s", marks=pytest.mark.full)],
)
def test_requests_that_fail_and_an_outage_cost_time_and_nothing_else(
    start: Start, ledger: str, bucket: Bucket, head: RayHead, outage_seconds: float, fault_rate: float
) -> None:
    bucket.proxy.faults(rate=fault_rate, kinds=("503", "reset", "stall"), stall_seconds=5.0, seed=7)
    flow = _train(start, bucket, ledger, head, config={"ballast_bytes": 24 * 2**20})
    _in_mid_training(bucket)
    with bucket.proxy.outage():
        time.sleep(outage_seconds)
    outcome = flow.wait(600)
    given = bucket.proxy.faults_given
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    result = outcome["result"]
    assert (result["attempts"], result["worker_failures"]) == (1, 0)
    assert steps_of(ledger) == list(range(1, STEPS + 1)), "no step is taken twice"
    assert _is_right(bucket, outcome)
    assert result["storage_wait_seconds"] >= outage_seconds - 5
    assert "waited" in flow.log
    assert sum(given.values()) > 10, given
    bucket.proxy.calm()
    assert bucket.moto.incomplete_uploads(BUCKET) == []


def _wrong_key(bucket: Bucket) -> None:
    bucket.proxy.allow_keys({"AKIASOMEBODYELSE"})


def _expired(bucket: Bucket) -> None:
    bucket.proxy.refuse("ExpiredToken", "The provided token has expired.", 400)


def _read_only(bucket: Bucket) -> None:
    bucket.proxy.refuse("AccessDenied", "Access Denied", 403, when=Which(methods=WRITES))


def _no_bucket(bucket: Bucket) -> None:
    bucket.proxy.refuse("NoSuchBucket", "The specified bucket does not exist", 404)


@pytest.mark.parametrize(
    ("break_it", "word"),
    [
        pytest.param(_expired, "credentials expired", marks=pytest.mark.full),
        pytest.param(_wrong_key, "credentials", marks=pytest.mark.full),
        pytest.param(_read_only, "credentials", marks=pytest.mark.full),
        pytest.param(_no_bucket, "no such bucket", marks=pytest.mark.full),
    ],
)
def test_what_the_store_refuses_in_mid_training_ends_it_at_once_and_a_retry_resumes(
    start: Start, ledger: str, bucket: Bucket, head: RayHead, break_it: Callable[[Bucket], None], word: str
) -> None:
    flow = _train(start, bucket, ledger, head, failures={"driver_restarts": 3, "max_failures": 3})
    _in_mid_training(bucket)
    break_it(bucket)
    broken_at = time.monotonic()
    outcome = flow.wait(60)
    assert time.monotonic() - broken_at < 45, "nothing is repeated that cannot succeed"
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error"), flow.log[-4000:]
    assert word in outcome["error"]
    assert "To go on, " in outcome["error"]
    assert len(bucket.records("attempts")) == 1, "no driver restart is spent on it"
    last = bucket.records("commits")[-1]["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]

    bucket.proxy.calm()
    bucket.proxy.allow_keys(None)
    again = _train(start, bucket, ledger, head, "again", flow_run_id=flow.flow_run_id)
    outcome = again.wait(180)
    assert outcome["state"] == "COMPLETED", again.log[-4000:]
    assert max(step for step in (line for line in steps_of(ledger))) == STEPS
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert _is_right(bucket, outcome)
    assert last >= 2 * CHECKPOINT_EVERY


@pytest.mark.parametrize(
    ("break_it", "word"),
    [
        (_wrong_key, "credentials"),
        pytest.param(_read_only, "credentials", marks=pytest.mark.full),
        pytest.param(_no_bucket, "no such bucket", marks=pytest.mark.full),
    ],
)
def test_what_the_store_refuses_from_the_beginning_is_said_before_anything_starts(
    start: Start, ledger: str, bucket: Bucket, head: RayHead, break_it: Callable[[Bucket], None], word: str
) -> None:
    break_it(bucket)
    outcome = _train(start, bucket, ledger, head).wait(60)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error")
    assert word in outcome["error"]
    assert bucket.all_keys() == []


@pytest.mark.full
@pytest.mark.parametrize("races", [20])
def test_of_two_flow_runs_that_want_one_run_name_in_a_bucket_one_wins(
    start: Start, ledger: str, bucket: Bucket, head: RayHead, races: int
) -> None:
    chance = random.Random(11)
    for race in range(races):
        name = f"contested-{race}"
        flows = []
        for number in (1, 2):
            ledger_file = f"{ledger}.{race}"
            config = {"steps": 20, "checkpoint_every": 5, "sleep": 0.05, "ledger": ledger_file}
            flows.append(_train(start, bucket, ledger, head, f"{race}-{number}", run_name=name, config=config))
            time.sleep(chance.choice([0, chance.uniform(0, 0.5), chance.uniform(0, 3)]))
        outcomes = [flow.wait(180) for flow in flows]
        assert sorted(outcome["state"] for outcome in outcomes) == ["COMPLETED", "FAILED"], outcomes
        winner = next(number for number, outcome in enumerate(outcomes) if outcome["state"] == "COMPLETED")
        assert f"(id {flows[winner].flow_run_id})" in outcomes[1 - winner]["error"], "the holder is named"
        assert steps_of(ledger_file) == list(range(1, 21)), f"race {race}"
        assert len(bucket.records("attempts", name)) == 1
        assert _is_right(bucket, outcomes[winner], 20)


@pytest.mark.full
def test_uploads_in_the_background_survive_a_kill_wait_at_the_end_and_do_not_pile_up(
    start: Start, ledger: str, bucket: Bucket, head: RayHead, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    bucket.proxy.latency(0.1)
    flow = _train(
        start,
        bucket,
        ledger,
        head,
        loop="tests.support.loops:async_loop",
        checkpoints={"keep": 1},
        config={"staging": str(staging), "ballast_bytes": 20 * 2**20, "sleep": 0.01},
    )
    _in_mid_training(bucket)
    wait_for(lambda: bucket.moto.incomplete_uploads(BUCKET), 60, "an upload to be under way")
    committed = bucket.records("commits")[-1]["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    psutil.Process(read_ledger(ledger)[-1]["pid"]).kill()
    outcome = flow.wait(300)
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    assert (outcome["result"]["attempts"], outcome["result"]["worker_failures"]) == (1, 1)
    assert generations(ledger)[1][0] in (committed, committed + CHECKPOINT_EVERY), "the last one that was committed"
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert _is_right(bucket, outcome), "the end waited for the last upload"
    of_one = [line["waiting"] for line in read_ledger(ledger) if line["resumed_from"] == 0]
    assert max(of_one) <= 3, "one is uploaded, one waits, one is made"
    assert bucket.moto.incomplete_uploads(BUCKET) == []
    kept = {key.split("/")[2] for key in bucket.all_keys() if "checkpoint_2" in key.split("/")[2]}
    assert len(kept) == 1, "what the policy does not keep is deleted"


@pytest.mark.full
def test_the_digits_pipeline_runs_on_a_bucket_over_a_killed_driver(
    api_url: str, bucket: Bucket, tmp_path: Path
) -> None:
    arguments, result = tmp_path / "arguments.json", tmp_path / "result.json"
    arguments.write_text(
        json.dumps(
            {
                "epochs": 40,
                "data_dir": str(tmp_path / "data"),
                "storage": bucket.block,
                "result_file": str(result),
            }
        )
    )
    with (tmp_path / "log").open("wb") as log:
        pipeline = subprocess.Popen(
            [sys.executable, "-m", "tests.support.digits_script", str(arguments)],
            cwd=ROOT,
            env={**os.environ, "PREFECT_API_URL": api_url, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: len(bucket.records("commits")) >= 2, 180, "two commits")
        driver = next(
            child
            for child in psutil.Process(pipeline.pid).children()
            if "prefect_elastic_train.driver" in child.cmdline()
        )
        mark = driver.environ()[MARK_VARIABLE]
        driver.kill()
        assert pipeline.wait(240) == 0, (tmp_path / "log").read_text()[-6000:]
    finally:
        pipeline.kill()
        pipeline.wait(10)
    assert marked_processes(mark) == []
    summary = json.loads(result.read_text())
    assert summary["attempts"] == 2
    assert summary["epochs"] == 40
    assert summary["accuracy"] >= REQUIRED_ACCURACY
    assert summary["checkpoint_uri"].startswith(f"s3://{BUCKET}/{bucket.prefix}/")
    assert bucket.moto.incomplete_uploads(BUCKET) == []
