"""Load the samples of each step by index, with torch's ``DataLoader`` or without."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from .order import Indices, StepBatches
from .state import seed_everything


class Mixture:
    """Dataset that mixes several datasets by weights.

    The sample at an index is a function of the index alone. The length of a mixture is the shortest that contains each
    dataset completely. Datasets that are short for their weight are repeated.

    Args:
        datasets: Datasets that :meth:`Session.batches` accepts.
        weights: Share of the samples of each dataset, above 0. They are normalized to a sum of 1.

    Raises:
        ValueError: The number of weights is wrong, or a weight is not above 0.
        TypeError: A dataset cannot be read by index.

    Example::

        mixture = loop.Mixture([books, code], [0.9, 0.1])
        for batch in session.batches(mixture):
            ...
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float]) -> None:
        if not datasets or len(datasets) != len(weights) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"Mixture of {len(datasets)} datasets: give each a weight above 0, not {list(weights)}")
        self.datasets = list(datasets)
        self._lengths = [length_of(dataset) for dataset in datasets]
        scale = max(length / weight for length, weight in zip(self._lengths, weights, strict=True))
        self._begins = np.cumsum([0, *(max(1, round(weight * scale)) for weight in weights)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        number = np.searchsorted(self._begins, index, side="right") - 1
        return _read(self.datasets[number], int(index - self._begins[number]) % self._lengths[number])


def length_of(dataset: Any) -> int:
    """Return the number of samples of a dataset that a session can read by index.

    Raises:
        TypeError: The samples cannot be read by index, as those of a stream, or the arrays differ in length.
    """
    if isinstance(dataset, Mapping | tuple):
        lengths = {length_of(part) for part in (dataset.values() if isinstance(dataset, Mapping) else dataset)}
        if len(lengths) != 1:
            raise TypeError(f"the arrays of a dataset must have one length, not {sorted(lengths)}")
        return lengths.pop()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"{type(dataset).__name__} has no __len__ and __getitem__ (for a DataLoader, pass loader.dataset): streams "
            "cannot be resumed at a position. Load the samples by index (Parquet files by memory map, for instance). "
            "Ray Data is read by session.batches only"
        )
    if _reads_labels(dataset):
        raise TypeError(
            f"the samples of {type(dataset).__name__} cannot be read by position: "
            "give an array of them (such as .to_numpy() returns) or a list"
        )
    return len(dataset)


def _reads_labels(dataset: Any) -> bool:
    """Return True for a torch dataset that wraps pandas objects, such as ``Subset``: it reads them by label."""
    if type(dataset).__module__ != "torch.utils.data.dataset":
        return False
    wrapped = vars(dataset).get("datasets") or [vars(dataset).get("dataset")]
    parts = wrapped.values() if isinstance(wrapped, dict) else wrapped
    return any(hasattr(part, "iloc") or _reads_labels(part) for part in parts)


def load(dataset: Any, sampler: StepBatches, options: dict[str, Any]) -> Iterator[tuple[Indices, Any]]:
    """Yield each batch of a dataset that the sampler chooses: the indices of its samples, and the collated samples.

    Args:
        dataset: Dataset that :func:`length_of` accepts.
        sampler: Indices of each batch.
        options: Options of torch's ``DataLoader``. With any, or for a torch dataset, the samples are loaded with it.
    """
    for name in options.keys() & {"batch_size", "sampler", "batch_sampler"}:
        raise TypeError(
            f"{name}={options[name]!r}: the session chooses the samples of each batch. Set its global_batch (of all "
            "workers), and micro_batch to limit a worker's batch"
        )
    torch = import_module("torch") if options else sys.modules.get("torch")
    datasets = dataset.datasets if isinstance(dataset, Mixture) else [dataset]
    # The arguments of seed_everything for reading each batch; empty without shards. The session seeds without the 1.
    keys = ((sampler.order.seed, step, part, 1) if sampler.shards else () for step, part, *_ in sampler.positions())
    batches = zip(keys, sampler.arrays(), strict=True)
    if torch is None or not (options or any(isinstance(part, torch.utils.data.Dataset) for part in datasets)):
        for key, indices in batches:
            if key:
                seed_everything(*key)
            yield indices, _read(dataset, indices)
        return
    # Draws no seed from the loop's generator, since its state would then depend on the number of restarts.
    seed = hash((sampler.order.seed, sampler.steps.start, sampler.rank))
    options = {"generator": torch.Generator().manual_seed(seed), **options}
    collate = partial(_collate, dataset, options.pop("collate_fn", None) or torch.utils.data.default_collate)
    loader = torch.utils.data.DataLoader(
        _IdentityDataset(), batch_sampler=([batch] for batch in batches), collate_fn=collate, in_order=True, **options
    )
    try:
        yield from loader
    except (EOFError, OSError, RuntimeError) as error:
        if "Caught " in str(error) or not loader.num_workers:  # an error of the dataset
            raise
        raise RuntimeError(
            f"a data loading process was killed or has crashed (out of memory?): {error!r}. "
            "Give the workers more memory, or lower num_workers"
        ) from None


def _read(dataset: Any, index: Any) -> Any:
    """Return the sample of a dataset at an integer index, or the batch at an array of indices; ignore pandas labels."""
    if isinstance(dataset, Mapping):
        return {name: _read(part, index) for name, part in dataset.items()}
    if isinstance(dataset, tuple):
        return tuple(_read(part, index) for part in dataset)
    is_single = isinstance(index, int)
    library = type(dataset).__module__.partition(".")[0]
    if library == "pyarrow":  # dataset[...] of a table returns columns
        return dataset.take([index]).to_pylist()[0] if is_single else dataset.take(index)
    if hasattr(dataset, "iloc"):  # pandas; without the labels, by which it would align the parts of a batch
        return dataset.iloc[index] if is_single else dataset.iloc[index].reset_index(drop=True)
    if is_single or library == "polars" or hasattr(dataset, "__dlpack__"):  # an array in memory
        return dataset[index]
    return _stack([dataset[position] for position in index.tolist()])


def _stack(samples: Sequence[Any]) -> Any:
    """Return a batch of samples: arrays, tensors, and tuples or dicts of these, stacked along a new first axis."""
    if isinstance(samples[0], Mapping):
        return {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
    if isinstance(samples[0], tuple):
        return tuple(_stack(parts) for parts in zip(*samples, strict=True))
    if hasattr(samples[0], "detach"):  # a tensor
        return sys.modules["torch"].stack(samples)
    is_masked = any(isinstance(sample, np.ma.MaskedArray) for sample in samples)
    return np.ma.stack(samples) if is_masked else np.stack([np.asarray(sample) for sample in samples])


class _IdentityDataset:
    """Dataset that returns the index itself: a batch, whose samples ``_collate`` reads."""

    def __getitem__(self, batch: Any) -> Any:
        return batch


def _collate(dataset: Any, collate: Callable[[list[Any]], Any], batches: list[Any]) -> tuple[Indices, Any]:
    """Return the indices of a batch, so that ``DataLoader`` yields them, and the collated samples."""
    [(key, indices)] = batches
    if key:
        seed_everything(*key)
    return indices, collate([_read(dataset, index) for index in indices.tolist()])
