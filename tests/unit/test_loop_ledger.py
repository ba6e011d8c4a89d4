"""The ledger of samples: it tells whether each step has seen exactly its own, whoever saw which part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.loop.ledger import Ledger, combine, digest
from prefect_elastic_train.loop.order import SampleOrder

ORDER = SampleOrder(1000, global_batch=48, seed=9)


def _wrong(world_size: int, steps: range, change: dict[tuple[int, int], list[int]]) -> list[int]:
    """The steps that are found wrong, of so many ranks, some of which have taken in other samples than they should."""
    ledgers = [Ledger() for _ in range(world_size)]
    for step in steps:
        for rank, ledger in enumerate(ledgers):
            samples = change.get((step, rank), ORDER.share(step, rank, world_size).tolist())
            ledger.add(np.array(samples, dtype=np.int64), step)
    found = combine(ledger.flush(steps.stop)["steps"] for ledger in ledgers)
    expected = np.array([digest(ORDER.indices(step), step) for step in steps])
    return [step for step, wrong in zip(steps, (found != expected).any(axis=1), strict=True) if wrong]


def test_steps_that_saw_their_samples_are_right_however_many_workers_divided_them() -> None:
    assert [_wrong(world_size, range(15, 60), {}) for world_size in (1, 2, 3, 7)] == [[]] * 4


#: The samples of three ranks in steps 20 and 21.
AT, AFTER = ([ORDER.share(step, rank, 3).tolist() for rank in range(3)] for step in (20, 21))
CHANGES = {
    "left out": ({(20, 1): AT[1][1:]}, [20]),
    "twice": ({(20, 1): [*AT[1], AT[1][0]]}, [20]),
    "exchanged between steps": ({(20, 0): AFTER[0], (21, 0): AT[0]}, [20, 21]),
    "a pair of doubles": ({(20, 0): [*AT[0][2:], *AT[0][2:4]]}, [20]),
    "exchanged between ranks": ({(20, 0): AT[1], (20, 1): AT[0]}, []),
}


@pytest.mark.parametrize(("change", "wrong"), CHANGES.values(), ids=CHANGES)
def test_a_step_that_saw_other_samples_is_told(change: dict[tuple[int, int], list[int]], wrong: list[int]) -> None:
    assert _wrong(3, range(15, 40), change) == wrong


@given(st.lists(st.integers(0, 2**40), max_size=50), st.integers(0, 2**40), st.integers(0, 50))
def test_the_digest_of_the_whole_is_that_of_its_parts_in_any_order(samples: list[int], step: int, cut: int) -> None:
    whole = digest(np.array(samples, dtype=np.int64), step)
    parts = [digest(np.array(part, dtype=np.int64), step) for part in (samples[cut:], samples[:cut])]
    assert np.array_equal(combine(parts), whole)


def test_samples_exchanged_between_steps_are_told_by_their_total_too() -> None:
    right, exchanged = ([digest(ORDER.indices(step ^ other), step) for step in (0, 1)] for other in (0, 1))
    assert not np.array_equal(combine(right), combine(exchanged))


def test_the_total_goes_on_over_checkpoints() -> None:
    ledger, expected = Ledger(), []
    for step in range(30):
        ledger.add(ORDER.indices(step), step)
        expected.append(digest(ORDER.indices(step), step))
        if step % 7 == 6:
            ledger.flush(step + 1)
            assert np.array_equal(ledger.total, combine(expected))
    kept = ledger.flush(30)
    assert kept["since"] == 28
    assert np.array_equal(kept["steps"], expected[28:])
