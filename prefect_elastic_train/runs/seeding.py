"""Starting a new run from another run's checkpoint, which stays untouched."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from prefect_elastic_train.filesystems.opening import Storage
from prefect_elastic_train.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.runs.commits import Mark
from prefect_elastic_train.runs.identity import check_run_name
from prefect_elastic_train.runs.reading import newest_commit
from prefect_elastic_train.runs.resume import damage_of, seed_run
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.runs.store import RunStore

__all__ = ["check_source", "copy_checkpoint", "parse_source"]


def parse_source(resume_from: str) -> tuple[str, str]:
    """Give run name and choice of ``"<run>"`` or ``"<run>@latest|best|<checkpoint>"``.

    Raises:
        ConfigurationError: The run's name is not one.
    """
    name, _, choice = resume_from.partition("@")
    return check_run_name(name), choice or "latest"


def check_source(storage: Storage, resume_from: str) -> None:
    """Find out before anything starts whether there is a checkpoint to start from.

    Raises:
        AttemptFailedError: See :func:`copy_checkpoint`.
    """
    _source(storage, resume_from)


def copy_checkpoint(storage: Storage, resume_from: str, target: RunStore) -> None:
    """Copy a checkpoint of another run into a new one and commit it there.

    Args:
        storage: Where both runs are.
        resume_from: ``"<run>"`` for its latest checkpoint, ``"<run>@best"`` for the best by its score, or
            ``"<run>@<checkpoint folder>"``.
        target: The new run.

    Raises:
        AttemptFailedError: The other run does not exist or has no such checkpoint; outcome ``invalid``.
    """
    name, source, chosen, manifest = _source(storage, resume_from)
    folder = f"from-{name}-{chosen['checkpoint_dir_name'].replace('/', '-')}"
    target.delete_folder(folder)  # what an interrupted copy left behind
    # Marked like an upload, so that a copy that is cut short is known for what it is.
    Mark(0, folder).set(target)
    storage.copy_folder(f"{source.path}/{chosen['checkpoint_dir_name']}", f"{target.path}/{folder}")
    damage = damage_of(target, folder, manifest)
    if damage:
        raise AttemptFailedError(
            f"resume_from={resume_from!r}: the copy of the checkpoint is not whole: {damage}; retry the flow run",
            outcome=Outcome.STORAGE_ERROR,
        )
    seed_run(target, folder, chosen["metrics"], version("ray"))


def _source(storage: Storage, resume_from: str) -> tuple[str, RunStore, dict[str, Any], dict[str, int] | None]:
    """Give the other run's name, the run, the result that belongs to the checkpoint, and what that consists of."""
    name, choice = parse_source(resume_from)
    source = storage.run(name)
    commit = newest_commit(source)
    if commit is None:
        raise AttemptFailedError(
            f"resume_from={resume_from!r}: {source.uri} has no committed checkpoint", outcome=Outcome.INVALID
        )
    chosen = _choose(commit.snapshot, choice)
    if chosen is None:
        known = ", ".join(sorted(commit.manifest))
        raise AttemptFailedError(
            f"resume_from={resume_from!r}: run {name!r} has no checkpoint {choice!r}; it has {known}",
            outcome=Outcome.INVALID,
        )
    checkpoint = chosen["checkpoint_dir_name"]
    damage = damage_of(source, checkpoint, commit.manifest.get(checkpoint))
    if damage:
        raise AttemptFailedError(
            f"resume_from={resume_from!r}: checkpoint {checkpoint!r} of run {name!r} is damaged: {damage}; name "
            f"another one as {name}@<checkpoint>",
            outcome=Outcome.INVALID,
        )
    return name, source, chosen, commit.manifest.get(checkpoint)


def _choose(snapshot: dict[str, Any], choice: str) -> dict[str, Any] | None:
    results: list[dict[str, Any]] = snapshot["checkpoint_results"]
    if choice == "latest":
        return latest_checkpoint(snapshot)
    if choice == "best":
        return results[-1] if results else None
    return next((result for result in results if result["checkpoint_dir_name"] == choice), None)
