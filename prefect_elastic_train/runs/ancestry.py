"""Where a run comes from: the checkpoint that it started from, the one that that one's run started from, and so on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from prefect_elastic_train.core.records import CommitRecord, RunRecord, decode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.resume import SEED_COMMIT
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.storage.store import RunStore

if TYPE_CHECKING:
    from prefect_elastic_train.storage.opening import Storage

__all__ = ["Ancestor", "ancestors", "inherited_metrics", "started_from"]

#: More nights than anybody looks back, each of which is a request.
_MAX_ANCESTORS = 100


class Ancestor(BaseModel):
    """A checkpoint that a run started from, itself or by way of other runs."""

    model_config = ConfigDict(frozen=True)

    run: str
    checkpoint: str
    uri: str
    #: Whether its run is still there.
    there: bool


def started_from(store: RunStore) -> str:
    """Give the URI of the checkpoint that a run started from, empty for none. It may be gone by now."""
    record = decode(RunRecord, store.read(layout.RUN))
    if record is None or not record.source:
        return ""
    return f"{store.uri.rpartition('/')[0]}/{record.source.replace('@', '/', 1)}"


def inherited_metrics(commit: CommitRecord) -> dict[str, Any]:
    """Give what was reported with the checkpoint of another run, if a commit is of the copy of that; else nothing."""
    if (commit.attempt, commit.sequence) != SEED_COMMIT:
        return {}
    metrics: dict[str, Any] = (latest_checkpoint(commit.snapshot) or {}).get("metrics") or {}
    return metrics


def ancestors(storage: Storage, name: str) -> list[Ancestor]:
    """Give the checkpoints that a run comes from, the nearest first, at most a hundred.

    Args:
        storage: Where the runs are.
        name: Name of the run.

    Raises:
        StorageFaultError: The storage refuses.
    """
    found: list[Ancestor] = []
    seen = {name}
    record = decode(RunRecord, storage.run(name).read(layout.RUN))
    while record is not None and record.source and len(found) < _MAX_ANCESTORS:
        run, _, checkpoint = record.source.partition("@")
        store = storage.run(run)
        record = decode(RunRecord, store.read(layout.RUN)) if run not in seen else None  # the name was used again
        seen.add(run)
        found.append(
            Ancestor(run=run, checkpoint=checkpoint, uri=f"{store.uri}/{checkpoint}", there=record is not None)
        )
    return found
