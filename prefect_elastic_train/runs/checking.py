"""Whether a run's records and checkpoints are whole, and what a resume would make of them. Nothing is written."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import ReadCommit, commit_label, lineage
from prefect_elastic_train.runs.model import Leftover, RunDirectory, mirror_state
from prefect_elastic_train.runs.snapshots import checkpoint_names, latest_checkpoint, parse_snapshot
from prefect_elastic_train.runs.view import RunReader

#: A run that is being trained goes on while it is looked at: then it is looked at anew, so often.
_LOOKS = 3


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True)


class CheckpointCheck(_Finding):
    """A checkpoint of the newest commit, held against its manifest."""

    name: str
    ok: bool
    problems: list[str] = Field(default_factory=list)
    files: int = 0
    size_bytes: int = 0
    latest: bool = False


class CommitCheck(_Finding):
    """An older commit that counts: what a resume falls back to."""

    commit: str
    #: All its checkpoints are still there as it lists them. Most are not, since Ray deletes what is not kept.
    whole: bool
    #: Those that are.
    checkpoints: list[str] = Field(default_factory=list)
    #: ``torn`` or ``another run's``, empty if it can be read.
    problem: str = ""


class Verification(_Finding):
    """What was found."""

    name: str
    uri: str
    #: A resume finds all that it needs as it was written.
    whole: bool
    #: The newest commit that counts and can be read, as ``<attempt>-<sequence>``; empty without one.
    commit: str = ""
    checkpoints: list[CheckpointCheck] = Field(default_factory=list)
    #: What a resume would do, in words; the checkpoint and the commit that it would start from, if any.
    resume: str = ""
    resume_checkpoint: str = ""
    resume_commit: str = ""
    #: What it would repair or drop to get there, in words.
    repairs: list[str] = Field(default_factory=list)
    #: Ray's snapshot: ``mirrors the newest commit``, ``missing``, ``torn``, ``differs``, or empty where there is none
    #: to be.
    snapshot: str = ""
    older_commits: list[CommitCheck] = Field(default_factory=list)
    #: Other records that cannot be read, in words; a resume does without them.
    torn_records: list[str] = Field(default_factory=list)
    leftovers: list[Leftover] = Field(default_factory=list)


def verify(store: RunReader, name: str) -> Verification | None:
    """Resume a run without doing it: check all that a resume needs, and say what it would do.

    Returns:
        None if the folder holds no run.
    """
    run = RunDirectory(store)
    found = _look(run, name)
    for _ in range(_LOOKS - 1):
        if next(lineage(store), None) == next(lineage(run), None):
            break
        run = RunDirectory(store)
        found = _look(run, name)
    return found


def _look(run: RunDirectory, name: str) -> Verification | None:
    if not run.is_begun:
        return _look_at_foreign(run, name)
    commits = run.commits
    newest = next((commit for commit in commits if commit.record is not None), None)
    found = Verification(
        name=name,
        uri=run.uri,
        whole=False,
        commit=newest.label if newest is not None else "",
        checkpoints=_check_newest(newest) if newest is not None else [],
        older_commits=[_check_older(commit) for commit in commits if commit is not newest],
        torn_records=list(run.torn_records()),
    )
    try:
        point = run.resume_point
    except AttemptFailedError as error:
        return found.model_copy(update={"resume": f"is refused: {error}"})
    checkpoint, commit = loop_name(point.checkpoint), commit_label(point.base)
    start = f"starts from checkpoint {checkpoint} of commit {commit}" if checkpoint else "begins from the beginning"
    return found.model_copy(
        update={
            "whole": not point.repairs,
            "resume": start,
            "resume_checkpoint": checkpoint,
            "resume_commit": commit,
            "repairs": point.repairs,
            "snapshot": mirror_state(run, point),
            "leftovers": run.leftovers,
        }
    )


def _look_at_foreign(run: RunDirectory, name: str) -> Verification | None:
    """Check what Ray Train alone has written, as far as it can be: it lists no files."""
    data = run.read(layout.SNAPSHOT)
    if data is None:
        return None
    snapshot = parse_snapshot(data)
    if snapshot is None:
        return Verification(name=name, uri=run.uri, whole=False, resume="is refused: it is torn", snapshot="torn")
    sizes = {checkpoint: run.file_sizes(checkpoint) or {} for checkpoint in checkpoint_names(snapshot)}
    lost = {checkpoint: "its folder is missing or empty" for checkpoint, files in sizes.items() if not files}
    return Verification(
        name=name,
        uri=run.uri,
        whole=not lost,
        checkpoints=_check(snapshot, sizes, lost, snapshot),
        resume="is refused without resume=True, which adopts what Ray Train has written",
    )


def _check_newest(commit: ReadCommit) -> list[CheckpointCheck]:
    assert commit.record is not None
    usable = commit.usable
    return _check(
        commit.record.snapshot, commit.record.manifest, commit.lost, usable.snapshot if usable is not None else {}
    )


def _check(
    snapshot: dict[str, Any], manifest: dict[str, dict[str, int]], lost: dict[str, str], usable: dict[str, Any]
) -> list[CheckpointCheck]:
    latest = (latest_checkpoint(usable) or {}).get("checkpoint_dir_name")
    return [
        CheckpointCheck(
            name=loop_name(name),
            ok=name not in lost,
            problems=[lost[name]] if name in lost else [],
            files=len(manifest.get(name, {})),
            size_bytes=sum(manifest.get(name, {}).values()),
            latest=name == latest,
        )
        for name in checkpoint_names(snapshot)
    ]


def _check_older(commit: ReadCommit) -> CommitCheck:
    if commit.record is None:
        return CommitCheck(commit=commit.label, whole=False, problem=commit.problem)
    names = checkpoint_names(commit.record.snapshot)
    there = [loop_name(name) for name in names if name not in commit.lost]
    return CommitCheck(commit=commit.label, whole=len(there) == len(names), checkpoints=there)
