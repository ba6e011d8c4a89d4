"""Shards in several processes: bit-equal weights, the traffic, and what would break them."""

import numpy as np
import pytest

from prefect_elastic_train.loop.order import shards_of
from prefect_elastic_train.loop.shard_gradients import partial_sums_of
from tests.support.shard_loops import SHARDS, digests


@pytest.mark.parametrize(
    ("dtype", "steps", "sizes"),
    [
        ("float32", 12, (1, 2, 3, 5)),
        ("bfloat16", 12, (1, 3)),
        ("amp", 12, (1, 3)),
        pytest.param("float32", 300, (1, 2, 3, 4, 5, 8), marks=pytest.mark.full),
        pytest.param("bfloat16", 300, (1, 2, 3, 4, 5, 8), marks=pytest.mark.full),
    ],
)
def test_weights_are_bit_equal_at_any_number_of_workers(dtype: str, steps: int, sizes: tuple[int, ...]) -> None:
    """A network with BatchNorm, dropout, augmentation, AdamW, clipping, a schedule and a short last batch."""
    found = [digests(size, dtype=dtype, steps=steps) for size in sizes]
    found.append(digests(sizes[-1], dtype=dtype, steps=steps, num_workers=1, bucket_bytes=100))  # many buckets
    assert len(found[-1][1]) > len(found[-2][1])
    assert len(set.union(*(hashes for hashes, _ in found))) == 1
    for size, (_, sent) in zip(sizes[1:], found[1:], strict=False):
        total, to_others = np.sum(sent, axis=0)
        blocks = len(partial_sums_of(shards_of(size - 1, size, SHARDS)))
        assert to_others / total == pytest.approx((1 + blocks) * (size - 1) / size)


@pytest.mark.parametrize("mutant", ["order", "seed", "seed of reading"])
def test_another_order_of_the_sums_or_random_numbers_of_a_rank_are_found(mutant: str) -> None:
    assert len(set.union(*(digests(size, mutant=mutant)[0] for size in (1, 2)))) > 1
