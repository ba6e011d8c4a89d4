"""How far two trainings' checkpoints are apart. It shares no code with what wrote them, and imports nothing of it."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

Numbers = dict[str, Any]
#: Words of names of numbers that are different each time.
_CLOCK = re.compile(
    r"(?<![a-z])([a-z]*times?|timestamps?|[a-z]*seconds?|secs?|duration|elapsed|latency|speed(up)?|throughputs?|"
    r"mem(ory)?|util(ization)?|mfu|[a-z]*flops|fps|tps|[a-z]*clock)(?![a-z])|(per_|/)s(?![a-z])|_at$|[_/.](ms|msec|eta)$"
)


def numbers_in(folder: Path) -> Numbers:
    """Return all arrays and numbers of a checkpoint by name; of files that nothing here reads, or none, nothing.

    Read are what torch has saved, also distributed; Orbax's stores; numpy's files; safetensors.
    """
    found: Numbers = {}
    for file in sorted(folder.rglob("*")):
        read = _READERS.get(file.name) or _READERS.get(file.suffix)
        if read is not None:
            with suppress(Exception):  # a file of another program, or of classes or a library that are not here
                found |= _flat(read(file), str(file.relative_to(folder)))
    return found


def is_clock(name: str) -> bool:
    """Whether a number is different each time, by its name."""
    return bool(_CLOCK.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def distance(one: Numbers, other: Numbers) -> tuple[float, str]:
    """Return how far two checkpoints are apart at most, relative to the largest number of an array, and where."""
    worst, where = 0.0, ""
    for name, here, there in _differing(one, other):
        if not here.ndim and is_clock(name):
            continue
        if here.shape != there.shape:
            return math.inf, name
        with np.errstate(all="ignore"):
            gap = float(np.max(np.abs(here - there)) / max(np.max(np.abs(here)), np.max(np.abs(there))))
        if not gap <= worst:
            worst, where = gap if math.isfinite(gap) else math.inf, name
    return worst, where


def whole_distance(one: Numbers, other: Numbers) -> float:
    """Return how far two checkpoints are apart as a whole: the norm of the difference relative to that of the first.

    Arrays that are the same, such as what is frozen, are left out.
    """
    apart, length = 0.0, 0.0
    for _, here, there in _differing(one, other):
        if here.shape != there.shape:
            return math.inf
        differ = (here != there) & ~(np.isnan(here) & np.isnan(there))  # two infinities do not
        apart = math.hypot(apart, np.linalg.norm(here[differ] - there[differ]))
        length = math.hypot(length, np.linalg.norm(here[np.isfinite(here)]))
    return apart / (length or 1.0) if math.isfinite(apart) else math.inf


def _differing(one: Numbers, other: Numbers) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arrays that are in both and not the same, by name, in a form that holds any number."""
    for name in sorted(one.keys() & other.keys()):
        here, there = (np.asarray(numbers[name], dtype=np.complex128) for numbers in (one, other))
        if not np.array_equal(here, there, equal_nan=True):
            yield name, here, there


def calculated(numbers: Numbers) -> Numbers:
    """Return the arrays that are calculated with: times, counts and random states are no model."""
    return {name: one for name, one in numbers.items() if np.ndim(one) and np.asarray(one).dtype.kind in "fc"}


def _flat(value: Any, name: str) -> Numbers:
    """Return the arrays and numbers in nested containers by their paths."""
    found: Numbers = {}
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
    if hasattr(value, "state_dict") and not isinstance(value, type):
        with suppress(Exception):  # of a class that is not to be asked here
            value = value.state_dict()
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            found |= _flat(inner, f"{name}.{key}")
    elif type(value) in (int, float):
        found[name] = value
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcV":
        found[name] = value.astype(np.float32) if value.dtype.kind == "V" else value  # bfloat16 and the like
    return found


def _read_torch(file: Path) -> Any:
    # What the loop itself has written and reads.
    return import_module("torch").load(file, map_location="cpu", weights_only=False)


def _read_distributed(index: Path) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".pt") as whole:
        import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save(index.parent, whole.name)
        return _read_torch(Path(whole.name))


def _read_orbax(index: Path) -> Any:
    """Read the arrays of an Orbax store, of which each process may have some chunks, without a device of JAX."""
    tensorstore, known = import_module("tensorstore"), json.loads(index.read_text())
    context = tensorstore.Context()
    together = tensorstore.KvStore.open("memory://", context=context).result()
    for store in (index.parent, *index.parent.glob("ocdbt.process_*")):
        place = {"driver": "ocdbt", "base": f"file://{store}/"}
        part = tensorstore.KvStore.open(place, context=context).result()
        for key in part.list().result():
            together[key] = part[key]
    found, driver = dict[str, Any](), "zarr3" if known.get("use_zarr3") else "zarr"
    for one in known["tree_metadata"].values():
        name = ".".join(key["key"] for key in one["key_metadata"])
        spec = {"driver": driver, "kvstore": f"memory://{name}/", "fill_missing_data_reads": False}
        found[name] = tensorstore.open(spec, context=context).result().read().result()
    return found


_READERS: dict[str, Callable[[Path], Any]] = {
    ".metadata": _read_distributed,
    "_METADATA": _read_orbax,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _read_torch),
    **dict.fromkeys(("", ".tar"), lambda file: _read_torch(file) if is_zipfile(file) else {}),
    **dict.fromkeys((".npz", ".npy"), np.load),  # which refuses pickled objects
    ".safetensors": lambda file: import_module("safetensors.numpy").load_file(file),
}
