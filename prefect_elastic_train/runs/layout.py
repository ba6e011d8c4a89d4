"""Names of the objects in a run directory."""

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own file; a mirror of the newest full commit
STATE_FOLDER = ".elastic_train"
RUN = f"{STATE_FOLDER}/run.json"
ATTEMPTS = f"{STATE_FOLDER}/attempts"
COMMITS = f"{STATE_FOLDER}/commits"
EVENTS = f"{STATE_FOLDER}/events"
HEARTBEAT = f"{STATE_FOLDER}/heartbeat.json"

CommitId = tuple[int, int]  # the attempt that wrote a commit, and the commit's sequence number in that attempt


def attempt_name(attempt: int) -> str:
    """Return the name of the object that records the start of an attempt, and so fences off all earlier attempts."""
    return f"{ATTEMPTS}/{attempt:04d}.json"


def ended_name(attempt: int) -> str:
    """Return the name of the object that records the outcome of an attempt."""
    return f"{STATE_FOLDER}/ended/{attempt:04d}.json"


def details_name(attempt: int) -> str:
    """Return the name of the object that holds Ray's own output of an attempt. It is written after a failure."""
    return f"{STATE_FOLDER}/logs/{attempt:04d}.log"


def commit_name(commit: CommitId) -> str:
    """Return the name of the object that holds a commit."""
    return f"{COMMITS}/{commit_label(commit)}.json"


def commit_label(commit: CommitId | None) -> str:
    """Return the text that messages and object names use for a commit, such as ``0002-000042``; empty for None."""
    return "" if commit is None else f"{commit[0]:04d}-{commit[1]:06d}"
