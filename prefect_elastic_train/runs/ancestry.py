"""Where a run comes from: the checkpoint that it started from, the one that that one's run started from, and so on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.records import RunRecord, decode
from prefect_elastic_train.runs import layout

if TYPE_CHECKING:
    from prefect_elastic_train.storage.opening import Storage

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
            Ancestor(
                run=run, checkpoint=loop_name(checkpoint), uri=f"{store.uri}/{checkpoint}", there=record is not None
            )
        )
    return found
