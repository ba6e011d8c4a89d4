"""Check the samples that the steps of a run have seen: their indices, by the digests that its checkpoints carry.

What the dataset returned for an index is not known.
"""

from __future__ import annotations

import io
import json
from typing import Any
from zipfile import BadZipFile

import numpy as np
from pydantic import BaseModel

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.loop.ledger import Digest, Ledger, combine
from prefect_elastic_train.loop.order import SampleOrder, StepBatches
from prefect_elastic_train.loop.parts import rank_file
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.snapshots import checkpoint_names

_TOLD_STEPS, _STEPS_AT_ONCE = 10, 10_000


class SampleCheck(BaseModel, frozen=True):
    """What the checkpoints of a run say of the samples that its steps have seen. Steps count from 0."""

    name: str
    #: Of the newest checkpoint: how many steps are done, with how many this run began, and what those in between saw.
    steps: int = 0
    began_at: int = 0
    samples: int = 0
    #: Steps that a kept checkpoint has a digest of, and those of them that have not seen exactly their samples.
    checked: int = 0
    wrong: list[int] = []
    exact: bool = False  # whether all steps together have seen exactly their samples
    unknown: str = ""  # why nothing of this is known, if so

    @property
    def words(self) -> str:
        """What is found, in a line."""
        if self.unknown:
            return self.unknown
        seen = f"steps {self.began_at} to {self.steps - 1} saw {self.samples:,} samples"
        if self.exact and not self.wrong:
            return f"{seen}: exactly theirs, by index"
        known = ", ".join(map(str, self.wrong[:_TOLD_STEPS])) + (", ..." if len(self.wrong) > _TOLD_STEPS else "")
        where = f"steps {known}" if self.wrong else "steps before the oldest checkpoint that is kept"
        return f"{seen}, and NOT exactly theirs: {where}"


class _NotKnownError(Exception):
    """Nothing says which samples were seen."""


def check_samples(run: RunDirectory) -> SampleCheck | None:
    """Recompute the order of a run's samples (0.3 µs each), and compare; None for a run without a checkpoint."""
    commit = run.newest_commit
    folders = checkpoint_names(commit.snapshot if commit is not None else None)
    if not folders:
        return None
    found: dict[int, bool] = {}
    about: dict[str, Any] = {}
    total = np.zeros(3, dtype=np.uint64)
    for folder in folders:  # the newest last
        try:
            about, parts = _read(run, folder)
        except _NotKnownError as error:
            return SampleCheck(name=run.name, unknown=f"which samples were seen is not known: {error}")
        order, steps = SampleOrder(**about["order"]), combine(part["steps"] for part in parts)
        since = int(parts[0]["since"])
        is_right = (steps == _exact(order, range(since, since + len(steps)))).all(axis=1)
        found |= dict(enumerate(is_right.tolist(), start=since))
        total = combine([*(part["total"] for part in parts), *steps])
    done = range(about["began_at"], about["step"])
    some = (done[at : at + _STEPS_AT_ONCE] for at in range(0, len(done), _STEPS_AT_ONCE))
    expected = combine(combine(_exact(order, steps)) for steps in some)
    return SampleCheck(
        name=run.name,
        steps=about["step"],
        began_at=about["began_at"],
        samples=int(total[0]),
        checked=len(found),
        wrong=sorted(step for step, is_right in found.items() if not is_right),
        exact=np.array_equal(total, expected),
    )


def _exact(order: SampleOrder, steps: range) -> Digest:
    """Return the digests of steps that have seen exactly their samples."""
    ledger = Ledger(steps.start)
    for step, samples in zip(steps, StepBatches(order, steps).arrays(), strict=True):
        ledger.add(samples, step)
    found: Digest = ledger.close(steps.stop)["steps"]
    return found


def _read(run: RunDirectory, folder: str) -> tuple[dict[str, Any], list[dict[str, Digest]]]:
    about = json.loads(run.store.read(f"{folder}/{SESSION_FILE}") or b"{}")
    if "order" not in about:
        why = "only a loop that takes its batches from prefect_elastic_train.loop.session notes them"
        raise _NotKnownError(f"checkpoint {loop_name(folder)} does not say, as {why}")
    return about, [_part(run, folder, rank, about["world_size"]) for rank in range(about["world_size"])]


def _part(run: RunDirectory, folder: str, rank: int, world_size: int) -> dict[str, Digest]:
    content = run.store.read(str(rank_file(folder, rank, world_size))) or b""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as part:
            return {name: part[name] for name in ("since", "total", "steps")}
    except (EOFError, KeyError, ValueError, BadZipFile) as error:
        what = f"{rank_file('', rank, world_size)} of checkpoint {loop_name(folder)} is missing or damaged"
        raise _NotKnownError(f"{what} ({type(error).__name__})") from error
