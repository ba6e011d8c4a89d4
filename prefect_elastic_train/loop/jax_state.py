"""The state of a JAX loop in a checkpoint: each process writes its shards, and any number of processes reads them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from .recovery_points import ByteArray, RankState, RecoveryPointError
from .state import ArrayState, StateMismatchError, bytes_of, restore_part

_Bounds = tuple[tuple[int, int], ...]  # first and last index (exclusive) of a shard, for each dimension

_FOLDER = "jax"  # folder of a checkpoint, with Orbax's files
_flat = ocp.tree.to_flat_dict  # the leaves of a pytree by their paths, such as ("params", "inner")
_nested = ocp.tree.from_flat_dict

# Orbax logs some fifteen lines for each save and process, through absl's logger, which the loop may use, too.
logging.getLogger("absl").addFilter(
    lambda record: record.levelno > logging.INFO or "/orbax/checkpoint/" not in record.pathname
)


class JaxState(ArrayState):
    """The state of a JAX loop: pytrees of arrays, saved with Orbax.

    Each keyword argument becomes an attribute, which the loop reads and sets. Each process writes the shards that it
    holds. Of a value that is not sharded over the processes, that of the first process is saved. A checkpoint can be
    read by any number of processes, into the current shardings and types of the attributes. Dtypes are restored as they
    were saved, except that floating-point JAX arrays get the dtype of the attribute.

    Args:
        parts: Pytrees by name. Leaves are arrays of JAX and numpy, keys of ``jax.random``, and numbers.

    Raises:
        ValueError: A leaf is of another type or an empty array, or a part has the name of a method.

    Example::

        state = loop.JaxState(params=params, key=jax.random.key(0))
        with loop.session(state, steps=1000, global_batch=256) as session:
            for batch in session.batches(dataset, drop_last=True):
                state.params, state.key, loss = train_step(state.params, state.key, batch)
                session.step({"loss": loss})
    """

    def is_finite(self) -> bool:
        """Return True if all elements of this process's floating-point arrays are finite numbers."""
        leaves = [leaf for leaf in self._copies().values() if np.ndim(leaf) and _is_float(leaf)]
        parts = [shard.data for leaf in leaves for shard in getattr(leaf, "addressable_shards", ())]
        parts += [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        return all(jax.device_get([jax.numpy.isfinite(part).all() for part in parts]))

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy this process's shards into main memory, and start to write the copy to the folder ``directory``.

        Return a function that waits until the copy is written.
        """
        folder = epath.Path(directory, _FOLDER)
        folder.mkdir()
        tree = {name: leaf if _is_global(leaf) else np.asarray(leaf) for name, leaf in self._copies().items()}
        # Not with a Checkpointer: its barriers are collectives, which would mix with those of the training.
        writing = asyncio.run(_handler().async_save(folder, args=ocp.args.PyTreeSave(_nested(tree))))
        return lambda: [future.result() for future in writing].clear()

    def capture(self) -> RankState:
        """Return this process's shards: path, dtype, shape and bounds of each, and their bytes."""
        description = []
        arrays = []
        for path, leaf in self._copies().items():
            shards = {_bounds(shard.index, leaf.shape): shard.data for shard in getattr(leaf, "addressable_shards", ())}
            for bounds, data in (shards or {_bounds((), np.shape(leaf)): leaf}).items():
                array = np.asarray(data)
                description.append((path, array.dtype, np.shape(leaf), bounds))
                arrays.append(bytes_of(array))
        return description, arrays

    def restore(self, states: list[RankState], own: int) -> None:
        """Restore the attributes from the shards of any number of processes, into their current shardings."""
        saved: dict[Any, _Leaf] = {}
        for description, arrays in (states[own], *states):
            for number, (path, dtype, shape, bounds) in enumerate(description):
                shards = saved.setdefault(path, _Leaf(dtype, shape, {})).shards
                shards.setdefault(bounds, partial(arrays.__getitem__, number))
        current = self._copies()
        _check(current, saved, None)
        self._set_leaves(lambda path: saved[path].read(current[path]))

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Restore the attributes from a checkpoint that any number of processes has written.

        Arguments and errors as in :meth:`ArrayState.read`.
        """
        folder = Path(directory, _FOLDER)
        if not folder.is_dir():
            raise StateMismatchError(f"{directory} has no folder {_FOLDER}: is it the checkpoint of another framework?")
        current = self._copies()
        with tempfile.TemporaryDirectory(prefix="loop-jax-") as merged:
            # Orbax's last step of saving merges the stores of the processes. It is done on links, since other
            # processes read the same checkpoint at the same time.
            for part in folder.iterdir():
                Path(merged, part.name).symlink_to(part.resolve())
            handler = _handler()
            path = epath.Path(merged)
            handler.finalize(path)
            saved = _flat(handler.metadata(path).tree)
            _check(current, saved, vars(self) if only_these else None)
            args = _nested({name: _restore_args(current.get(name)) for name in saved})
            values = _flat(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=args)))
        self._set_leaves(values.__getitem__)

    def _set_leaves(self, value_of: Callable[[Any], Any]) -> None:
        """Replace each leaf by its saved value, given its path."""
        restored = {path: _restore_leaf(leaf, value_of(path)) for path, leaf in _flat(vars(self)).items()}
        vars(self).update(_nested(restored, target=vars(self)))

    def _copies(self) -> dict[Any, Any]:
        """Return the data of each leaf of the pytrees by its path.

        Raise ValueError if a leaf cannot be restored exactly.
        """
        leaves = _flat(vars(self))
        if len(set(map(".".join, leaves))) < len(leaves):
            raise ValueError("JaxState: Orbax would store two leaves in one file: rename keys that contain dots")
        for name, leaf in leaves.items():
            is_number = isinstance(leaf, jax.Array | np.generic | int | float | complex)
            if not (is_number or type(leaf) is np.ndarray) or not np.size(leaf):
                raise ValueError(
                    f"JaxState: {'.'.join(name)} is {leaf!r:.40} ({type(leaf).__name__}); "
                    "give numbers, keys and arrays with elements"
                )
        return {name: _data(leaf) for name, leaf in leaves.items()}


@dataclass
class _Leaf:
    """A leaf of the pytrees in a recovery point. ``shards`` has functions that return the bytes within some bounds."""

    dtype: Any
    shape: tuple[int, ...]
    shards: dict[_Bounds, Callable[[], ByteArray]]

    def read(self, data: Any) -> Any:
        """Return the leaf as a numpy array; as a JAX array if ``data``, the current one, is over several processes."""
        dtype = _restored_dtype(data) or self.dtype
        if isinstance(data, jax.Array) and not data.is_fully_addressable:
            return jax.make_array_from_callback(self.shape, data.sharding, lambda index: self._at(index).astype(dtype))
        return self._at(()).astype(dtype)

    def _at(self, index: tuple[slice, ...]) -> Any:
        wanted = _bounds(index, self.shape)
        if wanted in self.shards:
            return self._shard(wanted)
        whole = np.empty(self.shape, self.dtype)
        known = 0
        for bounds in self.shards:
            shard = self._shard(bounds)
            whole[tuple(slice(*bound) for bound in bounds)] = shard
            known += shard.size
        if known < whole.size:
            raise RecoveryPointError(
                "the sharding has changed since the recovery point: this process needs shards of others"
            )
        return whole[index]

    def _shard(self, bounds: _Bounds) -> Any:
        return self.shards[bounds]().view(self.dtype).reshape([stop - start for start, stop in bounds])


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Bounds:
    """Return the bounds of an index into an array of a shape; an empty index means the whole array."""
    slices = index or (slice(None),) * len(shape)
    return tuple(part.indices(length)[:2] for part, length in zip(slices, shape, strict=True))


def _check(current: Mapping[Any, Any], saved: Mapping[Any, Any], parts: Collection[str] | None) -> None:
    """Raise a StateMismatchError if the leaves, given by their paths, differ."""
    shown, shown_saved = ({".".join(path): tree[path] for path in tree} for tree in (current, saved))
    StateMismatchError.check(shown, shown_saved, parts)


def _handler() -> Any:
    """Return Orbax's checkpoint handler for pytrees of JAX and numpy arrays."""
    # Without a store of array metadata: the other processes would wait until the first has created its directory.
    arrays = (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
    registry = ocp.type_handlers.create_type_handler_registry(arrays, (np.ndarray, ocp.type_handlers.NumpyHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _data(leaf: Any) -> Any:
    """Return the array of numbers in a leaf: the key data of a ``jax.random`` key, else the leaf itself."""
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _is_global(data: Any) -> bool:
    """Return True for a JAX array over several processes, and for any JAX array if there is only one process."""
    return isinstance(data, jax.Array) and (jax.process_count() == 1 or not data.is_fully_addressable)


def _restore_args(data: Any) -> Any:
    """Return Orbax's arguments to restore an array like ``data``, the current one in the state."""
    # An array that is not committed to a device must stay so: else a jitted function rejects it beside others.
    dtype = _restored_dtype(data)
    if _is_global(data) and data.committed:
        return ocp.ArrayRestoreArgs(sharding=data.sharding, dtype=dtype)
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)


def _restored_dtype(data: Any) -> Any:
    """Return the dtype that an array like ``data`` is restored with; None: as it was saved."""
    return data.dtype if isinstance(data, jax.Array) and _is_float(data) else None


def _is_float(data: Any) -> bool:
    return bool(jax.dtypes.issubdtype(data.dtype, np.inexact))


def _restore_leaf(leaf: Any, value: Any) -> Any:
    """Return the value that Orbax has read for a leaf, with the type and the sharding of the current leaf."""
    data = _data(leaf)
    if data is not leaf:
        return jax.random.wrap_key_data(_restore_leaf(data, value), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(value, leaf.sharding if leaf.committed else None)
    return restore_part(leaf, value)
