"""The whole state of a JAX loop as one checkpoint: each process writes its shards, any number of them reads it."""

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

from prefect_elastic_train.loop.state import ArrayState, StateMismatchError, restored, shapes

_FOLDER = "jax"  # of Orbax's files in a checkpoint

# Orbax says some fifteen lines of each save, in each process, through a logger that is also the loop's.
logging.getLogger("absl").addFilter(
    lambda record: record.levelno > logging.INFO or "/orbax/checkpoint/" not in record.pathname
)


class JaxState(ArrayState):
    """What a JAX loop needs to go on: pytrees, each an attribute that the loop reads and sets.

    ``JaxState(params=params, key=jax.random.key(0))`` has ``params`` and ``key``. Leaves are arrays of JAX and
    numpy, keys of ``jax.random``, and numbers. Each process writes with `Orbax` the shards that are its own; of what is
    not sharded over the processes, it is the first one's value that is kept. A checkpoint is read at any number of
    processes, into the shardings and types of the attributes at that time. Dtypes are restored as they were saved, but
    floating-point JAX arrays get the dtype of the attribute.

    Raises:
        ValueError: A leaf is of another type, or an empty array; or a part has a method's name.
    """

    def stage(self, directory: str) -> Callable[[], None]:
        """Begin to write this process's shards from a copy in main memory, and return what waits until that is done."""
        (folder := epath.Path(directory, _FOLDER)).mkdir()
        tree = {name: one if _is_shared(one) else np.asarray(one) for name, one in self._copies().items()}
        args = ocp.args.PyTreeSave(ocp.tree.from_flat_dict(tree))
        # The handler and not a Checkpointer, whose barriers are collectives that would meet the training's.
        writing = asyncio.run(_handler().async_save(folder, args=args))
        return lambda: [future.result() for future in writing].clear()

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Put a state back that was written by all processes, of however many there were; see :class:`ArrayState`."""
        if not (parts := Path(directory, _FOLDER)).is_dir():
            raise StateMismatchError(f"{directory} has no folder {_FOLDER}: is it the checkpoint of another framework?")
        leaves, here = self._leaves(), self._copies()
        with tempfile.TemporaryDirectory(prefix="loop-jax-") as whole:
            # Orbax's last step of saving, which makes one store of those of the processes: in links, as the
            # checkpoint itself is left as it is, and others read it at the same time.
            for part in parts.iterdir():
                Path(whole, part.name).symlink_to(part.resolve())
            handler, path = _handler(), epath.Path(whole)
            handler.finalize(path)
            there = ocp.tree.to_flat_dict(handler.metadata(path).tree)
            known = {name: one for name, one in there.items() if not only_these or name[0] in vars(self)}
            StateMismatchError.check(*(shapes({".".join(name): one[name] for name in one}) for one in (here, known)))
            wanted = ocp.tree.from_flat_dict({name: _restore_args(here.get(name)) for name in there})
            values = ocp.tree.to_flat_dict(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted)))
        restored = [_like(leaf, values[name]) for name, leaf in leaves.items()]
        vars(self).update(jax.tree.unflatten(jax.tree.structure(vars(self)), restored))

    def _copies(self) -> dict[Any, Any]:
        """Return the data of each leaf; a ValueError if one cannot be restored exactly."""
        leaves = self._leaves()
        for name, leaf in leaves.items():
            is_number = isinstance(leaf, jax.Array | np.generic | int | float | complex)
            if not (is_number or type(leaf) is np.ndarray) or not np.size(leaf):
                raise ValueError(
                    f"JaxState: {'.'.join(name)} is {leaf!r:.40} ({type(leaf).__name__}); "
                    "give numbers, keys and arrays with elements"
                )
        return {name: _data(leaf) for name, leaf in leaves.items()}

    def _leaves(self) -> dict[tuple[str, ...], Any]:
        paths = jax.tree.leaves_with_path(vars(self))
        return {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf for path, leaf in paths}


def _handler() -> Any:
    # Without a store of array metadata, for whose directory the other processes wait until the first has made it.
    arrays = (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
    registry = ocp.type_handlers.create_type_handler_registry(arrays, (np.ndarray, ocp.type_handlers.NumpyHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _data(leaf: Any) -> Any:
    """Return a key's words, else the leaf itself."""
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _is_shared(data: Any) -> bool:
    """Return whether a value is an array of all processes, and not of one."""
    return isinstance(data, jax.Array) and (jax.process_count() == 1 or not data.is_fully_addressable)


def _restore_args(data: Any) -> Any:
    # What is not committed to a device must not be so afterwards: a jitted function would refuse it beside others.
    dtype = data.dtype if isinstance(data, jax.Array) and jax.dtypes.issubdtype(data.dtype, np.inexact) else None
    if _is_shared(data) and data.committed:
        return ocp.ArrayRestoreArgs(sharding=data.sharding, dtype=dtype)
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)


def _like(leaf: Any, value: Any) -> Any:
    """Return a restored value as what its leaf was."""
    if (data := _data(leaf)) is not leaf:
        return jax.random.wrap_key_data(_like(data, value), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(value, leaf.sharding if leaf.committed else None)
    return restored(leaf, value)
