"""Loading the samples of each step by their positions: with torch's ``DataLoader``, or without."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prefect_elastic_train.loop.order import Indices, StepBatches


class Mixture:
    """Several datasets as one, each with its share of the samples: a function of the index alone, as the order is.

    An epoch is the shortest in which all are seen whole: the samples of one come once, those of the others again and
    again, as often as the weights say, which need not add up to 1.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float]) -> None:
        if not datasets or len(datasets) != len(weights) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"Mixture of {len(datasets)} datasets: give each a weight above 0, not {list(weights)}")
        self.datasets, self._lengths = list(datasets), [length_of(one) for one in datasets]
        times = max(length / weight for length, weight in zip(self._lengths, weights, strict=True))
        self._begins = np.cumsum([0, *(max(1, round(weight * times)) for weight in weights)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        which = np.searchsorted(self._begins, index, side="right") - 1
        return _read(self.datasets[which], int(index - self._begins[which]) % self._lengths[which])


def length_of(dataset: Any) -> int:
    """Return the number of samples of a dataset.

    Raises:
        TypeError: Its samples cannot be read by position, such as those of a stream, or its parts differ in length.
    """
    has_columns = isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset)
    if has_columns or isinstance(dataset, tuple):
        lengths = {length_of(part) for part in (dataset.values() if has_columns else dataset)}
        if len(lengths) != 1:
            raise TypeError(f"the arrays of a dataset have one length, not {sorted(lengths)}")
        return lengths.pop()
    kind = type(dataset).__name__
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"{kind} has no __len__ and __getitem__ (of a DataLoader, give loader.dataset): streams such as shards of "
            "Ray Data cannot be resumed at a position. Load the samples by their index (Parquet files by memory map, "
            "for instance), or keep to ray.train.get_dataset_shard and accept that a restart begins its epoch again"
        )
    if _reads_labels(dataset) or hasattr(dataset, "nnz") or isinstance(dataset, Mapping | str):
        raise TypeError(
            f"the samples of {kind} cannot be read by position: "
            "give an array of them (such as .to_numpy() or .toarray() returns) or a list"
        )
    return len(dataset)


def _reads_labels(dataset: Any) -> bool:
    """Return whether a dataset of torch, such as ``Subset``, holds one of pandas, which it reads by label."""
    if type(dataset).__module__ != "torch.utils.data.dataset":
        return False
    held = vars(dataset).get("datasets") or [vars(dataset).get("dataset")]
    return any(
        hasattr(one, "iloc") or _reads_labels(one) for one in (held.values() if hasattr(held, "values") else held)
    )


def load(dataset: Any, sampler: StepBatches, options: dict[str, Any]) -> Iterator[tuple[Indices, Any]]:
    """Yield the samples that were loaded for each batch, and the batch of them."""
    torch = sys.modules.get("torch")
    for name in options.keys() & {"batch_size", "sampler", "batch_sampler"}:
        raise TypeError(
            f"{name}={options[name]!r}: the session chooses the samples of each batch. Set its global_batch (of all "
            "workers), and micro_batch to limit a worker's batch"
        )
    parts = dataset.datasets if isinstance(dataset, Mixture) else [dataset]
    if torch is not None and (options or any(isinstance(part, torch.utils.data.Dataset) for part in parts)):
        # Its workers' seed is not drawn from the loop's generator, whose state would then depend on restarts.
        seeds = np.random.SeedSequence([sampler.order.seed % 2**64, sampler.steps.start, sampler.rank])
        options = {"generator": torch.Generator().manual_seed(int(seeds.generate_state(1)[0])), **options}
        indexed = _Indexed(dataset, options.pop("collate_fn", None) or torch.utils.data.default_collate)
        loader = torch.utils.data.DataLoader(
            indexed, batch_sampler=sampler, collate_fn=indexed.collate, in_order=True, **options
        )
        try:
            yield from loader
        except (EOFError, OSError, RuntimeError) as error:
            if "Caught " in str(error) or not loader.num_workers:  # an error of the dataset
                raise
            raise RuntimeError(
                f"a data loading process was killed or has crashed (out of memory?): {type(error).__name__}: {error}. "
                "Give the workers more memory, or lower num_workers"
            ) from None
    elif options:
        raise TypeError(
            f"batches({type(dataset).__name__}, {next(iter(options))}=...): "
            "this is an option of torch's DataLoader; import torch to use it"
        )
    else:
        for samples in sampler.arrays():
            yield samples, _read(dataset, samples)


def _read(dataset: Any, at: Any) -> Any:
    """Return the sample at a position, or the batch of those at several; labels such as those of pandas are ignored."""
    if isinstance(dataset, Mapping):
        return {name: _read(part, at) for name, part in dataset.items()}
    if isinstance(dataset, tuple):
        return tuple(_read(part, at) for part in dataset)
    is_one, library = isinstance(at, int), type(dataset).__module__.partition(".")[0]
    if library == "pyarrow":  # where [] takes columns of a table
        return dataset.take([at]).to_pylist()[0] if is_one else dataset.take(at)
    if hasattr(dataset, "iloc"):  # pandas, where [] reads by label; a new index, or parts of a batch would be aligned
        return dataset.iloc[at] if is_one else dataset.iloc[at].reset_index(drop=True)
    if is_one or library == "polars" or hasattr(dataset, "__dlpack__"):  # an array in memory
        return dataset[at]
    return _stack([dataset[index] for index in at.tolist()])


def _stack(items: Sequence[Any]) -> Any:
    if isinstance(items[0], Mapping):
        return {name: _stack([item[name] for item in items]) for name in items[0]}
    if isinstance(items[0], tuple):
        return tuple(_stack(parts) for parts in zip(*items, strict=True))
    if hasattr(items[0], "detach"):  # a tensor
        return sys.modules["torch"].stack(items)
    is_masked = any(isinstance(item, np.ma.MaskedArray) for item in items)
    return np.ma.stack(items) if is_masked else np.stack([np.asarray(item) for item in items])


class _Indexed:
    """A dataset whose samples come with their indices: what was loaded is known, not what should have been."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, _read(self._dataset, index)

    def collate(self, items: list[tuple[int, Any]]) -> tuple[Indices, Any]:
        return np.array([index for index, _ in items], dtype=np.int64), self._collate([item for _, item in items])
