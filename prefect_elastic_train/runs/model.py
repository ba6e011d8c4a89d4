"""One model of a run directory: its attempts, the commits that count, where a resume starts, and what is left over.

Whoever asks what is true of a run asks here: a resume, ``resume_from``, results and ``elastic-train runs``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.core.events import CheckpointCommitted
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, CommitRecord, EndedRecord, Owner, RunRecord, decode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import (
    all_attempts,
    all_commits,
    commit_label,
    newest_commit,
    read_attempt,
    read_commit,
    read_lineage,
)
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.layout import RunReader, RunView
from prefect_elastic_train.runs.snapshots import checkpoint_names, latest_checkpoint, parse_snapshot

#: Attempt and number of the commit that a run begins with that starts from another's checkpoint.
SEED_COMMIT = (0, 0)
#: Whose the attempt is that holds a run while `elastic-train runs prune` deletes it.
PRUNER = "elastic-train runs prune"
#: How Ray Train calls a checkpoint that the loop gives no name.
_RAYS_NAME = re.compile(r"checkpoint_\d")


class Attempt(BaseModel):
    """An attempt that ever began: how it began and how it ended, each None if there is no such record or a torn one."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")

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
    """What an attempt starts from."""

    #: As far as it is whole; None for the beginning.
    commit: CommitRecord | None = None
    #: Names of damaged checkpoints on the way there.
    dropped: list[str] = field(default_factory=list)
    #: What was repaired or dropped to get there, in words.
    repairs: list[str] = field(default_factory=list)

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
        latest = latest_checkpoint(self.snapshot)
        return latest["checkpoint_dir_name"] if latest else ""

    @property
    def inherited_metrics(self) -> dict[str, Any]:
        """What was reported with the checkpoint if it is another run's and was copied; else nothing."""
        latest = latest_checkpoint(self.snapshot) if self.base == SEED_COMMIT else None
        return (latest["metrics"] or {}) if latest else {}


class RunDirectory(RunView):
    """A run directory as it was when it was first asked for each thing. Nothing is written.

    If an attempt is given, it is as that found it when it began, with what it has done since.
    """

    def __init__(self, store: RunReader, attempt: int | None = None) -> None:
        super().__init__(store)
        self._attempt = attempt

    @property
    def record(self) -> RunRecord | None:
        """What the run is; None if nobody has claimed it, or if that is torn."""
        return decode(RunRecord, self.read(layout.RUN))

    @property
    def owner(self) -> Owner | None:
        """Whose run it is: of the newest attempt that can be read, else its creator; None if nothing tells."""
        creators = [self.record.creator] if self.record is not None else []
        owners = [*creators, *(one.record.owner for one in self.attempts if one.record is not None)]
        return owners[-1] if owners else None

    @property
    def started_from(self) -> str:
        """URI of the checkpoint of another run that it started from, empty for none. It may be gone by now."""
        source = (self.record.source if self.record is not None else "") or ""
        return f"{self.uri.rpartition('/')[0]}/{source.replace('@', '/', 1)}" if source else ""

    @property
    def is_begun(self) -> bool:
        """Whether anything of ours is there."""
        return bool(all_attempts(self) or all_commits(self) or self.read(layout.RUN) is not None)

    @property
    def is_foreign(self) -> bool:
        """Whether Ray Train has written it, and nothing says what it is to us."""
        return self.read(layout.SNAPSHOT) is not None and self.read(layout.RUN) is None

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts, the newest last."""
        return [self._read_attempt(number) for number in all_attempts(self) if number <= (self._attempt or number)]

    @property
    def newest_attempt(self) -> Attempt | None:
        """The attempt that holds the fence; the only one that is read for this."""
        numbers = all_attempts(self)
        return self._read_attempt(numbers[-1]) if numbers else None

    @property
    def next_number(self) -> int:
        """The next attempt's. A number is never used again, also if somebody has removed the record of its attempt."""
        writers = [written_by(folder) or 0 for folder in self._folders()]
        return max([0, *all_attempts(self), *(number for number, _ in all_commits(self)), *writers]) + 1

    @property
    def newest_commit(self) -> CommitRecord | None:
        """Newest commit that counts and has a checkpoint left, by the records alone: no file was looked at."""
        return newest_commit(self, self._attempt)

    @property
    def mirror(self) -> dict[str, Any] | None:
        """Ray's own snapshot; None if there is none, or a torn one."""
        return parse_snapshot(self.read(layout.SNAPSHOT))

    @property
    def resume_point(self) -> ResumePoint:
        """The newest commit of the valid lineage with a whole checkpoint, without what is damaged.

        Raises:
            AttemptFailedError: No commit can be read, and there are checkpoints; outcome ``invalid``.
        """
        repairs: list[str] = []
        dropped: list[str] = []
        for read in read_lineage(self, self._attempt, whole=True):
            label = commit_label(read.number)
            if read.record is None:
                repairs.append(f"commit {label} is torn and was passed over")
                continue
            dropped += read.damaged
            repairs += [f"checkpoint {loop_name(name)} was dropped: {why}" for name, why in read.damaged.items()]
            usable = read.usable
            if usable is not None:
                return ResumePoint(usable, dropped, repairs)
            repairs.append(f"commit {label} has no whole checkpoint left and was passed over")
        if not any(read_commit(self, number) for number in all_commits(self)):
            self._check_nothing_is_given_up()
        return ResumePoint(None, dropped, repairs)

    @property
    def leftovers(self) -> dict[str, int]:
        """Checkpoints' folders that no commit needs, and the size of their files in bytes.

        These are interrupted uploads, and what was dropped or is not kept any more. While something is broken, whatever
        any commit or Ray's file names is needed; while the newest commit cannot be read, everything is.

        Raises:
            AttemptFailedError: See :attr:`resume_point`.
        """
        newest = next(read_lineage(self, self._attempt), None)
        if newest is not None and newest.record is None:
            return {}
        kept = checkpoint_names(newest.usable.snapshot) if newest is not None and newest.usable is not None else []
        folders = [folder for folder in self._folders() if not _overlaps(folder, kept)]
        needed = self._needed() if folders else []
        commits = (read_commit(self, number) for number in all_commits(self) if folders)
        ours = {name for commit in commits if commit is not None for name in commit.manifest}
        return {
            folder: sum((self.file_sizes(folder) or {}).values())
            for folder in folders
            if not _overlaps(folder, needed) and (written_by(folder) is not None or folder in ours)
        }

    def _read_attempt(self, number: int) -> Attempt:
        ended = decode(EndedRecord, self.read(layout.ended_name(number)))
        return Attempt(number=number, record=read_attempt(self, number), ended=ended)

    def _folders(self, within: str = "", depth: int = 3) -> Iterator[str]:
        """Yield the folders that may be checkpoints; a loop may have named them with slashes."""
        for name in self.folders(within):
            folder = f"{within}/{name}" if within else name
            if folder == layout.STATE_FOLDER or (written_by(folder) or 0) > (self._attempt or math.inf):
                continue
            inner = list(self._folders(folder, depth - 1)) if depth and written_by(folder) is None else []
            yield from [one for one in inner if written_by(one) is not None] or [folder]

    def _needed(self) -> list[str]:
        """Return the checkpoints that a resume may want."""
        point = self.resume_point
        snapshots = [point.snapshot]
        if point.repairs:
            reads = read_lineage(self, self._attempt)
            snapshots += [self.mirror, *(read.record.snapshot for read in reads if read.record is not None)]
        return [name for snapshot in snapshots if snapshot is not None for name in checkpoint_names(snapshot)]

    def _check_nothing_is_given_up(self) -> None:
        """Refuse to begin anew over checkpoints that only lost commits could tell apart from interrupted uploads."""
        left = [folder for folder in self._folders() if self.file_sizes(folder)]
        named = checkpoint_names(self.mirror) if self.mirror is not None else []
        if not self._has_ever_committed() and not any(_overlaps(folder, named) for folder in left):
            # Interrupted uploads, and folders that a person or the loop itself has made.
            left = [folder for folder in left if _RAYS_NAME.match(folder) and written_by(folder) is None]
        if not left:
            return
        shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
        raise AttemptFailedError(
            f"no commit of {self.uri} is left or readable, and it holds {len(left)} folders that may be checkpoints "
            f"({shown}). Nothing was touched. Either bring the files in {layout.COMMITS} back, move the folders away "
            f"to begin anew, move {layout.STATE_FOLDER} away and give resume=True to trust Ray's snapshot, if there is "
            "one, or give another run_name",
            outcome=Outcome.INVALID,
        )

    def _has_ever_committed(self) -> bool:
        """Whether there are traces of commits, which may be lost by now. Ray's file is written after one."""
        if all_commits(self) or any(one.record is not None and one.record.base is not None for one in self.attempts):
            return True
        return any(isinstance(event, CheckpointCommitted) for event in read_history(self))


def _overlaps(folder: str, names: Iterable[str]) -> bool:
    """Whether a folder is, holds, or is part of one of those."""
    return any(f"{folder}/".startswith(f"{name}/") or f"{name}/".startswith(f"{folder}/") for name in names)
