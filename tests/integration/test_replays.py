"""Replays find flipped bits in weights and gradients, and only these."""

import random
import re

import pytest

from tests.support.shard_loops import digests, wrong_results

PARAMETERS = 10  # of the network


@pytest.mark.parametrize("shards", [16, 0])
@pytest.mark.parametrize("kind", ["weights", "gradients"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_flipped_bit_is_found_within_the_interval(kind: str, shards: int, seed: int) -> None:
    chance = random.Random(seed)
    at, rank = chance.randint(1, 9), chance.randrange(3)
    flip = (kind, at, rank, chance.randrange(PARAMETERS), chance.randrange(32))
    found = wrong_results(3, shards=shards, replay_every=4, steps=16, flip=flip)
    [message] = found
    problem = "has other weights" if kind == "weights" else "computes other gradients"
    match = re.match(rf"step (\d+): rank {rank} on \S+ {problem} .* \(\[{rank}\]\)$", message)
    assert match, message
    assert at <= int(match[1]) < at + 4


@pytest.mark.parametrize("dtype", ["float32", "amp"])
@pytest.mark.parametrize("size", [1, 3])
def test_replays_change_no_bits_and_find_nothing_else(size: int, dtype: str) -> None:
    """A network with BatchNorm, dropout, augmentation, and a short last batch."""
    assert digests(size, dtype=dtype, replay_every=1)[0] == digests(size, dtype=dtype)[0]
