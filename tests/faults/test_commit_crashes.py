"""A process dies at some step of a commit: no step of the training is lost or counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import CHECKPOINT_EVERY, STEPS, hash_training, is_right
from tests.support.processes import (
    ROOT,
    FlowProcess,
    RayHead,
    assert_every_step_counts_once,
    attempts,
    commits,
)

Start = Callable[..., FlowProcess]


class CrashingHead(RayHead):
    """A cluster whose processes die where a file says, once."""

    def __init__(self, crash_file: Path) -> None:
        self.crash_file = crash_file
        super().__init__(
            cpus=2,
            CRASH_FILE=str(crash_file),
            PYTHONPATH=f"{ROOT / 'tests' / 'support' / 'crashing'}:{ROOT}",
        )

    def arm(self, step: str) -> None:
        """Let the next process that comes to this step die there."""
        self.died.unlink(missing_ok=True)
        temporary = self.crash_file.with_suffix(".new")
        temporary.write_text(step)
        temporary.rename(self.crash_file)

    @property
    def died(self) -> Path:
        """There once a process has died."""
        return Path(f"{self.crash_file}.done")


@pytest.fixture(scope="module")
def crashing_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashingHead]:
    cluster = CrashingHead(tmp_path_factory.mktemp("crashing") / "crash")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    ("step", "dies"),
    [
        pytest.param("mid-upload", "worker", marks=pytest.mark.full),
        ("in the middle of the commit", "controller"),
        pytest.param("after Ray's file", "controller", marks=pytest.mark.full),
    ],
)
def test_crash_in_a_commit_loses_no_step_and_counts_none_twice(
    start: Start, ledger: str, crashing_head: CrashingHead, step: str, dies: str
) -> None:
    flow = start(**hash_training(ledger, cluster=crashing_head.block))
    flow.wait_for(lambda: len(commits(flow.run)) >= 2, 120, "two commits")
    crashing_head.arm(step)
    outcome = flow.wait(180)
    assert crashing_head.died.exists(), "a process died there"
    assert outcome["state"] == "COMPLETED"
    assert outcome["result"]["worker_failures"] == (1 if dies == "worker" else 0)
    assert len(attempts(flow.run)) == (1 if dies == "worker" else 2)
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert is_right(outcome["result"]["checkpoint_uri"])
