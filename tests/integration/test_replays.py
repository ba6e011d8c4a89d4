"""Replays find flipped bits in weights and gradients, and only these."""

import random
import re

import pytest

from tests.support.shard_loops import digests, wrong_result_messages

PARAMETERS = 10  # parameter tensors of the network


@pytest.mark.parametrize("shards", [16, 0])
@pytest.mark.parametrize("kind", ["weights", "gradients"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_flipped_bit_is_found_within_the_interval(kind: str, shards: int, seed: int) -> None:
    # Without its two highest bits, which make the weights of all ranks NaN at the next exchange.
    generator = random.Random(seed)
    flip_step, rank = generator.randint(1, 9), generator.randrange(3)
    flip = (kind, flip_step, rank, generator.randrange(PARAMETERS), generator.randrange(30))
    [message] = wrong_result_messages(3, shards=shards, replay_every=4, steps=16, flip=flip)
    match = re.match(rf"step (\d+): the {kind} of rank {rank} on .* \(ranks: \[{rank}\]\)", message)
    assert match, message
    assert flip_step <= int(match[1]) < flip_step + 4


@pytest.mark.parametrize(("size", "shards", "dtype"), [(1, 16, "amp"), (3, 16, "float32"), (3, 0, "amp")])
def test_replays_of_a_healthy_training_raise_nothing_and_change_no_bits(size: int, shards: int, dtype: str) -> None:
    """A network with BatchNorm, dropout, augmentation, and a short last batch."""
    options = {"shards": shards, "dtype": dtype}
    assert digests(size, replay_every=1, **options)[0] == digests(size, **options)[0]
