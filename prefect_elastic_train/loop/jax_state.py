"""The state of a JAX loop in a checkpoint: each process writes its shards, and any number of processes reads them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from .state import ArrayState, StateMismatchError, restore_part

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

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy this process's shards into main memory, and start to write the copy to the folder ``directory``.

        Return a function that waits until the copy is written.
        """
        folder = epath.Path(directory, _FOLDER)
        folder.mkdir()
        tree = {name: leaf if _is_global(leaf) else np.asarray(leaf) for name, leaf in self._copies().items()}
        args = ocp.args.PyTreeSave(_nested(tree))
        # Not with a Checkpointer: its barriers are collectives, which would mix with those of the training.
        writing = asyncio.run(_handler().async_save(folder, args=args))
        return lambda: [future.result() for future in writing].clear()

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Restore the attributes from a checkpoint that any number of processes has written.

        Arguments and errors as in :meth:`ArrayState.read`.
        """
        folder = Path(directory, _FOLDER)
        if not folder.is_dir():
            raise StateMismatchError(f"{directory} has no folder {_FOLDER}: is it the checkpoint of another framework?")
        leaves = _flat(vars(self))
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
            shown, shown_saved = ({".".join(path): tree[path] for path in tree} for tree in (current, saved))
            StateMismatchError.check(shown, shown_saved, vars(self) if only_these else None)
            args = _nested({name: _restore_args(current.get(name)) for name in saved})
            values = _flat(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=args)))
        restored = {name: _restore_leaf(leaf, values[name]) for name, leaf in leaves.items()}
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
    dtype = data.dtype if isinstance(data, jax.Array) and jax.dtypes.issubdtype(data.dtype, np.inexact) else None
    if _is_global(data) and data.committed:
        return ocp.ArrayRestoreArgs(sharding=data.sharding, dtype=dtype)
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)


def _restore_leaf(leaf: Any, value: Any) -> Any:
    """Return the value that Orbax has read for a leaf, with the type and the sharding of the current leaf."""
    data = _data(leaf)
    if data is not leaf:
        return jax.random.wrap_key_data(_restore_leaf(data, value), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(value, leaf.sharding if leaf.committed else None)
    return restore_part(leaf, value)
