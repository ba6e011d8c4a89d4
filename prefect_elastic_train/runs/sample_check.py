"""Check of the sample indices that the steps of a run have seen, by the digests in its checkpoints.

The data that the dataset returned for an index is not checked.
"""

import io
import json
from collections.abc import Collection
from typing import Any
from zipfile import BadZipFile

import numpy as np
from pydantic import BaseModel

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.loop.ledger import Digest, combine, digest
from prefect_elastic_train.loop.order import SampleOrder, StepBatches
from prefect_elastic_train.loop.rank_files import rank_file
from prefect_elastic_train.loop.training_session import SESSION_FILE

from .run_directory import RunDirectory
from .snapshots import checkpoint_names

_SHOWN_STEPS = 10  # in a message
_CHUNK_STEPS = 10_000  # whose samples are computed at once


class SampleCheck(BaseModel, frozen=True):
    """Result of comparing the samples that the steps of a run have seen with the sample order. Steps count from 0."""

    name: str
    #: Steps done at the newest checkpoint, the step at which this run began, and the samples seen in between.
    steps: int = 0
    began_at: int = 0
    samples: int = 0
    checked: int = 0  # number of steps of which a kept checkpoint has a digest
    wrong: list[int] = []  # those of them that have not seen exactly their samples
    exact: bool = False  # all steps together have seen exactly their samples
    skipped: list[int] = []  # steps whose batches were skipped, since the session's guard had found a problem at them
    unknown: str = ""  # reason why nothing of this is known

    @property
    def message(self) -> str:
        """The result of the comparison in a line for users."""
        if self.unknown:
            return self.unknown
        seen = f"steps {self.began_at} to {self.steps - 1} saw {self.samples:,} samples"
        skipped = f", without those of the skipped steps {_shorten(self.skipped)}" if self.skipped else ""
        if self.exact and not self.wrong:
            return f"{seen}: exactly the expected ones, by index{skipped}"
        return (
            f"{seen}, and NOT exactly the expected ones{skipped}: "
            f"steps {_shorten(self.wrong) or 'before the oldest checkpoint that is kept'}"
        )


def _shorten(steps: list[int]) -> str:
    return ", ".join([*map(str, steps[:_SHOWN_STEPS]), *(["..."] if len(steps) > _SHOWN_STEPS else [])])


def check_samples(run: RunDirectory) -> SampleCheck | None:
    """Compare the samples that the steps of a run have seen with its sample order; None for a run without a checkpoint.

    The order of all steps is computed again, in 0.3 µs a sample and 10 µs a step. The samples seen are known from
    digests in the checkpoints that are kept.
    """
    commit = run.newest_commit
    folders = checkpoint_names(commit.snapshot if commit else None)
    if not folders:
        return None
    is_exact: dict[int, bool] = {}  # by step
    for folder in folders:  # the newest last
        try:
            about, parts = _read(run, folder)
        except ValueError as error:
            return SampleCheck(name=run.name, unknown=f"which samples were seen is not known: {error}")
        order = SampleOrder(**about["order"])
        seen = combine(part["steps"] for part in parts)
        since = int(parts[0]["since"])
        skipped = about.get("skipped", [])
        matches = (seen == _expected(order, range(since, since + len(seen)), skipped)).all(axis=1)
        is_exact |= dict(enumerate(matches.tolist(), start=since))
        total = combine([*(part["total"] for part in parts), *seen])
    done = range(about["began_at"], about["step"])
    chunks = (done[start : start + _CHUNK_STEPS] for start in range(0, len(done), _CHUNK_STEPS))
    expected = combine(combine(_expected(order, steps, skipped)) for steps in chunks)
    return SampleCheck(
        name=run.name,
        steps=about["step"],
        began_at=about["began_at"],
        samples=int(total[0]),
        checked=len(is_exact),
        wrong=sorted(step for step, matches in is_exact.items() if not matches),
        exact=np.array_equal(total, expected),
        skipped=skipped,
    )


def _expected(order: SampleOrder, steps: range, skipped: Collection[int]) -> Digest:
    """Return the digests of steps that have seen exactly the samples that the sample order has for them.

    Skipped steps have seen none.
    """
    batches = zip(StepBatches(order, steps).arrays(), steps, strict=True)
    digests = [digest(samples[:0] if step in skipped else samples, step) for samples, step in batches]
    return np.array(digests, dtype=np.uint64).reshape(-1, 3)


def _read(run: RunDirectory, folder: str) -> tuple[dict[str, Any], list[dict[str, Digest]]]:
    """Return the session's metadata in a checkpoint, and the sample digests of each of its ranks.

    Raises:
        ValueError: The checkpoint has no digests, or they are damaged.
    """
    about = json.loads(run.store.read(f"{folder}/{SESSION_FILE}") or b"{}")
    if "order" not in about:
        raise ValueError(
            f"checkpoint {loop_name(folder)} has no digests of samples, which only a loop with batches from "
            "prefect_elastic_train.loop.session stores"
        )
    parts = []
    for rank in range(about["world_size"]):
        file = rank_file(folder, rank, about["world_size"])
        try:
            with np.load(io.BytesIO(run.store.read(str(file)) or b""), allow_pickle=False) as arrays:
                parts.append({name: arrays[name] for name in ("since", "total", "steps")})
        except (EOFError, KeyError, ValueError, BadZipFile) as error:
            raise ValueError(
                f"{file.name} of checkpoint {loop_name(folder)} is missing or damaged ({type(error).__name__})"
            ) from error
    return about, parts
