"""When a healthy worker group grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.elastic.sizing import Growth, Reason, Stability


def test_nodes_of_the_first_look_are_relied_on_at_once_and_later_ones_after_the_delay() -> None:
    nodes = Stability(30)
    assert nodes.observe(100, ["a"]) == {"a"}
    assert nodes.next_change(100) is None
    assert nodes.observe(110, ["a", "b"]) == {"a"}
    assert nodes.next_change(110) == 30
    assert nodes.observe(139, ["a", "b"]) == {"a"}
    assert nodes.observe(140, ["a", "b"]) == {"a", "b"}
    assert nodes.next_change(140) is None


def test_a_growth_waits_for_a_commit() -> None:
    growth = Growth(600)
    assert growth.due(0, committed=True, has_checkpoint=True) is None, "nothing is decided"
    assert growth.look(10, current=2, possible=4)
    assert growth.due(11, committed=False, has_checkpoint=True) is None
    assert growth.due(12, committed=True, has_checkpoint=True) is Reason.COMMIT
    assert growth.waited_seconds(12) == 2


def test_a_growth_does_not_wait_for_ever() -> None:
    growth = Growth(600)
    growth.look(0, current=2, possible=3)
    assert not growth.look(500, current=2, possible=4), "a larger one does not begin the wait anew"
    assert growth.target == 4
    assert growth.due(599, committed=False, has_checkpoint=True) is None
    assert growth.due(600, committed=False, has_checkpoint=False) is None
    assert growth.due(600, committed=False, has_checkpoint=True) is Reason.PATIENCE


def test_nodes_that_come_one_after_the_other_cost_one_restart() -> None:
    growth = Growth(600, settling_seconds=30)
    assert not growth.look(0, current=2, possible=3, more_awaited=True)
    assert growth.due(1, committed=True, has_checkpoint=True) is None
    assert growth.look(20, current=2, possible=4, more_awaited=False)
    assert growth.due(21, committed=True, has_checkpoint=True) is Reason.COMMIT
    assert growth.target == 4


def test_a_node_that_comes_again_and_again_does_not_hold_a_growth_up_for_ever() -> None:
    growth = Growth(600, settling_seconds=30)
    for now in range(0, 30, 5):
        assert not growth.look(now, current=2, possible=3, more_awaited=True)
    assert growth.look(30, current=2, possible=3, more_awaited=True)
    assert not growth.look(31, current=2, possible=3, more_awaited=True), "what is announced stands"
    assert growth.due(32, committed=True, has_checkpoint=True) is Reason.COMMIT


def test_an_announced_growth_stands_when_another_node_arrives() -> None:
    growth = Growth(600, settling_seconds=30)
    assert growth.look(0, current=2, possible=3)
    assert not growth.look(1, current=2, possible=3, more_awaited=True), "the loop has been asked to save"
    assert growth.due(2, committed=True, has_checkpoint=True) is Reason.COMMIT


def test_no_patience_set_is_patience_without_an_end() -> None:
    growth = Growth(0)
    growth.look(0, current=2, possible=3)
    assert growth.due(1e9, committed=False, has_checkpoint=True) is None
    assert growth.due(1e9, committed=True, has_checkpoint=False) is Reason.COMMIT


def test_a_growth_that_is_not_possible_any_more_is_called_off() -> None:
    growth = Growth(600)
    growth.look(0, current=2, possible=3)
    assert growth.look(1, current=2, possible=2)
    assert not growth.decided
    assert growth.due(2, committed=True, has_checkpoint=True) is None
    assert growth.look(700, current=2, possible=3)
    assert growth.waited_seconds(701) == 1


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.floats(0.1, 400)), max_size=40),
)
def test_no_decision_without_capacity_and_never_a_shrink(current: int, turns: list[tuple[int, bool, float]]) -> None:
    growth, now = Growth(600), 0.0
    for possible, committed, passed in turns:
        now += passed
        growth.look(now, current, possible)
        reason = growth.due(now, committed, has_checkpoint=True)
        if reason is not None:
            assert current < growth.target <= possible
        assert growth.decided == (possible > current)
        assert (reason is Reason.COMMIT) == (committed and possible > current)


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.floats(0.1, 60)), min_size=1, max_size=40))
def test_only_nodes_seen_without_a_gap_are_relied_on(looks: list[tuple[set[str], float]]) -> None:
    nodes, now = Stability(30), 0.0
    history: list[tuple[float, set[str]]] = []
    for present, passed in looks:
        now += passed
        history.append((now, present))
        reliable = nodes.observe(now, present)
        assert reliable <= present
        for name in reliable:
            since = now
            for at, seen in reversed(history):
                if name not in seen:
                    break
                since = at
            assert now - since >= 30 or since == history[0][0]
