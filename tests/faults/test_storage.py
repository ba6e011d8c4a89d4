"""The storage of a training makes trouble: a bucket behind a proxy, and a disk that is too small."""

import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.buckets import BUCKET, Bucket
from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, hash_after, is_right, train_config
from tests.support.processes import (
    Start,
    assert_every_step_counts_once,
    attempts,
    generations,
    read_ledger,
    steps_of,
    wait_for,
)
from tests.support.s3 import FaultProxy, MotoServer

OUTAGE_SECONDS = 8.0


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    """A real S3 server."""
    with MotoServer() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def bucket(moto: MotoServer) -> Iterator[Bucket]:
    """A prefix of its own, behind a proxy of its own."""
    with FaultProxy(moto.endpoint_url) as proxy:
        yield Bucket(moto, proxy, f"runs-{secrets.token_hex(4)}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of some megabytes."""
    (path := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path]).returncode:
        pytest.skip("only root may mount a small disk")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def _is_right(bucket: Bucket, result: dict[str, Any]) -> bool:
    state = json.loads(bucket.read(f"{result['checkpoint_uri']}/state.json"))
    return bool(state == [STEPS, hash_after(STEPS)])


def _in_mid_training(bucket: Bucket) -> None:
    wait_for(lambda: len(bucket.records("commits")) >= 2, 120, "two commits")


def test_requests_that_fail_and_an_outage_cost_time_and_nothing_else(
    start: Start, ledger: str, bucket: Bucket, head: RayHead
) -> None:
    bucket.proxy.faults(rate=0.05, kinds=("503", "reset", "stall"), stall_seconds=2.0, seed=7)
    config = train_config(ledger, ballast_bytes=40 * 2**20)
    flow = start(config=config, storage=bucket.block, cluster=head.block)
    _in_mid_training(bucket)
    with bucket.proxy.outage():
        time.sleep(OUTAGE_SECONDS)
    result = flow.completed(300)
    assert (result["attempts"], result["worker_failures"]) == (1, 0)
    assert steps_of(ledger) == list(range(1, STEPS + 1)), "no step is taken twice"
    assert _is_right(bucket, result)
    assert result["storage_wait_seconds"] >= OUTAGE_SECONDS - 5
    assert "waited" in flow.log
    assert sum(bucket.proxy.faults_given.values()) > 10
    bucket.proxy.calm()
    assert bucket.moto.incomplete_uploads(BUCKET) == []


@pytest.mark.full
def test_uploads_in_the_background_survive_a_kill_wait_at_the_end_and_do_not_pile_up(
    start: Start, ledger: str, bucket: Bucket, head: RayHead, tmp_path: Path
) -> None:
    (staging := tmp_path / "staging").mkdir()
    bucket.proxy.latency(0.1)
    config = train_config(ledger, staging=str(staging), ballast_bytes=40 * 2**20, sleep=0.01)
    flow = start(config=config, checkpoints={"keep": 1}, storage=bucket.block, cluster=head.block)
    _in_mid_training(bucket)
    wait_for(lambda: bucket.moto.incomplete_uploads(BUCKET), 60, "an upload to be under way")
    committed = bucket.records("commits")[-1]["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    psutil.Process(read_ledger(ledger)[-1]["pid"]).kill()
    result = flow.completed(300)
    assert (result["attempts"], result["worker_failures"]) == (1, 1)
    assert generations(ledger)[1][0] in (committed, committed + CHECKPOINT_EVERY), "the last one that was committed"
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert _is_right(bucket, result), "the end waited for the last upload"
    of_one = [line["waiting"] for line in read_ledger(ledger) if line["resumed_from"] == 0]
    assert max(of_one) <= 3, "one is uploaded, one waits, one is made"
    assert bucket.moto.incomplete_uploads(BUCKET) == []
    kept = {key.split("/")[2] for key in bucket.all_keys() if "checkpoint_2" in key.split("/")[2]}
    assert len(kept) == 1, "what the policy does not keep is deleted"


@pytest.mark.full
def test_a_disk_that_takes_no_more_ends_the_training_at_once_and_a_retry_resumes(
    start: Start, ledger: str, head: RayHead, disk: Path
) -> None:
    config = train_config(ledger, ballast_bytes=2 * 2**20)
    training = {"storage": str(disk), "cluster": head.block, "config": config}
    flow = start(**training)
    flow.wait_for_commits()
    outcome = flow.wait(60)  # nothing is repeated that cannot succeed
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error"), flow.log[-4000:]
    assert "no space" in outcome["error"]
    assert "To go on, " in outcome["error"]
    assert len(attempts(flow.run)) == 1, "no driver restart is spent on it"
    assert not list(disk.rglob(".tmp-*")), "nothing half-written is left"
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    result = start("again", **training, flow_run_id=flow.flow_run_id).completed(180)
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert is_right(result["checkpoint_uri"])
