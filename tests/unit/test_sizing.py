"""With how many workers a group starts, and when a healthy one grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.elastic.sizing import Growth, Reason, Stability, Start


def test_nodes_of_the_first_look_are_relied_on_at_once_and_later_ones_after_the_delay_without_a_gap() -> None:
    nodes = Stability(30)
    assert nodes.observe(100, ["a"]) == {"a"}
    assert nodes.observe(110, ["a", "b"]) == {"a"}
    assert nodes.observe(139, ["a", "b"]) == {"a"}
    assert nodes.observe(140, ["a", "b"]) == {"a", "b"}
    assert nodes.observe(141, ["b"]) == {"b"}
    assert nodes.observe(142, ["a", "b"]) == {"b"}


def test_a_growth_waits_for_a_commit_and_not_for_ever() -> None:
    growth = Growth(600)
    assert growth.due(0, committed=True, has_checkpoint=True) is None, "nothing is decided"
    assert growth.look(0, current=2, possible=3)
    assert growth.due(1, committed=True, has_checkpoint=False) is Reason.COMMIT
    assert not growth.look(500, current=2, possible=4), "a larger one does not begin the wait anew"
    assert (growth.target, growth.waited_seconds(500)) == (4, 500)
    assert growth.due(599, committed=False, has_checkpoint=True) is None
    assert growth.due(600, committed=False, has_checkpoint=False) is None, "it would throw away all work"
    assert growth.due(600, committed=False, has_checkpoint=True) is Reason.PATIENCE
    endless = Growth(0)
    endless.look(0, current=2, possible=3)
    assert endless.due(1e9, committed=False, has_checkpoint=True) is None


def test_a_growth_that_is_not_possible_any_more_is_called_off() -> None:
    growth = Growth(600)
    growth.look(0, current=2, possible=3)
    assert growth.look(1, current=2, possible=2)
    assert growth.due(2, committed=True, has_checkpoint=True) is None
    assert growth.look(700, current=2, possible=3)
    assert growth.waited_seconds(701) == 1


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
def test_a_start_is_within_bounds_and_capacity_and_of_whole_slices_and_comes_in_the_end(
    story: list[tuple[str, int, int, float]], fewest: int, more: int, step: int, wait_for_max: float
) -> None:
    smallest, largest = fewest * step, (fewest + more) * step
    start, now, asked = Start(smallest, largest, step, wait_for_max), 0.0, 0
    for what, one, other, seconds in story:
        now += seconds
        possible, stable = max(one, other) * step, min(one, other) * step
        if what == "started and lost":
            start.started(asked)
        elif what == "refused" and asked:
            start.failed(now, refused=asked)
        elif what == "failed":
            start.failed(now)
        size = start.size(now, min(possible, largest), min(stable, largest))
        assert size == 0 or smallest <= size <= min(possible, largest), "within bounds, and never without capacity"
        assert size % step == 0
        assert smallest <= start.limit(now) <= largest
        asked = size or asked
    start.waited(now)
    assert start.size(now + 61.0, smallest, 0) == smallest
    assert start.size(now + 601.0, largest, largest) == largest, "a size that was refused has its turn again"


def test_what_cannot_be_placed_is_asked_for_in_ever_smaller_sizes() -> None:
    start, sizes = Start(2, 16), []
    for _ in range(5):
        sizes.append(start.size(0.0, 16, 16))
        start.failed(0.0, refused=sizes[-1])
    assert sizes == [16, 15, 13, 9, 2]
    assert start.size(0.0, 16, 16) == 0, "then it pauses"


@pytest.mark.parametrize(("lost", "moment", "size"), [(4, 1.0, 0), (4, 2.0, 3), (3, 0.0, 3)])
def test_after_a_loss_what_is_given_back_has_a_moment_to_be_seen(lost: int, moment: float, size: int) -> None:
    start = Start(1, 4)
    start.started(lost)
    start.waited(0.0)
    assert start.size(moment, 3, 3) == size


def test_failures_over_days_pause_half_a_minute_each_and_overflow_nothing() -> None:
    start = Start(1, 4)
    for _ in range(5000):
        start.failed(0.0)
    assert start.size(29.9, 4, 4) == 0
    assert start.size(30.0, 4, 4) == 4
