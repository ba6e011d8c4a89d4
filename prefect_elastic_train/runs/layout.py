"""Names inside a run directory."""

from __future__ import annotations

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own file; ours is a mirror of the newest commit
STATE_FOLDER = ".elastic_train"
RUN = f"{STATE_FOLDER}/run.json"
ATTEMPTS = f"{STATE_FOLDER}/attempts"
COMMITS = f"{STATE_FOLDER}/commits"
EVENTS = f"{STATE_FOLDER}/events"
HEARTBEAT = f"{STATE_FOLDER}/heartbeat.json"


def attempt_name(attempt: int) -> str:
    """Return the object that fences off all attempts before this one."""
    return f"{ATTEMPTS}/{attempt:04d}.json"


def ended_name(attempt: int) -> str:
    """Return the object that tells how an attempt ended."""
    return f"{STATE_FOLDER}/ended/{attempt:04d}.json"


def details_name(attempt: int) -> str:
    """Return the object with what Ray said itself in an attempt in which something failed."""
    return f"{STATE_FOLDER}/logs/{attempt:04d}.log"


def commit_name(attempt: int, sequence: int) -> str:
    """Return the object that holds an attempt's commit."""
    return f"{COMMITS}/{commit_label((attempt, sequence))}.json"


def commit_label(commit: tuple[int, int] | None) -> str:
    """Return what people call a commit: attempt and sequence number as in its object's name; empty for none."""
    return "" if commit is None else f"{commit[0]:04d}-{commit[1]:06d}"
