"""Comparison of two checkpoints by the arrays in their files. Imports nothing of the package, which wrote them."""

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
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
    """Norm of the difference of two arrays, relative to the larger norm of the two, and the name of the arrays."""

    size: float
    name: str


def read_arrays(folder: Path) -> Arrays:
    """Return the arrays of floats in a checkpoint by name, from files of torch, Orbax, numpy and safetensors.

    They are the model's state, without times, counts and random states. Other files, and files that cannot be read, are
    skipped.
    """
    arrays: Arrays = {}
    for file in sorted(folder.rglob("*")):
        read = _READERS.get(file.name) or _READERS.get(file.suffix)
        if read is not None:
            with suppress(Exception):  # written by another program, or for a library that is not installed
                arrays |= _flatten(read(file), str(file.relative_to(folder)))
    return arrays


def is_performance_metric(name: str) -> bool:
    """Return True if a metric measures time, speed, memory or load, according to its name.

    Such metrics differ in each training.
    """
    return bool(_PERFORMANCE.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def largest_difference(first: Arrays, second: Arrays) -> Difference:
    """Return the largest relative difference of an array or number that two checkpoints or reports both have."""
    differences = [Difference(_relative([norms]), name) for name, norms in _norms(first, second).items()]
    return max(differences, default=Difference(0.0, ""))


def norm_difference(first: Arrays, second: Arrays) -> float:
    """Return the norm of the difference of two checkpoints, relative to the norms of their values.

    All arrays that both have count together. Arrays that are equal, such as frozen parameters, are left out.
    """
    return _relative(_norms(first, second).values())


def _norms(first: Arrays, second: Arrays) -> dict[str, tuple[float, float]]:
    """Return two norms for each array or number that two checkpoints both have and that is not equal, by its name.

    The first one is that of the difference, infinite if the shapes differ. The second one is the larger one of the
    two values.
    """
    norms = {}
    for name in sorted(first.keys() & second.keys()):
        left = np.asarray(first[name], dtype=np.complex128)  # holds any number
        right = np.asarray(second[name], dtype=np.complex128)
        if not np.array_equal(left, right, equal_nan=True):
            difference = np.linalg.norm(left - right) if left.shape == right.shape else math.inf
            norms[name] = (float(difference), float(max(np.linalg.norm(left), np.linalg.norm(right))))
    return norms


def _relative(norms: Iterable[tuple[float, float]]) -> float:
    """Return the norm of the difference of all arrays together, relative to the norm of their values.

    It is infinite if an array has a number that is not finite.
    """
    difference, value = np.linalg.norm([(0.0, 0.0), *norms], axis=0)
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
    with tempfile.NamedTemporaryFile(suffix=".pt") as merged:
        import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save(index.parent, merged.name)
        return _read_torch(Path(merged.name))


def _read_orbax(index: Path) -> Any:
    """Return the arrays of an Orbax checkpoint by name, without a JAX device; ``index`` is its metadata file.

    If the stores of its processes are not merged yet, each has some chunks of an array, and zeros for the others.
    """
    tensorstore = import_module("tensorstore")
    arrays: Arrays = {}
    is_merged = (index.parent / "manifest.ocdbt").exists()
    for folder in [index.parent] if is_merged else index.parent.glob("ocdbt.process_*"):
        base = {"driver": "ocdbt", "base": f"file://{folder}/"}
        for key in tensorstore.KvStore.open(base).result().list().result():
            name, _, file = key.decode().rpartition("/")
            if file in _ZARR_DRIVERS:
                spec = {"driver": _ZARR_DRIVERS[file], "kvstore": {**base, "path": f"{name}/"}}
                arrays[name] = arrays.get(name, 0) + tensorstore.open(spec).result().read().result()
    return arrays


#: Drivers of tensorstore by the file with an array's metadata.
_ZARR_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
#: Functions that read a file, by its name or suffix.
_READERS: dict[str, Callable[[Path], Any]] = {
    ".metadata": _read_distributed,
    "_METADATA": _read_orbax,
    **dict.fromkeys((".pt", ".pth", ".tar", ".bin", ".ckpt"), _read_torch),
    **dict.fromkeys((".npz", ".npy"), np.load),  # refuses pickled objects
    ".safetensors": lambda file: import_module("safetensors.numpy").load_file(file),
}
