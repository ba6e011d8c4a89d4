"""The order of samples: each once in an epoch, whoever divides a step, and found again by the number of the step."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from prefect_elastic_train.loop.order import MAX_LENGTH, SampleOrder, StepBatches, permute
from tests.unit.support import examples

lengths = st.integers(1, 2**40) | st.integers(1, 300)


@given(length=lengths, data=st.data())
@examples(50)
def test_different_positions_of_a_long_epoch_are_different_samples_of_it(length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), unique=True, min_size=1, max_size=200))
    indices = permute(np.array(positions), length, 7, 3).tolist()
    assert len(set(indices)) == len(positions)
    assert all(0 <= index < length for index in indices)
    again = [permute(np.array([position]), length, 7, 3).item() for position in positions]
    assert again == indices, "of each position alone the same"


@pytest.mark.parametrize("length", [5, 31, 100])
def test_over_many_epochs_each_sample_comes_at_each_position_as_often(length: int) -> None:
    orders = np.array([permute(np.arange(length), length, 11, epoch) for epoch in range(1200)])
    counts = np.array([np.bincount(orders[:, position], minlength=length) for position in range(length)])
    assert stats.chisquare(counts, axis=1).pvalue.min() > 0.001 / length


def test_neighbours_are_no_neighbours_and_keys_have_nothing_in_common() -> None:
    length = 2**30
    first, second = (permute(np.arange(20_000), length, 0, epoch) for epoch in (0, 1))
    for pair in ((first[:-1], first[1:]), (first, second), (first, np.arange(20_000))):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.03
    assert stats.kstest(first / length, "uniform").pvalue > 0.001


@given(
    length=st.integers(1, 400),
    batch=st.integers(1, 70),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    world_size=st.integers(1, 9),
    step=st.integers(0, 60),
)
@examples(100)
def test_a_step_has_the_same_samples_however_many_workers_divide_it(
    length: int, batch: int, shuffle: bool, drop_last: bool, world_size: int, step: int
) -> None:
    order = SampleOrder(length, batch, 5, shuffle, drop_last and batch <= length)
    shares = [order.share(step, rank, world_size) for rank in range(world_size)]
    assert np.concatenate(shares).tolist() == order.indices(step).tolist()
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    values = np.random.default_rng(0).normal(size=length)
    means = [
        order.weight(step, rank, world_size) * values[share].mean() for rank, share in enumerate(shares) if sizes[rank]
    ]
    assert sum(means) / world_size == pytest.approx(values[order.indices(step)].mean())


@given(length=st.integers(1, 300), batch=st.integers(1, 50), drop_last=st.booleans(), epoch=st.integers(0, 3))
@examples(60)
def test_the_steps_of_an_epoch_have_each_sample_once_or_leave_out_the_last_few(
    length: int, batch: int, drop_last: bool, epoch: int
) -> None:
    order = SampleOrder(length, batch, 1, drop_last=drop_last and batch <= length)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    assert {order.epoch(step) for step in steps} == {epoch}
    seen = np.concatenate([order.indices(step) for step in steps]).tolist()
    assert len(set(seen)) == len(seen)
    assert len(seen) == (length // batch * batch if order.drop_last else length)


def test_the_order_of_a_seed_stays() -> None:
    """What a checkpoint of an earlier version has not seen, a later one must not take for seen."""
    assert SampleOrder(1000, 5, seed=42).indices(123).tolist() == [996, 866, 387, 750, 362]
    long = SampleOrder(2**40, 3, seed=42)
    assert long.indices(7).tolist() == [627286702982, 291257829789, 348764768603]


def test_the_batches_of_a_sampler_are_the_shares_of_its_steps() -> None:
    order = SampleOrder(10, 4, seed=1)
    sampler = StepBatches(order, range(1, 5), rank=1, world_size=2)
    assert len(sampler) == 4
    assert list(sampler) == [order.share(step, 1, 2).tolist() for step in range(1, 5)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"length": 0}, "length=0: a dataset has from 1 to"),
        ({"length": MAX_LENGTH + 1}, "a dataset has from 1 to"),
        ({"global_batch": 0}, "global_batch=0: must be from 1 to"),
        ({"global_batch": 6, "drop_last": True}, "must be from 1 to 5 with drop_last=True"),
    ],
)
def test_what_makes_no_order_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SampleOrder(**{"length": 5, "global_batch": 1, **arguments})
