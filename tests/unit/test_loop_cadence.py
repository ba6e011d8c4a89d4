"""How often a loop saves by itself."""

import math
import time
from typing import Any

import pytest
from scipy.optimize import minimize_scalar

from prefect_elastic_train.loop.cadence import PRIOR_SECONDS, Cadence, best_interval


@pytest.mark.parametrize("between", [300.0, 3600.0, 86400.0])
@pytest.mark.parametrize("cost", [0.01, 1.0, 20.0, 60.0])
def test_no_other_interval_spares_more_than_a_little(cost: float, between: float) -> None:
    def share_kept(interval):
        """Of the time that a run takes whose failures are independent of one another (Daly 2006, equation 14)."""
        return interval / between / math.expm1((interval + cost) / between)

    best = minimize_scalar(lambda interval: -share_kept(interval), bounds=(1e-3, 4 * between), method="bounded")
    assert share_kept(best_interval(cost, between)) > 0.995 * share_kept(best.x)


def test_a_run_is_taken_for_one_that_fails_each_six_hours_until_its_own_failures_tell_more() -> None:
    def between(trained, failures):
        return Cadence(failures=failures, trained_seconds=trained, clock=lambda: 0.0).between_failures()

    assert between(0, 0) == PRIOR_SECONDS == 6 * 3600
    assert between(3600, 12) == pytest.approx(300, rel=0.7)
    assert between(86400, 288) == pytest.approx(300, rel=0.03)
    assert between(86400, 0) > 86400


def test_a_save_comes_no_sooner_than_the_one_before_is_written_and_within_bounds() -> None:
    cadence = Cadence("auto", within=(20.0, 3000.0), failures=100, trained_seconds=3000)
    assert cadence.interval() == 20, "the first soon"
    cadence.blocked, cadence.background = 0.001, 400.0
    assert cadence.interval() == 400, "failures come each minute"
    cadence.background = 0.5
    assert cadence.interval() == 20
    cadence.failures, cadence.blocked = 0, 10_000.0
    assert cadence.interval() == 3000


@pytest.mark.parametrize(("every", "seconds"), [("90s", 90.0), ("0.5s", 0.5), (100, math.inf)])
def test_what_the_user_says_is_kept_to(every: Any, seconds: float) -> None:
    cadence = Cadence(every)
    cadence.blocked = 1000.0
    assert cadence.interval() == seconds


def test_a_save_is_due_when_its_interval_is_over_and_once_before_the_time_is() -> None:
    now = 100.0
    cadence = Cadence("90s", clock=lambda: now)
    now = 189.0
    assert not cadence.due(1)
    now = 190.0
    assert cadence.due(2)
    cadence.saved(blocked=3.0)
    assert not cadence.due(3)
    cadence.ends_at = time.time() + 115
    assert not cadence.due(4), "a save takes 3 s"
    now = 250.0
    assert not cadence.due(5)
    cadence.ends_at = time.time() + 75
    assert cadence.due(5), "a step may take a minute, as one did"
    assert cadence.due(5), "it was not saved"
    cadence.saved(blocked=3.0)
    assert not cadence.due(6), "once"
    cadence.ends_at = time.time() + 75
    assert cadence.due(6), "a step may take a minute, as one did before the last save"
    assert [Cadence(10).due(step) for step in (9, 10, 11, 20)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"within": (60.0, 10.0)}, "give the shortest and the longest interval"),
        *(
            ({"every": every}, 'give a number of steps, seconds such as "90s", or "auto"')
            for every in (0, 1.5, "", "s", "-3s", "0s", "90", None)
        ),
    ],
)
def test_what_is_no_interval_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Cadence(**arguments)
