"""Loading the samples of each step: by torch's ``DataLoader`` for its datasets, else by their indices."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
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
        self._ends = np.cumsum([max(1, round(weight * times)) for weight in weights])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        which = int(np.searchsorted(self._ends, index, side="right"))
        inside = (index - int(self._ends[which - 1] if which else 0)) % self._lengths[which]
        dataset = self.datasets[which]
        if isinstance(dataset, dict):
            return {name: part[inside] for name, part in dataset.items()}
        return tuple(part[inside] for part in dataset) if isinstance(dataset, tuple) else dataset[inside]


def length_of(dataset: Any) -> int:
    """Return how many samples a dataset has; a TypeError if it is a stream."""
    parts = dataset.values() if isinstance(dataset, dict) else dataset if isinstance(dataset, tuple) else [dataset]
    if not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts):
        raise TypeError(
            f"{type(dataset).__name__} has no __len__ and __getitem__: in Ray Data's shards and other streams no "
            "position is found again. Load the samples by their index (Parquet files by memory map, for instance), or "
            "keep to ray.train.get_dataset_shard and accept that a restart begins its epoch again"
        )
    if len(lengths := {len(part) for part in parts}) != 1:
        raise TypeError(f"the arrays of a dataset have one length, not {sorted(lengths)}")
    return lengths.pop()


def load(dataset: Any, sampler: StepBatches, options: dict[str, Any]) -> Iterator[tuple[Indices, Any]]:
    """Yield the samples that were loaded for each batch, and the batch of them."""
    torch = sys.modules.get("torch")
    first = dataset.datasets[0] if isinstance(dataset, Mixture) else dataset
    if torch is not None and isinstance(first, torch.utils.data.Dataset):
        indexed = _Indexed(dataset, options.pop("collate_fn", None) or torch.utils.data.default_collate)
        # Its workers' seed is not drawn from the loop's generator, whose state would then depend on restarts.
        seeds = np.random.SeedSequence([sampler.order.seed % 2**64, sampler.steps.start, sampler.rank])
        options = {"generator": torch.Generator().manual_seed(int(seeds.generate_state(1)[0])), **options}
        own = {"batch_sampler": sampler, "collate_fn": indexed.collate, "in_order": True}
        yield from torch.utils.data.DataLoader(indexed, **own, **options)
    elif options:
        what = f"batches({type(dataset).__name__}, {next(iter(options))}=...)"
        raise TypeError(f"{what}: options are those of torch's DataLoader, which loads a torch.utils.data.Dataset")
    else:
        for samples in sampler.arrays():
            yield samples, _take(dataset, samples)


def _take(dataset: Any, samples: Indices) -> Any:
    """Return samples of arrays, of a tuple or dict of arrays, or of a sequence, stacked."""
    if isinstance(dataset, dict):
        return {name: _take(part, samples) for name, part in dataset.items()}
    if isinstance(dataset, tuple):
        return tuple(_take(part, samples) for part in dataset)
    return dataset[samples] if hasattr(dataset, "shape") else _stack([dataset[int(index)] for index in samples])


def _stack(items: list[Any]) -> Any:
    if isinstance(items[0], dict):
        return {name: _stack([item[name] for item in items]) for name in items[0]}
    if isinstance(items[0], tuple):
        return tuple(_stack(list(parts)) for parts in zip(*items, strict=True))
    return np.stack([np.asarray(item) for item in items])


class _Indexed:
    """A dataset whose samples come with their indices: what was loaded is known, not what should have been."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[index]

    def collate(self, items: list[tuple[int, Any]]) -> tuple[Indices, Any]:
        return np.array([index for index, _ in items], dtype=np.int64), self._collate([item for _, item in items])
