"""Whether a training that was disturbed came out right: by what its loop wrote down itself, and by its checkpoints.

It shares no code with what it checks, and imports nothing of this package.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Numbers = dict[str, Any]
#: Names of numbers that are different each time.
CLOCK = re.compile(r"time|second|duration|_per_s|speed|throughput|memory|_at$", re.IGNORECASE)
#: A session's checkpoint: the rest of it is of its ranks, and of how long things took.
_OF_SESSIONS = ("loop.json", "rank-*.npz")


@dataclass
class Checked:
    """What a ledger says: how many steps count, how many were done again, and what is wrong."""

    steps: int = 0
    redone: int = 0
    problems: list[str] = field(default_factory=list)


def check_ledger(lines: Iterable[Mapping[str, Any]], steps: int, length: int, most_redone: int) -> Checked:
    """Check that each of so many steps counts once, and each of ``length`` samples once an epoch.

    Lines have ``step``, ``rank``, ``world``, ``group`` (the same for all ranks of a worker group) and ``seen``, the
    samples of that step; a step counts as the last group has done it. A group may do ``most_redone`` steps again.
    """
    checked, by_step = Checked(), dict[int, list[Mapping[str, Any]]]()
    reached, group, known = 0, None, set[Any]()
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
        if line["group"] != group and line["group"] not in known:
            group, again = line["group"], reached + 1 - line["step"]
            known.add(group)
            checked.redone += max(0, again)
            if again > most_redone or again < 0:
                checked.problems.append(f"group {group} began with step {line['step']} after step {reached}")
        reached = max(reached, line["step"])
    checked.steps = len(by_step)
    if sorted(by_step) != list(range(1, steps + 1)):
        checked.problems.append(f"{len(by_step)} steps up to {reached}, not 1 to {steps}")
    seen: list[int] = []
    for step in sorted(by_step):
        counting = [one for one in by_step[step] if one["group"] == by_step[step][-1]["group"]]
        if sorted(one["rank"] for one in counting) != list(range(counting[0]["world"])):
            checked.problems.append(f"step {step} was not done once by each of {counting[0]['world']} ranks")
        seen += [sample for one in counting for sample in one["seen"]]
    for first in range(0, len(seen), length):
        if len(seen) - first >= length and len({*seen[first : first + length]}) < length:
            checked.problems.append(f"epoch {first // length} has not seen each sample once")
    return checked


def numbers_in(folder: Path) -> Numbers:
    """Return all arrays and numbers of a checkpoint by name; of files that nothing here reads, nothing.

    Read are what torch has saved, also distributed; numpy's and JSON files; safetensors, where that is installed.
    """
    found: Numbers = {}
    skipped = {one for pattern in _OF_SESSIONS if (folder / _OF_SESSIONS[0]).exists() for one in folder.glob(pattern)}
    distributed = [one.parent for one in folder.rglob(".metadata")]
    for place in distributed:
        found |= _flat(_read_distributed(place), str(place.relative_to(folder)))
    for file in sorted(folder.rglob("*")):
        read = _READERS.get(file.suffix)
        if read is not None and file.parent not in distributed and file not in skipped:
            try:
                found |= _flat(read(file), str(file.relative_to(folder)))
            except Exception:  # noqa: BLE001 - a file of another program, or of classes that are not here
                continue
    return found


def distance(one: Numbers, other: Numbers) -> tuple[float, str]:
    """Return how far two checkpoints are apart at most, relative to the largest number of an array, and where."""
    worst, where = 0.0, ""
    for name in sorted(one.keys() & other.keys()):
        here, there = np.asarray(one[name]), np.asarray(other[name])
        if CLOCK.search(name.rpartition(".")[2]) or (here.shape == there.shape and np.array_equal(here, there)):
            continue
        if here.shape != there.shape:
            return math.inf, name
        wide = [array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (here, there)]
        with np.errstate(all="ignore"):
            gap = np.max(np.abs(wide[0] - wide[1])) / (max(np.max(np.abs(array)) for array in wide) or 1.0)
        if np.array_equal(wide[0], wide[1], equal_nan=True):
            gap = 0.0
        if not gap <= worst:
            worst, where = float(gap) if math.isfinite(gap) else math.inf, name
    return worst, where


def _flat(value: Any, name: str) -> Numbers:
    """Return the arrays and numbers in nested containers by their paths."""
    found: Numbers = {}
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            found |= _flat(inner, f"{name}.{key}")
    elif (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc") or type(value) in (int, float):
        found[name] = value
    return found


def _read_torch(file: Path) -> Any:
    # What the loop itself has written and reads.
    return import_module("torch").load(file, map_location="cpu", weights_only=False)


def _read_distributed(folder: Path) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".pt") as whole:
        import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save(folder, whole.name)
        return _read_torch(Path(whole.name))


def _read_numpy(file: Path) -> Any:
    loaded = np.load(file, allow_pickle=False)
    return loaded if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded}


_READERS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _read_torch),
    **dict.fromkeys((".npz", ".npy"), _read_numpy),
    ".safetensors": lambda file: import_module("safetensors.numpy").load_file(file),
    ".json": lambda file: json.loads(file.read_text()),
}
