"""One model of a run directory: its attempts, the commits that count, where a resume starts, and what is left over.

Whoever asks what is true of a run asks here: a resume, ``resume_from``, results and ``elastic-train runs``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.core.events import CheckpointCommitted
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import (
    AttemptRecord,
    CommitRecord,
    EndedRecord,
    Heartbeat,
    RunRecord,
    decode,
)
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import (
    ReadCommit,
    all_attempts,
    all_commits,
    dropped_by,
    newest_commit,
    read_lineage,
)
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.snapshots import checkpoint_names, latest_checkpoint, parse_snapshot
from prefect_elastic_train.runs.view import RunReader, RunView, once

#: Attempt and number of the commit that a run begins with that starts from another's checkpoint.
SEED_COMMIT = (0, 0)
#: Whose the attempt is that holds a run while `elastic-train runs prune` deletes it.
PRUNER = "elastic-train runs prune"
#: What :func:`mirror_state` finds where all is well.
MIRRORS = "mirrors the newest commit"
#: How Ray Train calls a checkpoint that the loop gives no name.
_RAYS_NAME = re.compile(r"checkpoint_\d")


@dataclass(frozen=True)
class Attempt:
    """An attempt that ever began.

    Attributes:
        number: Which one.
        record: How it began; None if its record is torn.
        ended: How it ended; None if it has not, or if that record is torn.
    """

    number: int
    record: AttemptRecord | None
    ended: EndedRecord | None

    @property
    def outcome(self) -> str:
        """How it ended, empty without an end."""
        return self.ended.outcome if self.ended is not None else ""

    @property
    def is_pruner(self) -> bool:
        """Whether it holds the run while that is deleted."""
        return self.record is not None and self.record.owner.flow_run_id == PRUNER


@dataclass(frozen=True)
class ResumePoint:
    """What an attempt starts from.

    Attributes:
        commit: The commit, as far as it is whole; None for the beginning.
        dropped: Names of damaged checkpoints on the way there.
        repairs: What was repaired or dropped to get there, in words.
        regained: The commit's object is lost, and was put together again from Ray's file.
    """

    commit: CommitRecord | None = None
    dropped: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    regained: bool = False

    @property
    def base(self) -> tuple[int, int] | None:
        """Attempt and sequence of the commit; None for the beginning."""
        return (self.commit.attempt, self.commit.sequence) if self.commit is not None else None

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """Ray's snapshot to start from; None for the beginning."""
        return self.commit.snapshot if self.commit is not None else None

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint folder that training resumes from, empty for the beginning."""
        latest = latest_checkpoint(self.snapshot) if self.snapshot else None
        return latest["checkpoint_dir_name"] if latest else ""

    @property
    def inherited_metrics(self) -> dict[str, Any]:
        """What was reported with the checkpoint if it is another run's and was copied; else nothing."""
        latest = latest_checkpoint(self.snapshot) if self.snapshot and self.base == SEED_COMMIT else None
        return (latest["metrics"] or {}) if latest else {}


@dataclass(frozen=True)
class Leftover:
    """A folder that no commit needs.

    Attributes:
        folder: Its name.
        kind: ``upload`` (begun, never committed), ``condemned`` (no longer kept, its deletion did not come to its
            end), ``dropped`` (damaged, given up by an attempt), or ``unnamed`` (nothing tells whose it is).
        reason: Why nobody needs it, in words.
        size_bytes: Of its files.
    """

    folder: str
    kind: str
    reason: str
    size_bytes: int


class RunDirectory(RunView):
    """A run directory as it was when it was first asked for each thing. Nothing is written. For one thread.

    Args:
        store: The run directory.
        attempt: Take the run as this attempt found it when it began, and what it has done since; later attempts are
            not looked at. Default: all.
    """

    def __init__(self, store: RunReader, attempt: int | None = None) -> None:
        super().__init__(store)
        self._attempt = attempt

    @once
    def record(self) -> RunRecord | None:
        """What the run is; None if nobody has claimed it, or if that is torn."""
        return decode(RunRecord, self.read(layout.RUN))

    @property
    def started_from(self) -> str:
        """URI of the checkpoint of another run that it started from, empty for none. It may be gone by now."""
        source = (self.record.source if self.record is not None else "") or ""
        return f"{self.uri.rpartition('/')[0]}/{source.replace('@', '/', 1)}" if source else ""

    @property
    def is_begun(self) -> bool:
        """Whether anything of ours is there."""
        return bool(all_attempts(self) or all_commits(self) or self.read(layout.RUN) is not None)

    @once
    def attempts(self) -> list[Attempt]:
        """All attempts, the newest last."""
        return [self._read_attempt(number) for number in all_attempts(self) if number <= (self._attempt or number)]

    @once
    def newest_attempt(self) -> Attempt | None:
        """The attempt that holds the fence; the only one that is read for this."""
        numbers = all_attempts(self)
        return self._read_attempt(numbers[-1]) if numbers else None

    @once
    def newest_commit(self) -> CommitRecord | None:
        """Newest commit that counts and has a checkpoint left, by the records alone: no file was looked at."""
        return newest_commit(self, self._attempt)

    @once
    def commits(self) -> list[ReadCommit]:
        """The commits that count, newest first, each held against the files that it lists."""
        return list(read_lineage(self, self._attempt, whole=True))

    @once
    def resume_point(self) -> ResumePoint:
        """The newest commit of the valid lineage with a whole checkpoint, without what is damaged.

        Raises:
            AttemptFailedError: No commit can be read, and there are checkpoints; outcome ``invalid``.
        """
        repairs: list[str] = []
        dropped: list[str] = []
        for read in read_lineage(self, self._attempt, whole=True):
            if read.record is None:
                repairs.append(f"commit {read.label} is {read.problem} and was passed over")
                continue
            if read.problem:
                repairs.append(
                    f"commit {read.label} was {read.problem} and was written anew from Ray's snapshot; the files of "
                    f"{loop_name(checkpoint_names(read.record.snapshot)[-1])} could not be checked"
                )
            dropped += read.damaged
            repairs += [f"checkpoint {loop_name(name)} was dropped: {why}" for name, why in read.damaged.items()]
            usable = read.usable
            if usable is not None:
                return ResumePoint(usable, dropped, repairs, regained=bool(read.problem))
            repairs.append(f"commit {read.label} has no whole checkpoint left and was passed over")
        if not any(decode(CommitRecord, self.read(layout.commit_name(*commit))) for commit in all_commits(self)):
            self._check_nothing_is_given_up()
        return ResumePoint(None, dropped, repairs)

    @once
    def leftovers(self) -> list[Leftover]:
        """Folders that no commit needs, by name.

        While something is broken, whatever any commit or Ray's file names is needed; while the newest commit cannot be
        read, everything is.

        Raises:
            AttemptFailedError: See :attr:`resume_point`.
        """
        newest = next(read_lineage(self, self._attempt), None)
        if newest is not None and newest.record is None:
            return []
        kept = checkpoint_names(self.newest_commit.snapshot) if self.newest_commit is not None else []
        folders = [folder for folder in self._folders() if not _overlaps(folder, kept)]
        needed = self._needed() if folders else []
        return [self._leftover(folder) for folder in folders if not _overlaps(folder, needed)]

    @property
    def newest_writer(self) -> int:
        """Highest attempt that a checkpoint's folder is of; 0 if there is none."""
        return max((written_by(folder) or 0 for folder in self._folders()), default=0)

    def torn_records(self) -> Iterator[str]:
        """Yield which records cannot be read, in words; a resume does without them."""
        if self.record is None:
            yield "run.json is torn or missing; a resume writes it anew"
        for attempt in self.attempts:
            if attempt.record is None:
                yield f"the record of attempt {attempt.number} is torn; what it has committed speaks for it"
            if attempt.ended is None and self.read(layout.ended_name(attempt.number)) is not None:
                yield f"the record of the end of attempt {attempt.number} is torn; it counts as not ended"
        beat = self.read(layout.HEARTBEAT)
        if beat is not None and decode(Heartbeat, beat) is None:
            yield "heartbeat.json is torn; the next beat replaces it"

    def _read_attempt(self, number: int) -> Attempt:
        record = decode(AttemptRecord, self.read(layout.attempt_name(number)))
        return Attempt(number, record, decode(EndedRecord, self.read(layout.ended_name(number))))

    def _folders(self, within: str = "", depth: int = 3) -> Iterator[str]:
        """Yield the folders that may be checkpoints; a loop may have named them with slashes."""
        for name in self.folders(within):
            folder = f"{within}/{name}" if within else name
            if folder == layout.STATE_FOLDER or (written_by(folder) or 0) > (self._attempt or math.inf):
                continue
            inner = list(self._folders(folder, depth - 1)) if depth and written_by(folder) is None else []
            ours = [one for one in inner if written_by(one) is not None]
            yield from ours or [folder]

    def _leftover(self, folder: str) -> Leftover:
        attempt = written_by(folder)
        dropped = {name: why for one in self.attempts for name, why in dropped_by(self, one.number).items()}
        if folder in dropped:
            kind, reason = "dropped", dropped[folder]
        elif folder in self._named:
            kind, reason = "condemned", "no commit keeps it any longer, and its deletion did not come to its end"
        elif attempt is None:
            kind, reason = "unnamed", "no commit names it, and nothing tells whose it is"
        else:
            begun = f"attempt {attempt} began its upload" if attempt else "its copy was begun"
            kind, reason = "upload", f"{begun}, and no commit names it"
        return Leftover(folder, kind, reason, sum((self.file_sizes(folder) or {}).values()))

    @once
    def _named(self) -> set[str]:
        """Checkpoints that any commit names, whether it counts or not."""
        records = (decode(CommitRecord, self.read(layout.commit_name(*commit))) for commit in all_commits(self))
        return {name for record in records if record is not None for name in record.manifest}

    def _needed(self) -> list[str]:
        """Return the checkpoints that a resume may want."""
        point = self.resume_point
        snapshots = [point.snapshot]
        if point.repairs:
            snapshots.append(parse_snapshot(self.read(layout.SNAPSHOT)))
            snapshots += [commit.record.snapshot for commit in self.commits if commit.record is not None]
        return [name for snapshot in snapshots if snapshot is not None for name in checkpoint_names(snapshot)]

    def _check_nothing_is_given_up(self) -> None:
        """Refuse to begin anew over checkpoints that only lost commits could tell apart from interrupted uploads."""
        left = [folder for folder in self._folders() if self.file_sizes(folder)]
        snapshot = parse_snapshot(self.read(layout.SNAPSHOT))
        named = checkpoint_names(snapshot) if snapshot is not None else []
        if not self._has_ever_committed() and not any(_overlaps(folder, named) for folder in left):
            # Interrupted uploads, and folders that a person or the loop itself has made.
            left = [folder for folder in left if _RAYS_NAME.match(folder) and written_by(folder) is None]
        if not left:
            return
        shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
        ways = [f"bring the files in {layout.COMMITS} back", "move the folders away to begin anew"]
        if snapshot is not None:
            ways.append(
                f"move {layout.STATE_FOLDER} away and give resume=True to trust Ray's snapshot, which is readable"
            )
        raise AttemptFailedError(
            f"no commit of {self.uri} is left or readable, and it holds {len(left)} folders that may be checkpoints "
            f"({shown}). Nothing was touched. Either {', or '.join(ways)}, or give another run_name",
            outcome=Outcome.INVALID,
        )

    def _has_ever_committed(self) -> bool:
        """Whether there are traces of commits, which may be lost by now. Ray's file is written after one."""
        if all_commits(self) or any(one.record is not None and one.record.base is not None for one in self.attempts):
            return True
        return any(isinstance(event, CheckpointCommitted) for event in read_history(self))


def mirror_state(store: RunReader, point: ResumePoint) -> str:
    """How Ray's file stands to the commit that it should mirror.

    Returns:
        :data:`MIRRORS`, ``missing``, ``torn``, ``differs``, or empty where there is none and none is to be.
    """
    data = store.read(layout.SNAPSHOT)
    if data is None:
        return "missing" if point.snapshot is not None else ""
    snapshot = parse_snapshot(data)
    if snapshot is None:
        return "torn"
    # As text, since a metric may be NaN, which equals nothing.
    return MIRRORS if json.dumps(snapshot) == json.dumps(point.snapshot) else "differs"


def _overlaps(folder: str, names: Iterable[str]) -> bool:
    """Whether a folder is, holds, or is part of one of those."""
    return any(f"{folder}/".startswith(f"{name}/") or f"{name}/".startswith(f"{folder}/") for name in names)
