"""Comparison of two checkpoints by the arrays in their files. Imports nothing of the package, which wrote them."""

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Arrays and numbers by name.
Arrays = dict[str, Any]

#: Parts of the names of metrics about time, speed, memory or load.
_PERFORMANCE = re.compile(
    r"(?<![a-z])([a-z]*times?|timestamps?|[a-z]*seconds?|secs?|duration|elapsed|latency|speed(up)?|throughputs?|"
    r"mem(ory)?|util(ization)?|mfu|[a-z]*flops|fps|tps|[a-z]*clock)(?![a-z])|(per_|/)s(?![a-z])|_at$|[_/.](ms|msec|eta)$"
)


class Difference(NamedTuple):
    """Largest difference of two checkpoints, relative to the largest number of its array, and the array's name."""

    size: float
    name: str


def read_arrays(folder: str | Path) -> Arrays:
    """Return the arrays of floats in a checkpoint by name, from files of torch, Orbax, numpy and safetensors.

    They are the model's state, without times, counts and random states. Other files, and files that cannot be read, are
    skipped.
    """
    arrays: Arrays = {}
    for file in sorted(Path(folder).rglob("*")):
        if read := _READERS.get(file.name) or _READERS.get(file.suffix):
            with suppress(Exception):  # written by another program, or for a library that is not installed
                arrays |= _flatten(read(file), str(file.relative_to(folder)))
    return arrays


def hash_arrays(arrays: Arrays) -> str:
    """Return the SHA-256 of arrays: of their names, types, shapes and numbers, in the order of the names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def is_performance_metric(name: str) -> bool:
    """Return True if a metric measures time, speed, memory or load, according to its name.

    Such metrics differ in each training.
    """
    return bool(_PERFORMANCE.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def largest_difference(first: Arrays, second: Arrays) -> Difference:
    """Return the largest relative difference of an array or number that two checkpoints or reports both have."""
    sizes = _sizes(first, second, lambda values: np.max(np.abs(values), initial=0.0))
    return max((Difference(_ratio(*sizes[name]), name) for name in sizes), default=Difference(0.0, ""))


def norm_difference(first: Arrays, second: Arrays) -> float:
    """Return the norm of the difference of two checkpoints, relative to the norm of their values.

    All arrays that both have count together. Arrays that are equal, such as frozen parameters, are left out.
    """
    return _ratio(*np.linalg.norm([(0.0, 0.0), *_sizes(first, second, np.linalg.norm).values()], axis=0))


def _sizes(first: Arrays, second: Arrays, measure: Callable[[Any], Any]) -> dict[str, tuple[float, float]]:
    """Return two sizes by the name of each array or number that two checkpoints both have, if its two values differ.

    The first size is that of the difference; it is infinite if the shapes differ. The second size is that of the larger
    value, without infinite numbers and NaN.

    Args:
        first, second: The arrays of the two checkpoints.
        measure: Function that returns the size of an array.
    """
    sizes = {}
    for name in sorted(first.keys() & second.keys()):
        left = np.asarray(first[name], dtype=np.complex128)  # holds any number
        right = np.asarray(second[name], dtype=np.complex128)
        if left.shape != right.shape:
            sizes[name] = (math.inf, 0.0)
        elif not np.array_equal(left, right, equal_nan=True):
            differ = (left != right) & ~(np.isnan(left) & np.isnan(right))  # inf - inf would be NaN
            with np.errstate(all="ignore"):
                difference = measure(left[differ] - right[differ])
            sizes[name] = (difference, max(measure(value[np.isfinite(value)]) for value in (left, right)))
    return sizes


def _ratio(difference: float, value: float) -> float:
    """Return the size of a difference relative to that of the values; infinite if the difference is not finite."""
    return float(difference / (value or 1.0)) if math.isfinite(difference) else math.inf


def _flatten(value: Any, name: str) -> Arrays:
    """Return the arrays of floats in nested containers of a checkpoint by name: ``name`` and the keys to them."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        arrays: Arrays = {}
        for key, item in value.items():
            arrays |= _flatten(item, f"{name}.{key}")
        return arrays
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "fcV":
        return {name: value.astype(np.float32) if value.dtype.kind == "V" else value}  # V: bfloat16 and the like
    return {}


def _read_torch(file: Path) -> Any:
    """Return the content of a file that ``torch.save`` has written, on the CPU."""
    # The file was written by the loop itself, so unpickling is safe.
    return import_module("torch").load(file, map_location="cpu", weights_only=False)


def _read_distributed(index: Path) -> Any:
    """Return the state of a checkpoint of ``torch.distributed.checkpoint`` in one process; ``index``: its metadata."""
    with tempfile.NamedTemporaryFile() as merged:
        import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save(index.parent, merged.name)
        return _read_torch(Path(merged.name))


def _read_orbax(index: Path) -> Any:
    """Return the arrays of an Orbax checkpoint by name, without a JAX device.

    Each process may have written its chunks into a store of its own. ``index`` is the metadata file of the checkpoint.
    """
    tensorstore = import_module("tensorstore")
    metadata = json.loads(index.read_text())
    context = tensorstore.Context()
    merged = tensorstore.KvStore.open("memory://", context=context).result()
    for folder in (index.parent, *index.parent.glob("ocdbt.process_*")):
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}, context=context).result()
        for key in store.list().result():
            merged[key] = store[key]
    arrays = {}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    for entry in metadata["tree_metadata"].values():
        if entry["value_metadata"]["skip_deserialize"]:
            continue  # None or an empty container, such as optax's EmptyState
        name = ".".join(key["key"] for key in entry["key_metadata"])
        spec = {"driver": driver, "kvstore": f"memory://{name}/", "fill_missing_data_reads": False}
        arrays[name] = tensorstore.open(spec, context=context).result().read().result()
    return arrays


#: Functions that read a file, by its name or suffix.
_READERS: dict[str, Callable[[Path], Any]] = {
    ".metadata": _read_distributed,
    "_METADATA": _read_orbax,
    **dict.fromkeys((".pt", ".pth", ".tar", ".bin", ".ckpt"), _read_torch),
    **dict.fromkeys((".npz", ".npy"), np.load),  # refuses pickled objects
    ".safetensors": lambda file: import_module("safetensors.numpy").load_file(file),
}
