"""Names inside a run directory."""

from __future__ import annotations

import re

#: Ray Train's own file; ours is a mirror of the newest commit.
SNAPSHOT = "checkpoint_manager_snapshot.json"
STATE_FOLDER = ".elastic_train"
RUN = f"{STATE_FOLDER}/run.json"
ATTEMPTS = f"{STATE_FOLDER}/attempts"
ENDED = f"{STATE_FOLDER}/ended"
COMMITS = f"{STATE_FOLDER}/commits"
EVENTS = f"{STATE_FOLDER}/events"
HEARTBEAT = f"{STATE_FOLDER}/heartbeat.json"
LOGS = f"{STATE_FOLDER}/logs"

_NUMBERS = re.compile(r"^(\d{4,})(?:-(\d{6,}))?\.json$")


def attempt_name(attempt: int) -> str:
    """Return the object that fences off all attempts before this one."""
    return f"{ATTEMPTS}/{attempt:04d}.json"


def ended_name(attempt: int) -> str:
    """Return the object that tells how an attempt ended."""
    return f"{ENDED}/{attempt:04d}.json"


def details_name(attempt: int) -> str:
    """Return the object with what Ray said itself in an attempt in which something failed."""
    return f"{LOGS}/{attempt:04d}.log"


def commit_name(attempt: int, sequence: int) -> str:
    """Return the object that holds an attempt's commit."""
    return f"{COMMITS}/{attempt:04d}-{sequence:06d}.json"


def parse_numbers(name: str) -> tuple[int, ...]:
    """Return attempt and, of a commit, sequence number of an object's name; nothing for a foreign object."""
    match = _NUMBERS.match(name)
    return tuple(int(number) for number in match.groups() if number) if match else ()
