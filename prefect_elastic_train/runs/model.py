"""One model of a run directory: its attempts, the commits that count, where a resume starts, and what is left over.

Whoever asks what is true of a run asks here: the fence, a resume, ``resume_from``, results and ``elastic-train runs``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.core.events import CheckpointCommitted
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import (
    AttemptRecord,
    CommitRecord,
    EndedRecord,
    Fingerprint,
    Owner,
    RunRecord,
    decode,
)
from prefect_elastic_train.core.scores import score_of
from prefect_elastic_train.loop.parts import missing_parts
from prefect_elastic_train.runs import layout, snapshots
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.storage.store import RunStore

SEED_COMMIT = (0, 0)  # attempt and number of the commit that a run begins with that starts from another's checkpoint
PRUNER = "elastic-train runs prune"  # whose the attempt is that holds a run while `elastic-train runs prune` deletes it
#: Number of newest attempts, or commits, that are read where older ones do not matter.
RECENT = 10
_RAYS_NAME = re.compile(r"checkpoint_\d")  # how Ray Train calls a checkpoint that the loop gives no name
_ATTEMPT = re.compile(r"(\d{4,})\.json")
_COMMIT = re.compile(r"(\d{4,})-(\d{6,})\.json")


def all_attempts(store: RunStore | RunDirectory) -> list[int]:
    """Return the numbers of all attempts that ever began, ascending."""
    found = map(_ATTEMPT.fullmatch, store.names(layout.ATTEMPTS))
    return sorted(int(match[1]) for match in found if match)


def newest_attempt(store: RunStore) -> int:
    """Return the number of the attempt that holds the fence, 0 if none ever began."""
    return max(all_attempts(store), default=0)


def all_commits(store: RunStore | RunDirectory) -> list[tuple[int, int]]:
    """Return attempt and sequence number of all commits, ascending."""
    found = map(_COMMIT.fullmatch, store.names(layout.COMMITS))
    return sorted((int(match[1]), int(match[2])) for match in found if match)


class Attempt(BaseModel, frozen=True, ser_json_inf_nan="null"):
    """An attempt that ever began: how it began and how it ended, each None if there is no such record or a torn one."""

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

    commit: CommitRecord | None = None  # as far as it is whole; None for the beginning
    dropped: list[str] = field(default_factory=list)  # names of damaged checkpoints on the way there
    repairs: list[str] = field(default_factory=list)  # what was repaired or dropped to get there, in words

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
        latest = snapshots.latest_checkpoint(self.snapshot)
        return latest["checkpoint_dir_name"] if latest else ""

    @property
    def inherited_metrics(self) -> dict[str, Any]:
        """What was reported with the checkpoint if it is another run's and was copied; else nothing."""
        latest = snapshots.latest_checkpoint(self.snapshot) if self.base == SEED_COMMIT else None
        return (latest or {}).get("metrics") or {}


class RunDirectory:
    """A run directory as it was when it was first asked for each thing. Nothing is written.

    With an attempt, it is as that found it when it began, with what it has done since. Ray's file is no answer to that:
    a holder that was stopped for a while may mirror its last commit there after it was fenced off.
    """

    def __init__(self, store: RunStore, attempt: int | None = None) -> None:
        self.store = store
        self.uri = store.uri
        self.name = store.path.rpartition("/")[2]
        self._upto = math.inf if attempt is None else attempt
        # Not as cached properties, which wait for one another: many runs are looked at, at a time.
        self.read: Callable[[str], bytes | None] = cache(store.read)
        self.names: Callable[[str], list[str]] = cache(store.names)
        self.commit = cache(self.commit)  # type: ignore[method-assign]
        self._files = cache(lambda: _by_folder(store.file_sizes("") or {}))
        self._outermost = cache(store.folders)  # without a file, too, if an upload has got as far as that

    @property
    def record(self) -> RunRecord | None:
        """What the run is; None if nobody has claimed it, or if that is torn."""
        return decode(RunRecord, self.read(layout.RUN))

    @property
    def owner(self) -> Owner | None:
        """Whose run it is: of the newest attempt that can be read, else its creator; None if nothing tells."""
        if self.newest_record is not None:
            return self.newest_record.owner
        return self.record.creator if self.record is not None else None

    @property
    def newest_record(self) -> AttemptRecord | None:
        """The record of the newest attempt that has one which can be read."""
        return next(filter(None, map(self.attempt_record, reversed(self.numbers))), None)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The configuration of the newest attempt, else that with which the run was created; None if both are lost."""
        newest = self.newest_record.fingerprint if self.newest_record is not None else None
        return newest or (self.record.fingerprint if self.record is not None else None)

    @property
    def started_from(self) -> str:
        """URI of the checkpoint of another run that it started from, empty for none. It may be gone by now."""
        source = (self.record.source if self.record is not None else "") or ""
        return f"{self.uri.rpartition('/')[0]}/{source.replace('@', '/', 1)}" if source else ""

    @property
    def is_begun(self) -> bool:
        """Whether anything of ours is there."""
        return bool(self.numbers or self.commits or self.read(layout.RUN) is not None)

    @property
    def is_foreign(self) -> bool:
        """Whether Ray Train has written it, and nothing says what it is to us."""
        return self.read(layout.SNAPSHOT) is not None and self.read(layout.RUN) is None

    @property
    def numbers(self) -> list[int]:
        """Those of the attempts that ever began, ascending."""
        return [number for number in all_attempts(self) if number <= self._upto]

    @property
    def commits(self) -> list[tuple[int, int]]:
        """Attempt and sequence number of all commits, ascending."""
        return [commit for commit in all_commits(self) if commit[0] <= self._upto]

    @property
    def newest_attempt(self) -> Attempt | None:
        """The attempt that holds the fence; the only one that is read for this."""
        return self.attempt(self.numbers[-1]) if self.numbers else None

    @property
    def next_number(self) -> int:
        """The next attempt's. A number is never used again, also if somebody has removed the record of its attempt."""
        writers = [written_by(folder) or 0 for folder in self._folders]
        return max([0, *self.numbers, *(number for number, _ in self.commits), *writers]) + 1

    @property
    def mirror(self) -> dict[str, Any] | None:
        """Ray's own snapshot; None if there is none, or a torn one."""
        return snapshots.parse_snapshot(self.read(layout.SNAPSHOT))

    @property
    def lineage(self) -> Iterator[tuple[int, int]]:
        """The commits that count, newest first: the newest attempt's, those up to its confirmed base, and so on."""
        upto: tuple[float, float] = (math.inf, math.inf)
        known = self.commits
        # An attempt's record may have been removed by hand; its commits still tell that it was there.
        for attempt in sorted({*self.numbers, *(number for number, _ in known)}, reverse=True):
            if attempt > upto[0]:
                continue
            yield from (commit for commit in reversed(known) if commit[0] == attempt and commit <= upto)
            record = self.attempt_record(attempt)
            if record is not None and record.confirmed:
                if record.base is None:
                    return
                upto = record.base
                known = sorted({*known, record.base})  # a listing may be behind

    @property
    def newest_commit(self) -> CommitRecord | None:
        """Newest commit that counts and has a checkpoint left, by the records alone: no file was looked at."""
        return self.look_back(whole=False).commit

    @property
    def resume_point(self) -> ResumePoint:
        """The newest commit of the valid lineage with a whole checkpoint, without what is damaged.

        Raises:
            AttemptFailedError: There are checkpoints that only torn or lost commits could name; outcome ``invalid``.
        """
        point = self.look_back(whole=True)
        if point.commit is None:
            self._check_nothing_is_given_up()
        return point

    @property
    def leftovers(self) -> dict[str, int]:
        """Checkpoints' folders that no commit needs, and the size of their files in bytes.

        These are interrupted uploads, and what was dropped or is not kept any more. While something is broken, whatever
        any commit or Ray's file names is needed; while the newest commit cannot be read, everything is. What
        :attr:`resume_point` refuses is refused here.
        """
        newest = next(self.lineage, None)
        if newest is not None and self.commit(newest) is None:
            return {}
        point = self.resume_point
        is_needed = _overlapping(snapshots.checkpoint_names(point.snapshot))
        folders = [folder for folder in self._folders if not is_needed(folder)]
        if not folders:
            return {}
        ours = {
            name
            for commit in map(self.commit, self.commits[0 if point.repairs else -RECENT :])
            if commit is not None
            for name in commit.manifest
        }
        if point.repairs:
            is_needed = _overlapping([*snapshots.checkpoint_names(self.mirror), *ours])
        return {
            folder: sum(self._files().get(folder, {}).values())
            for folder in folders
            if not is_needed(folder) and (written_by(folder) is not None or folder in ours)
        }

    def attempt(self, number: int) -> Attempt:
        """Return an attempt with the records of its beginning and end."""
        ended = decode(EndedRecord, self.read(layout.ended_name(number)))
        return Attempt(number=number, record=self.attempt_record(number), ended=ended)

    def attempt_record(self, number: int) -> AttemptRecord | None:
        """Return how an attempt began; None if there is no such record, or a torn one."""
        return decode(AttemptRecord, self.read(layout.attempt_name(number)))

    def commit(self, number: tuple[int, int]) -> CommitRecord | None:
        """Return a commit, an incremental one joined with its full commit; None if it is torn.

        Raises:
            AttemptFailedError: The full commit is torn or missing; outcome ``invalid``.
        """
        record = decode(CommitRecord, self.read(layout.commit_name(*number)))
        if record is None:
            return None
        if added := record.snapshot.get("added"):
            full = self.commit((number[0], added["since"]))
            if full is None:  # then the other checkpoints that are needed are unknown
                raise refusal(
                    f"commit {layout.commit_label(number)} of {self.uri} adds to commit {added['since']} of its "
                    f"attempt, which is torn or missing in {layout.COMMITS}. Nothing was touched. Bring that file back "
                    "or, to go on from the attempt before, move this attempt's commits and checkpoints away"
                )
            for name in ("checkpoint_results", "checkpoint_report_indices"):
                added[name] = full.snapshot[name] + added[name]
            record = record.model_copy(update={"snapshot": added, "manifest": full.manifest | record.manifest})
        return record if snapshots.fits_together(record.snapshot) else None

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`; the run is listed once as a whole, and a folder without a file is none."""
        return self._files().get(folder)

    def damage_of(self, checkpoint: str, manifest: dict[str, int]) -> str:
        """What is wrong with a checkpoint's files, of which the manifest has paths and sizes; empty for nothing."""
        if incomplete := missing_parts(manifest):
            return incomplete
        sizes = dict(self.file_sizes(checkpoint) or {})
        unlisted = sorted(manifest.keys() - sizes.keys())
        for name in unlisted:  # a listing may be behind: looked up by name, up to the first that is really missing
            size = self.store.size(f"{checkpoint}/{name}")
            if size is None:
                return f"{len(unlisted)} of {len(manifest)} files are missing, first {name}"
            sizes[name] = size
        wrong = [name for name, size in sorted(manifest.items()) if sizes[name] != size]
        return f"{wrong[0]} has {sizes[wrong[0]]} bytes instead of {manifest[wrong[0]]}" if wrong else ""

    def score_attribute(self, commit: CommitRecord) -> str:
        """Return the metric by which the checkpoints of a commit are ranked, empty for none."""
        record = self.attempt_record(commit.attempt)
        return record.score_attribute if record is not None else ""

    def best_checkpoint(self, commit: CommitRecord | None) -> str:
        """Return the folder of the best checkpoint of a commit, Ray's last; empty if no checkpoint has the score."""
        if commit is None:
            return ""
        best, attribute = commit.snapshot["checkpoint_results"][-1], self.score_attribute(commit)
        has_score = not attribute or score_of(best["metrics"] or {}, attribute) is not None
        return str(best["checkpoint_dir_name"]) if has_score else ""

    def look_back(self, *, whole: bool) -> ResumePoint:
        """Return the newest commit of the lineage that has a checkpoint left, or a point without a commit.

        ``whole`` also checks the files. If no commit of the lineage is whole, the newest whole commit of an overtaken
        attempt is returned: on a mount with stale listings it may have gone on, and deleted its successor's base.
        """
        lost: set[str] = set()
        dropped: list[str] = []
        repairs: list[str] = []
        seen: set[tuple[int, int]] = set()
        overtaken = (number for number in reversed(self.commits) if whole and seen and number not in seen)
        for number in itertools.chain(self.lineage, overtaken):  # read one by one: usually the first is whole
            seen.add(number)
            later = [self.attempt_record(attempt) for attempt in self.numbers if attempt > number[0]]
            lost.update(name for record in later if record is not None for name in record.dropped)
            commit, label = self.commit(number), layout.commit_label(number)
            if commit is None:
                repairs.append(f"commit {label} is torn and was passed over")
                continue
            for name in snapshots.checkpoint_names(commit.snapshot) if whole else []:
                damage = "" if name in lost else self.damage_of(name, commit.manifest.get(name, {}))
                if damage:
                    repairs.append(f"checkpoint {loop_name(name)} was dropped: {damage}")
                    dropped.append(name)
                    lost.add(name)
            snapshot = snapshots.without_checkpoints(commit.snapshot, lost)
            if snapshot is not None:
                manifest = {name: files for name, files in commit.manifest.items() if name not in lost}
                usable = commit.model_copy(update={"snapshot": snapshot, "manifest": manifest})
                if number not in self.lineage:
                    repairs.append(
                        f"commit {label}, which an overtaken attempt wrote, is the newest whole one and is used"
                    )
                return ResumePoint(usable, dropped, repairs)
            repairs.append(f"commit {label} has no whole checkpoint left and was passed over")
        return ResumePoint(None, dropped, repairs)

    @property
    def _folders(self) -> list[str]:
        """The folders that may be checkpoints; a loop may have named them with slashes."""
        written = {folder for folder in (*self._files(), *self._outermost()) if written_by(folder) is not None}
        outermost = [folder for folder in written if written.isdisjoint(_with_parents(folder)[:-1])]
        others = {*self._outermost()} - {layout.STATE_FOLDER}
        is_known = _overlapping(outermost)
        found = [*outermost, *(folder for folder in others if not is_known(folder))]
        return sorted(folder for folder in found if (written_by(folder) or 0) <= self._upto)

    def _check_nothing_is_given_up(self) -> None:
        """Refuse to begin anew over checkpoints that only lost commits could tell apart from interrupted uploads."""
        named = snapshots.checkpoint_names(self.mirror)
        left = sorted({*self._folders, *filter(self.store.file_sizes, named)})  # the listing may be behind
        is_named = _overlapping(named)
        # Traces of commits, which may be lost by now, since an attempt began anew. Ray's file is written after one.
        begun = [one for one in map(self.attempt_record, self.numbers) if one is not None and one.confirmed]
        anew = max((one.attempt for one in begun if one.base is None), default=0)
        committed = [number for number, _ in self.commits]
        committed += [event.attempt for event in read_history(self.store) if isinstance(event, CheckpointCommitted)]
        has_committed = any(number >= anew for number in committed) or any(one.attempt > anew for one in begun)
        if not has_committed and not any(map(is_named, left)):
            # Interrupted uploads, and folders that a person or the loop itself has made.
            left = [folder for folder in left if _RAYS_NAME.match(folder) and written_by(folder) is None]
        if not left:
            return
        shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
        raise refusal(
            f"no commit of {self.uri} with a whole checkpoint is left or readable, and it holds {len(left)} folders "
            f"that may be checkpoints ({shown}). Nothing was touched. Either bring the files in {layout.COMMITS} back, "
            f"move the folders away to begin anew, move {layout.STATE_FOLDER} away and give resume=True to trust Ray's "
            "snapshot, if there is one, or give another run_name"
        )


def _by_folder(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the files below each folder, by their paths relative to it, and their sizes."""
    files: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        parts = name.split("/")
        for depth in range(len(parts)):
            files.setdefault("/".join(parts[:depth]), {})["/".join(parts[depth:])] = size
    return files


def refusal(why: str, outcome: Outcome = Outcome.INVALID) -> AttemptFailedError:
    """Return the error that says why nothing was begun."""
    return AttemptFailedError(why, outcome=outcome)


def _overlapping(names: Iterable[str]) -> Callable[[str], bool]:
    """Return what tells whether a folder is, holds, or is part of one of those, of which there may be thousands."""
    known = set(names)
    holding = {folder for name in known for folder in _with_parents(name)}
    return lambda folder: folder in holding or not known.isdisjoint(_with_parents(folder))


def _with_parents(folder: str) -> list[str]:
    """Return a folder after those that it is in."""
    return list(itertools.accumulate(folder.split("/"), "{}/{}".format))
