"""With how many workers a group starts: decisions over whatever happens to the groups and the capacity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.elastic.sizing import Start

happenings = st.lists(
    st.tuples(
        st.sampled_from(["look", "look", "look", "started and lost", "refused", "failed"]),
        st.integers(0, 12),
        st.integers(0, 12),
        st.sampled_from([0.1, 1.0, 30.0, 700.0]),
    ),
    max_size=40,
)


@given(happenings, st.integers(1, 6), st.integers(0, 6), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 60.0]))
def test_a_start_is_within_bounds_and_capacity_and_of_whole_slices(
    story: list[tuple[str, int, int, float]], fewest: int, more: int, step: int, wait_for_max: float
) -> None:
    smallest, largest = fewest * step, (fewest + more) * step
    start, now, asked = Start(smallest, largest, step, wait_for_max), 0.0, 0
    for what, one, other, seconds in story:
        now += seconds
        possible, stable = max(one, other) * step, min(one, other) * step
        if what == "started and lost":
            start.started()
            start.begin(now, lost=asked)
        elif what == "refused" and asked:
            start.refused(now, asked)
        elif what == "failed":
            start.failed(now)
        start.begin(now)
        size = start.size(now, min(possible, largest), min(stable, largest))
        assert size == 0 or smallest <= size <= min(possible, largest), "within bounds, and never without capacity"
        assert size % step == 0
        assert smallest <= start.limit(now) <= largest
        asked = size or asked


@given(happenings, st.integers(1, 4), st.integers(0, 4), st.sampled_from([1, 2]))
def test_whatever_happened_a_group_starts_in_the_end_where_there_is_room(
    story: list[tuple[str, int, int, float]], fewest: int, more: int, step: int
) -> None:
    smallest, largest = fewest * step, (fewest + more) * step
    start, now = Start(smallest, largest, step, wait_for_max_seconds=60.0), 0.0
    for what, one, _, seconds in story:
        now += seconds
        if what == "refused":
            start.refused(now, max(smallest, min(one * step, largest)))
        elif what == "failed":
            start.failed(now)
        elif what == "started and lost":
            start.started()
        start.begin(now, lost=largest)
    start.begin(now)
    assert start.size(now + 61.0, smallest, 0) == smallest
    assert start.size(now + 601.0, largest, largest) == largest, "a size that was refused has its turn again"


def test_what_cannot_be_placed_is_asked_for_in_ever_smaller_sizes() -> None:
    start, sizes = Start(2, 16), []
    start.begin(0.0)
    for _ in range(5):
        sizes.append(start.size(0.0, 16, 16))
        start.refused(0.0, sizes[-1])
    assert sizes == [16, 15, 13, 9, 2]
    assert start.size(0.0, 16, 16) == 0, "then it pauses"


@pytest.mark.parametrize(("lost", "moment", "size"), [(4, 1.0, 0), (4, 2.0, 3), (3, 0.0, 3), (0, 0.0, 3)])
def test_after_a_loss_what_is_given_back_has_a_moment_to_be_seen(lost: int, moment: float, size: int) -> None:
    start = Start(1, 4)
    start.started()
    start.begin(0.0, lost=lost)
    assert start.size(moment, 3, 3) == size


def test_failures_over_days_pause_half_a_minute_each_and_overflow_nothing() -> None:
    start = Start(1, 4)
    for _ in range(5000):
        start.failed(0.0)
    assert start.size(29.9, 4, 4) == 0
    assert start.size(30.0, 4, 4) == 4
