"""Read model of a run directory: its attempts, the commits that count, the resume point, and leftover folders.

The fence, a resume, ``resume_from``, results and ``elastic-train runs`` read a run through :class:`RunDirectory`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

from pydantic import BaseModel

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.core.events import CheckpointCommitted
from prefect_elastic_train.core.outcomes import AttemptFailedError
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
from prefect_elastic_train.loop.rank_files import missing_rank_files_message
from prefect_elastic_train.storage.store import RunStore

from . import layout, snapshots
from .history import read_history
from .layout import CommitId

SEED_COMMIT = (0, 0)  # id of the first commit of a run that starts from another run's checkpoint
PRUNER = "elastic-train runs prune"  # owner of the attempt that holds a run while it is deleted
_RAYS_NAME = re.compile(r"checkpoint_\d")  # Ray Train's name of a checkpoint to which the loop gives none
_ATTEMPT = re.compile(r"(\d{4,})\.json")
_COMMIT = re.compile(r"(\d{4,})-(\d{6,})\.json")


class RecordedAttempt(BaseModel, frozen=True):
    """The records of an attempt's start and of its end, each None if it is missing or torn."""

    number: int
    record: AttemptRecord | None = None
    ended: EndedRecord | None = None

    @property
    def owner(self) -> Owner | None:
        """Owner of the attempt; None if the record of the attempt's start is missing or torn."""
        return self.record.owner if self.record else None

    @property
    def outcome(self) -> str:
        """Outcome of the attempt; empty without a record of the attempt's end."""
        return self.ended.outcome if self.ended else ""

    @property
    def end_message(self) -> str:
        """First line of the message about the attempt's end or its exhausted budget; empty if no end is recorded."""
        message = self.ended.exhausted_budget or self.ended.message if self.ended else ""
        return message.strip().partition("\n")[0]

    @property
    def is_pruner(self) -> bool:
        """True if the attempt holds the run only while ``elastic-train runs prune`` deletes it."""
        return self.owner is not None and self.owner.flow_run_id == PRUNER


class ResumePoint(NamedTuple):
    """The commit and checkpoint that an attempt starts from."""

    commit: CommitRecord | None  # without its damaged checkpoints; None for a start from scratch
    dropped: list[str]  # names of damaged checkpoints
    repairs: list[str]  # messages about what was repaired or dropped

    @property
    def base(self) -> CommitId | None:
        """Id of the commit that the attempt starts from; None for a start from scratch."""
        return self.commit.id if self.commit else None

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint folder that training resumes from; empty for a start from scratch."""
        return self.commit.checkpoint if self.commit else ""

    @property
    def initial_metrics(self) -> dict[str, Any]:
        """Metrics of the checkpoint that training resumes from, if no attempt of this run reported them; else empty.

        The checkpoint was copied from another run, or Ray Train wrote it without this package.
        """
        return self.commit.latest["metrics"] if self.commit and self.commit.id == SEED_COMMIT else {}


class RunDirectory:
    """Read-only view of a run directory, in which each object is as it was at its first read.

    With ``attempt``, later attempts and their commits are left out: the view is the one that this attempt found when it
    started, with its own commits. Ray's snapshot file is not used for this, because an attempt that was suspended may
    write it after it was fenced off.
    """

    def __init__(self, store: RunStore, attempt: float = math.inf) -> None:
        self.store = store
        self.uri = store.uri
        self.name = store.path.rpartition("/")[2]
        self._last_attempt = attempt
        # cached_property of Python 3.10 and 3.11 holds one lock for all instances; many runs are read in parallel.
        self.read = cache(store.read)
        self.names = cache(store.names)
        self.commit = cache(self.commit)  # type: ignore[method-assign]
        self.find_resume_point = cache(self.find_resume_point)  # type: ignore[method-assign]
        self.file_sizes = cache(lambda: store.file_sizes("") or {})
        self._top_folders = cache(store.folders)  # lists folders without a file, too, as an upload may leave one

    @property
    def record(self) -> RunRecord | None:
        """Content of ``run.json``, the identity of the run; None if it is missing or torn."""
        return decode(RunRecord, self.read(layout.RUN))

    @property
    def owner(self) -> Owner | None:
        """Owner of the newest attempt whose record can be read, else the run's creator; None if neither can be read."""
        if self.newest_record:
            return self.newest_record.owner
        return self.record.creator if self.record else None

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the newest attempt whose record can be read, else that in ``run.json``; None without both."""
        newest = self.newest_record.fingerprint if self.newest_record else None
        return newest or (self.record.fingerprint if self.record else None)

    @property
    def started_from(self) -> str:
        """URI of the checkpoint of another run that this run started from; empty for none. It may be deleted by now."""
        source = self.record.source if self.record else None
        return f"{self.uri.rpartition('/')[0]}/{source.replace('@', '/', 1)}" if source else ""

    @property
    def is_begun(self) -> bool:
        """True if the run directory holds a record of this package: an attempt, a commit or ``run.json``."""
        return bool(self.attempt_numbers or self.commit_ids or self.read(layout.RUN) is not None)

    @property
    def is_foreign(self) -> bool:
        """True if Ray Train wrote the run directory without this package: it has Ray's snapshot, no ``run.json``."""
        return self.read(layout.SNAPSHOT) is not None and self.read(layout.RUN) is None

    @property
    def attempt_numbers(self) -> list[int]:
        """Numbers of all attempts of the run, ascending."""
        return [number for (number,) in self._numbered(layout.ATTEMPTS, _ATTEMPT)]

    @property
    def commit_ids(self) -> list[CommitId]:
        """Ids of all commits of the run, ascending, including commits outside the lineage."""
        return self._numbered(layout.COMMITS, _COMMIT)

    @property
    def newest_attempt(self) -> RecordedAttempt:
        """Records of the newest attempt, which holds the fence; number 0 without attempts. No other record is read."""
        return self.attempt(self.attempt_numbers[-1]) if self.attempt_numbers else RecordedAttempt(number=0)

    @property
    def newest_record(self) -> AttemptRecord | None:
        """Record of the start of the newest attempt whose record can be read; None if there is none."""
        return next(filter(None, map(self.attempt_record, reversed(self.attempt_numbers))), None)

    @property
    def next_attempt_number(self) -> int:
        """Number for the next attempt of the run.

        No number is used twice, even if an attempt's record was removed by hand.
        """
        committers = (attempt for attempt, _ in self.commit_ids)
        return max([0, *self.attempt_numbers, *committers, *map(written_by, self._folders)]) + 1

    @property
    def mirror(self) -> dict[str, Any] | None:
        """Content of Ray Train's own snapshot file, which repeats the newest full commit.

        It is None if the file is missing or torn.
        """
        return snapshots.parse_snapshot(self.read(layout.SNAPSHOT))

    @property
    def lineage(self) -> Iterator[CommitId]:
        """Ids of the commits that count, newest first.

        These are the commits of the newest attempt, then its base and the earlier commits of the attempt that wrote the
        base, and so on. Bases of unconfirmed attempts are ignored.
        """
        last = (math.inf, math.inf)
        ids = self.commit_ids
        # If an attempt's record was removed by hand, its commits still show its number.
        for attempt in sorted({*self.attempt_numbers, *(number for number, _ in ids)}, reverse=True):
            if attempt > last[0]:
                continue
            yield from (commit for commit in reversed(ids) if commit[0] == attempt and commit <= last)
            record = self.attempt_record(attempt)
            if record and record.confirmed:
                if record.base is None:
                    return
                last = record.base
                ids = sorted({*ids, record.base})  # the listing may be stale

    @property
    def newest_commit_id(self) -> CommitId | None:
        """Id of the newest commit of the lineage; None without one."""
        return next(self.lineage, None)

    @property
    def newest_commit(self) -> CommitRecord | None:
        """Newest commit of the lineage that has a checkpoint left, according to the records; files are not checked."""
        return self.find_resume_point(check_files=False).commit

    @property
    def resume_point(self) -> ResumePoint:
        """The commit and checkpoint that a new attempt would start from, with the checkpoint files checked.

        Raises:
            AttemptFailedError: The commits that name the run's checkpoints are torn or lost; outcome ``invalid``.
        """
        point = self.find_resume_point()
        if not point.commit:
            self._check_no_commit_is_lost()
        return point

    @property
    def leftovers(self) -> dict[str, int]:
        """Checkpoint folders that no commit needs, and the size of their files in bytes.

        These are interrupted uploads, dropped checkpoints, and checkpoints that are no longer kept, if their folders
        have unique names. While a repair is due, all folders are needed. Raises as :attr:`resume_point` does.
        """
        point = self.resume_point
        if point.repairs:
            return {}
        is_needed = _overlapping(snapshots.checkpoint_names(point.commit.snapshot) if point.commit else [])
        return {
            folder: sum((self.store.file_sizes(folder) or {}).values())
            for folder in self._folders
            if written_by(folder) >= 0 and not is_needed(folder)
        }

    def attempt(self, number: int) -> RecordedAttempt:
        """Return the records of the start and the end of an attempt."""
        return RecordedAttempt(
            number=number,
            ended=decode(EndedRecord, self.read(layout.ended_name(number))),
            record=self.attempt_record(number),
        )

    def attempt_record(self, number: int) -> AttemptRecord | None:
        """Return the record of an attempt's start; None if it is missing or torn."""
        return decode(AttemptRecord, self.read(layout.attempt_name(number)))

    def commit(self, commit: CommitId) -> CommitRecord | None:
        """Return the record of a commit; None if it is missing or torn.

        An incremental commit is joined with its full commit.

        Raises:
            AttemptFailedError: The full commit is missing or torn; outcome ``invalid``.
        """
        record = decode(CommitRecord, self.read(layout.commit_name(commit)))
        if not record or not snapshots.is_consistent(record.snapshot):
            return None
        if record.since:
            full = self.commit((record.attempt, record.since))
            if not full:  # the other checkpoints that are needed are unknown
                raise AttemptFailedError(
                    f"commit {layout.commit_label(commit)} of {self.uri} adds to commit {record.since} of its attempt, "
                    f"which is torn or missing in {layout.COMMITS}. Nothing was changed. Restore that file, or move "
                    "this attempt's commits and checkpoints away to resume from the attempt before"
                )
            for name in ("checkpoint_results", "checkpoint_report_indices"):
                record.snapshot[name] = full.snapshot[name] + record.snapshot[name]
            record = record.model_copy(update={"manifest": full.manifest | record.manifest})
        return record

    def damage_of(self, checkpoint: str, manifest: dict[str, int]) -> str:
        """Return a message about files of a checkpoint that are missing or have a size other than in its manifest.

        Return an empty text for an intact checkpoint.
        """
        if incomplete := missing_rank_files_message(manifest):
            return incomplete
        listed = {name: self.file_sizes().get(f"{checkpoint}/{name}") for name in manifest}
        for name, expected in sorted(manifest.items()):
            # The listing may be stale: a file that it does not have is looked up by its name.
            size = self.store.size(f"{checkpoint}/{name}") if listed[name] is None else listed[name]
            if size is None:
                return f"{[*listed.values()].count(None)} of {len(manifest)} files are missing, first {name}"
            if size != expected:
                return f"{name} has {size} bytes instead of {expected}"
        return ""

    def score_attribute(self, commit: CommitRecord) -> str:
        """Return the name of the metric that ranks the checkpoints of a commit; empty for none."""
        record = self.attempt_record(commit.attempt)
        return record.score_attribute if record else ""

    def best_checkpoint(self, commit: CommitRecord | None) -> str:
        """Return the folder of the best checkpoint of a commit; the newest one if no metric ranks checkpoints.

        Return an empty text without a commit, or if no checkpoint has the score.
        """
        if not commit:
            return ""
        best = commit.snapshot["checkpoint_results"][-1]  # Ray sorts by score, ascending
        attribute = self.score_attribute(commit)
        has_score = not attribute or score_of(best["metrics"], attribute) is not None
        return str(best["checkpoint_dir_name"]) if has_score else ""

    def find_resume_point(self, check_files: bool = True) -> ResumePoint:
        """Return the newest commit of the lineage that has a checkpoint left, or a resume point without a commit.

        With ``check_files``, checkpoints with missing or damaged files are dropped. If the lineage then has no
        checkpoint, the newest commit of an overtaken attempt that has one is used: on a mount with stale listings, that
        attempt may have continued and deleted the commit that its successor started from.
        """
        lost: set[str] = set()
        dropped = []
        repairs = []
        seen: set[CommitId] = set()
        overtaken = (number for number in reversed(self.commit_ids) if check_files and seen and number not in seen)
        for number in chain(self.lineage, overtaken):  # read one by one: usually the first is intact
            seen.add(number)
            later = (self.attempt_record(attempt) for attempt in self.attempt_numbers if attempt > number[0])
            lost.update(*(record.dropped for record in later if record))
            commit = self.commit(number)
            label = layout.commit_label(number)
            if not commit:
                repairs.append(f"commit {label} is torn and was skipped")
                continue
            for name in snapshots.checkpoint_names(commit.snapshot) if check_files else []:
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
                    repairs.append(f"commit {label} of an overtaken attempt is the newest intact one and is used")
                return ResumePoint(usable, dropped, repairs)
            repairs.append(f"commit {label} has no intact checkpoint left and was skipped")
        return ResumePoint(None, dropped, repairs)

    def _numbered(self, folder: str, pattern: re.Pattern[str]) -> list[Any]:
        """Return the numbers in those object names of a folder that match a pattern, as sorted tuples.

        The first number of each tuple is an attempt. Attempts that this view leaves out are omitted.
        """
        matches = filter(None, map(pattern.fullmatch, self.names(folder)))
        numbers = sorted(tuple(map(int, match.groups())) for match in matches)
        return [each for each in numbers if each[0] <= self._last_attempt]

    @property
    def _folders(self) -> list[str]:
        """Folders of the run that may be checkpoints, except those of attempts that this view leaves out.

        A folder's path may contain slashes, as the loop's name of a checkpoint may.
        """
        parents = chain.from_iterable(_with_parents(name)[:-1] for name in self.file_sizes())
        folders = {*self._top_folders(), *(folder for folder in parents if written_by(folder) >= 0)}
        return sorted(folder for folder in folders - {layout.STATE_FOLDER} if written_by(folder) <= self._last_attempt)

    def _check_no_commit_is_lost(self) -> None:
        """Raise an error if the run has checkpoints whose commits are lost or torn.

        Without their commits, they look like interrupted uploads, which a start from scratch would delete.
        """
        mirrored = snapshots.checkpoint_names(self.mirror)
        left = sorted({*self._folders, *filter(self.store.file_sizes, mirrored)})  # the listing may be stale

        # Search for traces of commits since the newest start from scratch. Ray's file is written after a commit.
        records = map(self.attempt_record, self.attempt_numbers)
        scratch = [record.attempt for record in records if record and record.confirmed and record.base is None]
        committed = [event.attempt for event in read_history(self.store) if isinstance(event, CheckpointCommitted)]
        is_committed = self.newest_commit_id or max(committed, default=-1) >= max(scratch, default=0)
        if not is_committed and not any(map(_overlapping(mirrored), left)):
            # The others are interrupted uploads, and folders that a person or the loop made.
            left = [folder for folder in left if _RAYS_NAME.match(folder) and written_by(folder) < 0]
        if left:
            raise AttemptFailedError(
                f"no commit of {self.uri} with an intact checkpoint is left or readable, and it holds {len(left)} "
                f"folders that may be checkpoints ({', '.join(left[:5])}). Nothing was changed. Either restore the "
                f"files in {layout.COMMITS}, move the folders away to start from scratch, move {layout.STATE_FOLDER} "
                "away and give resume=True to use Ray's snapshot, if there is one, or give another run_name"
            )


def newest_attempt_number(store: RunStore) -> int:
    """Return the number of the newest attempt of a run, which holds the fence; 0 without attempts.

    Each call lists the attempts in the storage.
    """
    return max(RunDirectory(store).attempt_numbers, default=0)


def _overlapping(names: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that is True for a folder that is, contains, or is inside one of the named folders."""
    known = set(names)
    containing = {parent for name in known for parent in _with_parents(name)}
    return lambda folder: folder in containing or not known.isdisjoint(_with_parents(folder))


def _with_parents(folder: str) -> list[str]:
    """Return the paths of a folder's parents, outermost first, and then the path of the folder itself."""
    return list(accumulate(folder.split("/"), "{}/{}".format))
