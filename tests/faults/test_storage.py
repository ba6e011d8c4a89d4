"""The storage of a training makes trouble: a bucket behind a proxy, and a disk that is too small."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import processes
from tests.support.buckets import BUCKET, Bucket
from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, hash_after, is_right, train_config
from tests.support.s3 import FaultProxy, MotoServer

OUTAGE_SECONDS = 10.0


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
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)], check=True)
    except subprocess.CalledProcessError:
        pytest.skip("only root may mount a small disk")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def _is_right(bucket: Bucket, result: dict[str, Any]) -> bool:
    state = json.loads(bucket.fetch(result["checkpoint_uri"], "state.json").read_text())
    return bool(state == [STEPS, hash_after(STEPS)])


def _in_mid_training(bucket: Bucket) -> None:
    processes.wait_for(lambda: len(bucket.records("commits")) >= 2, 120, "two commits")


def _assert_refused_at_once(flow: processes.FlowProcess, word: str) -> None:
    broken_at = time.monotonic()
    outcome = flow.wait(60)
    assert time.monotonic() - broken_at < 45, "nothing is repeated that cannot succeed"
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error"), flow.log[-4000:]
    assert word in outcome["error"]
    assert "To go on, " in outcome["error"]


def test_requests_that_fail_and_an_outage_cost_time_and_nothing_else(
    start: processes.Start, ledger: str, bucket: Bucket, head: RayHead
) -> None:
    bucket.proxy.faults(rate=0.05, kinds=("503", "reset", "stall"), stall_seconds=2.0, seed=7)
    config = train_config(ledger, ballast_bytes=40 * 2**20)
    flow = start(config=config, storage=bucket.block, cluster=head.block)
    _in_mid_training(bucket)
    with bucket.proxy.outage():
        time.sleep(OUTAGE_SECONDS)
    result = flow.completed(300)
    assert (result["attempts"], result["worker_failures"]) == (1, 0)
    assert processes.steps_of(ledger) == list(range(1, STEPS + 1)), "no step is taken twice"
    assert _is_right(bucket, result)
    assert result["storage_wait_seconds"] >= OUTAGE_SECONDS - 5
    assert "waited" in flow.log
    given = bucket.proxy.faults_given
    assert sum(given.values()) > 10, given
    bucket.proxy.calm()
    assert bucket.moto.incomplete_uploads(BUCKET) == []


@pytest.mark.full
def test_what_the_store_refuses_in_mid_training_ends_it_at_once_and_a_retry_resumes(
    start: processes.Start, ledger: str, bucket: Bucket, head: RayHead
) -> None:
    training = {"config": train_config(ledger), "storage": bucket.block, "cluster": head.block}
    flow = start(**training, failures={"driver_restarts": 3, "max_failures": 3})
    _in_mid_training(bucket)
    bucket.proxy.refuse("ExpiredToken", "The provided token has expired.", 400)
    _assert_refused_at_once(flow, "credentials expired")
    assert len(bucket.records("attempts")) == 1, "no driver restart is spent on it"
    bucket.proxy.calm()
    result = start("again", **training, flow_run_id=flow.flow_run_id).completed(180)
    processes.assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert _is_right(bucket, result)


@pytest.mark.full
def test_uploads_in_the_background_survive_a_kill_wait_at_the_end_and_do_not_pile_up(
    start: processes.Start, ledger: str, bucket: Bucket, head: RayHead, tmp_path: Path
) -> None:
    (staging := tmp_path / "staging").mkdir()
    bucket.proxy.latency(0.1)
    config = train_config(ledger, staging=str(staging), ballast_bytes=40 * 2**20, sleep=0.01)
    flow = start(config=config, checkpoints={"keep": 1}, storage=bucket.block, cluster=head.block)
    _in_mid_training(bucket)
    processes.wait_for(lambda: bucket.moto.incomplete_uploads(BUCKET), 60, "an upload to be under way")
    committed = bucket.records("commits")[-1]["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    psutil.Process(processes.read_ledger(ledger)[-1]["pid"]).kill()
    result = flow.completed(300)
    assert (result["attempts"], result["worker_failures"]) == (1, 1)
    assert processes.generations(ledger)[1][0] in (committed, committed + CHECKPOINT_EVERY), (
        "the last one that was committed"
    )
    processes.assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert _is_right(bucket, result), "the end waited for the last upload"
    of_one = [line["waiting"] for line in processes.read_ledger(ledger) if line["resumed_from"] == 0]
    assert max(of_one) <= 3, "one is uploaded, one waits, one is made"
    assert bucket.moto.incomplete_uploads(BUCKET) == []
    kept = {key.split("/")[2] for key in bucket.all_keys() if "checkpoint_2" in key.split("/")[2]}
    assert len(kept) == 1, "what the policy does not keep is deleted"


def test_a_disk_that_takes_no_more_ends_the_training_at_once_and_a_retry_resumes(
    start: processes.Start, ledger: str, head: RayHead, disk: Path
) -> None:
    config = train_config(ledger, ballast_bytes=2 * 2**20)
    training = {"storage": str(disk), "cluster": head.block, "config": config}
    flow = start(**training)
    flow.wait_for_commits()
    _assert_refused_at_once(flow, "no space")
    assert len(processes.attempts(flow.run)) == 1, "no driver restart is spent on it"
    assert not list(disk.rglob(".tmp-*")), "nothing half-written is left"
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    result = start("again", **training, flow_run_id=flow.flow_run_id).completed(180)
    processes.assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert is_right(result["checkpoint_uri"])


@pytest.mark.full
def test_a_node_that_does_not_share_the_directory_is_found_before_anything_starts(
    start: processes.Start, ledger: str, disk: Path, own_head: RayHead
) -> None:
    # A node as on a machine without the mount: in its view of the file system the directory is another one.
    join = f"{sys.executable} -m ray.scripts.scripts start --address={own_head.address} --num-cpus=2 --block"
    command = f"mount -t tmpfs tmpfs {disk} && exec {join} --disable-usage-stats"
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", command],
        env=own_head.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        processes.wait_for(lambda: len(own_head.states("nodes", "DEAD")) == 2, 60, "the second node")
        flow = start(config=train_config(ledger), storage=str(disk), cluster=own_head.block)
        outcome = flow.wait(120)
    finally:
        node.kill()
        node.wait(10)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error"), flow.log[-3000:]
    assert "cannot read the file that the driver wrote there" in outcome["error"]
    assert "mount the directory on all nodes" in outcome["error"]
    assert list(disk.iterdir()) == [], "nothing has started, and nothing is left"
