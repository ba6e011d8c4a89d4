"""Trainings whose checkpoints are in a bucket, and a store that makes trouble."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import CHECKPOINT_EVERY, STEPS, hash_training
from tests.support.buckets import BUCKET, Bucket
from tests.support.loops import hash_after
from tests.support.processes import (
    FlowProcess,
    RayHead,
    assert_every_step_counts_once,
    generations,
    read_ledger,
    steps_of,
    wait_for,
)
from tests.support.s3 import FaultProxy, MotoServer

Start = Callable[..., FlowProcess]

OUTAGE_SECONDS = 15.0


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


def test_requests_that_fail_and_an_outage_cost_time_and_nothing_else(
    start: Start, ledger: str, bucket: Bucket, head: RayHead
) -> None:
    bucket.proxy.faults(rate=0.05, kinds=("503", "reset", "stall"), stall_seconds=5.0, seed=7)
    flow = _train(start, bucket, ledger, head, config={"ballast_bytes": 40 * 2**20})
    _in_mid_training(bucket)
    with bucket.proxy.outage():
        time.sleep(OUTAGE_SECONDS)
    outcome = flow.wait(600)
    given = bucket.proxy.faults_given
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    result = outcome["result"]
    assert (result["attempts"], result["worker_failures"]) == (1, 0)
    assert steps_of(ledger) == list(range(1, STEPS + 1)), "no step is taken twice"
    assert _is_right(bucket, outcome)
    assert result["storage_wait_seconds"] >= OUTAGE_SECONDS - 5
    assert "waited" in flow.log
    assert sum(given.values()) > 10, given
    bucket.proxy.calm()
    assert bucket.moto.incomplete_uploads(BUCKET) == []


def _expired(bucket: Bucket) -> None:
    bucket.proxy.refuse("ExpiredToken", "The provided token has expired.", 400)


def _no_bucket(bucket: Bucket) -> None:
    bucket.proxy.refuse("NoSuchBucket", "The specified bucket does not exist", 404)


@pytest.mark.full
@pytest.mark.parametrize(("break_it", "word"), [(_expired, "credentials expired"), (_no_bucket, "no such bucket")])
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


def test_what_the_store_refuses_from_the_beginning_is_said_before_anything_starts(
    start: Start, ledger: str, bucket: Bucket, head: RayHead
) -> None:
    bucket.proxy.allow_keys({"AKIASOMEBODYELSE"})
    outcome = _train(start, bucket, ledger, head).wait(60)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error")
    assert "credentials" in outcome["error"]
    assert bucket.all_keys() == []


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
        config={"staging": str(staging), "ballast_bytes": 40 * 2**20, "sleep": 0.01},
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
