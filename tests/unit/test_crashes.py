"""One attempt after the other, each killed at some operation, and damage to the run directory in between.

Loops name their checkpoints by epoch, so a restart gives the same names again. Each upload has a content of its own
and always the same size, so a mixture of two attempts cannot be seen by sizes; it is seen here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefect_elastic_train.core.checkpoint_names import loop_name, physical_name, written_by
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.records import CommitRecord, decode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.model import RunDirectory, all_commits
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.runs.snapshots import checkpoint_names, parse_snapshot
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.support import SteppedStore, Training, begin, claim, examples, private_folder, tear

RANKS = 2

DAMAGES = [
    "file torn",
    "file torn",
    "file missing",
    "checkpoint missing",
    "commit torn",
    "snapshot torn",
    "snapshot missing",
    "snapshot foreign",
]


class Died(BaseException):
    """The attempt was killed."""


class MortalStore(SteppedStore):
    """A store at whose n-th operation, counted from some moment on, the attempt dies."""

    def __init__(self, path: str) -> None:
        super().__init__(path, self._live)
        self._left: int | None = None

    def die_after(self, operations: int) -> None:
        """Let so many more operations happen."""
        self._left = operations

    def _live(self, operation: str) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Died


@dataclass(frozen=True)
class Committed:
    """A commit as the attempt that wrote it knows it: its checkpoints and what is in them, oldest first."""

    number: tuple[int, int]
    checkpoints: tuple[tuple[str, bytes], ...]
    snapshot: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of its checkpoints."""
        return [name for name, _ in self.checkpoints]


def _epoch(folder: str) -> int:
    return int(loop_name(folder).removeprefix("epoch-"))


class CrashingRun(RuleBasedStateMachine):
    """A run, and what it must resume from."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = private_folder()
        self.store = LocalRunStore(f"{self._folder.name}/run")
        self.uploads = 0
        self.commits: dict[tuple[int, int], Committed] = {}

    @initialize(keep=st.sampled_from([None, 1, 2]))
    def start(self, keep: int | None) -> None:
        """A run keeps so many checkpoints."""
        self.keep = keep

    @rule(
        epochs=st.integers(1, 3),
        dies_in=st.sampled_from(["begin", "upload", "commit", "deletion", "next epoch"]),
        after=st.integers(0, 15),
    )
    def train(self, epochs: int, dies_in: str, after: int) -> None:
        """An attempt trains for some epochs and dies after some operations in one phase of the last of them."""
        store = MortalStore(self.store.path)
        expected = self._newest_whole()
        try:
            if dies_in == "begin":
                store.die_after(2 * after)
            begun = begin(store, claim(driver_restarts=1000, max_attempts_without_progress=10**6))
            resumed = self._contents(begun.point.snapshot)
            assert resumed[-1:] == expected[-1:], f"resumed from {resumed[-1:]} instead of {expected[-1:]}"
            assert set(resumed) <= set(expected), f"mixed: {resumed} instead of {expected}"
            remove_interrupted_uploads(store, begun.attempt)
            training = Training(store, begun.attempt, self.keep)
            epoch = _epoch(resumed[-1][0]) if resumed else 0
            contents = dict(resumed)
            for number in range(1, 1 + epochs):
                phase = dies_in if number == epochs else ""
                name = physical_name(f"epoch-{epoch + number}", begun.attempt, report=number)
                self._train_epoch(training, name, contents, phase, after)
        except Died:
            pass
        except AttemptFailedError as error:
            if "no commit of" not in str(error):
                raise
            assert not any(self._is_readable(commit) for commit in all_commits(self.store))
            assert expected == []
            for folder in self.store.folders():  # as the message says
                if folder != layout.STATE_FOLDER:
                    self.store.delete_folder(folder)

    def _is_readable(self, commit: tuple[int, int]) -> bool:
        return decode(CommitRecord, self.store.read(layout.commit_name(*commit))) is not None

    def _train_epoch(self, training: Training, name: str, contents: dict[str, bytes], dies_in: str, after: int) -> None:
        store = training.store
        assert isinstance(store, MortalStore)
        self.uploads += 1
        content = b"%08d" % self.uploads
        if dies_in == "upload":
            store.die_after(after % (RANKS + 1))
        training.begin_upload(name)
        for rank in range(RANKS):
            store.replace(f"{name}/rank-{rank}.pt", content)
        contents[name] = content
        before = checkpoint_names(training.snapshot)
        kept = [*before, name][-self.keep :] if self.keep else [*before, name]
        known = set(all_commits(self.store))
        if dies_in in ("upload", "commit"):
            store.die_after(after)
        try:
            training.commit(name)
        finally:
            for number in set(all_commits(self.store)) - known:
                record = decode(CommitRecord, self.store.read(layout.commit_name(*number)))
                assert record is not None
                checkpoints = tuple((kept_name, contents[kept_name]) for kept_name in kept)
                self.commits[number] = Committed(number, checkpoints, record.snapshot)
        if dies_in == "deletion":
            store.die_after(after)
        for old in sorted(set(before) - set(kept)):
            store.delete_folder(old)

    @precondition(lambda self: self.commits)
    @rule(what=st.sampled_from(DAMAGES), newest=st.sampled_from([0, 0, 1]), rank=st.integers(0, RANKS - 1))
    def damage(self, what: str, newest: int, rank: int) -> None:
        """Something happens to the newest commit, to Ray's file, or to one of the two newest checkpoints."""
        epochs = sorted(
            (name for name in self.store.folders() if name.startswith("epoch-")),
            key=lambda name: (-_epoch(name), -(written_by(name) or 0)),
        )
        if what == "commit torn":
            for attempt, sequence in itertools.islice(RunDirectory(self.store).lineage, 1):
                tear(self.store, layout.commit_name(attempt, sequence))
        elif what == "snapshot missing":
            self.store.delete(layout.SNAPSHOT)
        elif what == "snapshot foreign":
            self.store.replace(layout.SNAPSHOT, b'{"checkpoint_results": []}')
        elif what == "snapshot torn" and self.store.read(layout.SNAPSHOT) is not None:
            tear(self.store, layout.SNAPSHOT)
        elif len(epochs) <= newest:
            return
        elif what == "checkpoint missing":
            self.store.delete_folder(epochs[newest])
        elif what == "file missing":
            self.store.delete(f"{epochs[newest]}/rank-{rank}.pt")
        elif what == "file torn" and self.store.read(f"{epochs[newest]}/rank-{rank}.pt") is not None:
            tear(self.store, f"{epochs[newest]}/rank-{rank}.pt")

    @invariant()
    def nothing_is_left_half_written(self) -> None:
        """No operation leaves a temporary file behind."""
        assert not list(Path(self.store.path).rglob(".tmp-*"))

    def teardown(self) -> None:
        """The run can still be resumed, and then it is whole."""
        try:
            if hasattr(self, "keep"):
                self.train(1, "never", 0)
                if self._newest_whole() == []:  # it was refused, and the folders are moved away now
                    self.train(1, "never", 0)
                snapshot = parse_snapshot(self.store.read(layout.SNAPSHOT))
                assert self._contents(snapshot) == self._newest_whole() != []
        finally:
            self._folder.cleanup()

    def _newest_whole(self) -> list[tuple[str, bytes]]:
        """Give the checkpoints of the newest commit that is whole and has any that are, those that are."""
        for number in RunDirectory(self.store).lineage:
            if not self._is_readable(number):
                continue
            whole = [(name, content) for name, content in self.commits[number].checkpoints if self._is(name, content)]
            if whole:
                return whole
        return []

    def _is(self, name: str, content: bytes) -> bool:
        return all(self.store.read(f"{name}/rank-{rank}.pt") == content for rank in range(RANKS))

    def _contents(self, snapshot: dict[str, Any] | None) -> list[tuple[str, bytes]]:
        """Give the checkpoints of a snapshot and what is in them; what ranks disagree on is no content."""
        found = []
        for name in checkpoint_names(snapshot) if snapshot else []:
            ranks = {self.store.read(f"{name}/rank-{rank}.pt") for rank in range(RANKS)}
            assert len(ranks) == 1, f"{name} is of two attempts: {ranks}"
            found.append((name, ranks.pop() or b""))
        return found


CrashingRun.TestCase.settings = settings(examples(20), stateful_step_count=8)
test_a_run_resumes_from_its_newest_whole_checkpoint_whatever_dies_or_is_damaged = CrashingRun.TestCase
