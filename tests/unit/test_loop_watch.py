"""Whether a loop goes on from its checkpoint, from what it reports and from what it has asked for."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_elastic_train.elastic.loop_watch import LoopState, Offer, Verdict, missing_ranks

NEVER, ASKED, OPENED = LoopState(), LoopState(asked=True), LoopState(asked=True, opened=True)


def judged(before: dict[str, Any], reports: list[dict[str, Any]], state: LoopState, saves: bool = False) -> list[Any]:
    """Verdicts after each report, up to the first that is clear."""
    offer, found = Offer("checkpoint_a", before), []
    for metrics in reports:
        found.append(offer.judge(metrics, saves, lambda: state))
        if found[-1] is not None:
            break
    return found


@pytest.mark.parametrize(
    ("before", "reports", "state"),
    [
        ({"step": 8}, [{"step": 9}], OPENED),
        ({"step": 8}, [{"step": 9}], NEVER),  # it restores its state by means of its own
        ({"step": 8, "epoch": 0}, [{"step": 0, "epoch": 1}], OPENED),
        ({"epoch": 2}, [{"epoch": 2}], OPENED),
        ({"step": 8, "global_step": 108}, [{"step": 1, "global_step": 109}], OPENED),
        ({"step": 7}, [{"step": 0}, {"step": 6}, {"step": 7}, {"step": 0}], OPENED),  # of an epoch
        ({"loss": 1.0}, [{"loss": 0.9}], OPENED),
        ({"step": 8}, [{"phase": "warm"}, {"step": 9}], NEVER),
        ({}, [{"step": 0}], OPENED),  # another run's checkpoint
        ({"step": float("nan")}, [{"step": 1}], OPENED),
    ],
)
def test_a_loop_that_goes_on_is_not_suspected(
    before: dict[str, Any], reports: list[dict[str, Any]], state: LoopState
) -> None:
    verdicts = judged(before, reports, state)
    assert verdicts[:-1] == [None] * (len(reports) - 1)
    assert verdicts[-1].ignored is False


@pytest.mark.parametrize(
    ("before", "reports", "state", "reason", "again"),
    [
        ({"step": 8}, [{"step": 1}], NEVER, "it never called ray.train.get_checkpoint()", 1.0),
        ({"step": 8}, [{"step": 1}], ASKED, "never read what it got", 1.0),
        ({"step": 8}, [{"step": 1}, {"step": 8}, {"step": 9}], OPENED, "did not go on where that ends", 1.0),
        ({"global_step": 100}, [{"global_step": 75}], OPENED, "did not go on where that ends", 0.25),
        ({"epoch": 4, "step": 9}, [{"epoch": 2, "step": 0}], OPENED, "did not go on where that ends", 0.5),
        ({"epoch": 1, "step": 10}, [{"epoch": 1, "step": 0}], OPENED, "did not go on where that ends", 0.5),
        ({"loss": 1.0}, [{"loss": 2.0}, {"loss": 1.9}], NEVER, "it never called ray.train.get_checkpoint()", 1.0),
        ({}, [{"step": 0}, {"step": 1}], ASKED, "never read what it got", 1.0),
    ],
)
def test_a_loop_that_begins_again_is_told_with_the_reason_and_what_it_does_again(
    before: dict[str, Any], reports: list[dict[str, Any]], state: LoopState, reason: str, again: float
) -> None:
    *unclear, verdict = judged(before, reports, state)
    assert (unclear, verdict.ignored, verdict.again) == ([None] * (len(reports) - 1), True, again)
    assert reason in verdict.message


def test_a_loop_that_counts_nothing_is_judged_before_its_first_checkpoint_replaces_another() -> None:
    (verdict,) = judged({"loss": 1.0}, [{"loss": 2.0}], NEVER, saves=True)
    assert isinstance(verdict, Verdict)
    assert verdict.ignored


def test_ranks_that_keep_others_waiting_are_named_and_nobody_else() -> None:
    waits, later, behind = (LoopState(reports=5), 31.0), (LoopState(reports=5), 0.0), (LoopState(reports=4), 0.0)
    assert missing_ranks({0: waits, 1: behind, 2: waits}, 3) == ([0, 2], [1])
    assert missing_ranks({0: waits, 2: waits}, 3) == ([0, 2], [1]), "a rank that does not answer"
    assert missing_ranks({0: waits, 1: later}, 2) == ([], []), "one that uploads has begun its report"
    assert missing_ranks({0: (LoopState(reports=5), 29.0), 1: behind}, 2) == ([], []), "not for long"
    assert missing_ranks({0: behind, 1: behind}, 2) == ([], [])
