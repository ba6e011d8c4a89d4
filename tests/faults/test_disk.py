"""Trainings whose disk is full or becomes read-only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import CHECKPOINT_EVERY, STEPS, hash_training, is_right
from tests.support.processes import (
    FlowProcess,
    RayHead,
    assert_every_step_counts_once,
    attempts,
    commits,
    wait_for,
)

Start = Callable[..., FlowProcess]


class SmallDisk:
    """A disk of some megabytes, which can be made larger or read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)], check=True)

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        small = SmallDisk(tmp_path / "disk")
    except subprocess.CalledProcessError:
        pytest.skip("only root may mount a small disk")
    yield small
    small.close()


@pytest.mark.parametrize("fault", ["full", pytest.param("read-only", marks=pytest.mark.full)])
def test_a_disk_that_takes_no_more_ends_the_training_at_once_and_a_retry_resumes(
    start: Start, ledger: str, head: RayHead, disk: SmallDisk, fault: str
) -> None:
    config = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "sleep": 0.05, "ledger": ledger}
    config["ballast_bytes"] = 2 * 2**20 if fault == "full" else 1000
    training = hash_training(ledger, storage=str(disk.path), cluster=head.block, config=config)
    flow = start(**training)
    flow.wait_for(lambda: len(commits(flow.run)) >= 2, 120, "two commits")
    broken_at = time.monotonic()
    if fault == "read-only":
        disk.remount("ro")
    outcome = flow.wait(60)
    assert time.monotonic() - broken_at < 45, "nothing is repeated that cannot succeed"
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error"), flow.log[-4000:]
    assert ("no space" if fault == "full" else "read-only") in outcome["error"]
    assert "To go on, " in outcome["error"]
    assert len(attempts(flow.run)) == 1, "no driver restart is spent on it"
    assert not list(disk.path.rglob(".tmp-*")), "nothing half-written is left"

    disk.remount("rw,size=64m")
    again = start("again", flow_run_id=flow.flow_run_id, **training)
    outcome = again.wait(180)
    assert outcome["state"] == "COMPLETED", again.log[-4000:]
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert is_right(outcome["result"]["checkpoint_uri"])


@pytest.mark.full
def test_a_node_that_does_not_share_the_directory_is_found_before_anything_starts(
    start: Start, ledger: str, disk: SmallDisk, own_head: RayHead
) -> None:
    head = own_head
    # A node as on a machine without the mount: in its view of the file system the directory is another one.
    mount_another = f"mount -t tmpfs tmpfs {disk.path} && exec"
    join = f"{sys.executable} -m ray.scripts.scripts start --address={head.address} --num-cpus=2 --block"
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"{mount_another} {join} --disable-usage-stats"],
        env={**os.environ, **head.environment, "TEST_HEAD_MARK": head.mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: head.nodes() == 2, 60, "the second node")
        flow = start(
            **hash_training(ledger, storage=str(disk.path), cluster=head.block, failures={"driver_restarts": 3})
        )
        outcome = flow.wait(120)
    finally:
        node.kill()
        node.wait(10)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "storage_error"), flow.log[-3000:]
    assert "does not see what the driver has written there" in outcome["error"]
    assert "mount the directory on all nodes" in outcome["error"]
    assert list(disk.path.iterdir()) == [], "nothing has started, and nothing is left"
