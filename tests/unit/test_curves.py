"""A curve of any length in a bounded number of points."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.report.curves import MAX_STRETCHES, Curve, Point
from tests.unit.support import examples


def _curve(points: list[Point], curve: Curve | None = None) -> Curve:
    curve = curve or Curve()
    for point in points:
        curve.add(*point)
    return curve


def test_a_short_curve_is_kept_as_it_is_without_what_is_no_finite_number() -> None:
    assert Curve().points == []
    points = [(float(number), float(number % 7)) for number in range(MAX_STRETCHES)]
    strange = [(1, math.nan), (2, math.inf), (3, -math.inf), (math.nan, 4), (math.inf, 5)]
    assert _curve([*points[:50], *strange, *points[50:]]).points == points


def test_the_peaks_of_thousands_of_points_are_kept_and_little_else() -> None:
    noise = random.Random(1)
    values = [2.5 * math.exp(-number / 3_000) + noise.random() / 20 for number in range(10_000)]
    extremes = {17: 9.0, 400: 8.0, 5_001: 99.0, 9_990: 7.0, 100: -1.0, 3_333: -50.0, 9_998: -2.0}
    for place, value in extremes.items():
        values[place] = value
    curve = _curve([(float(x), y) for x, y in enumerate(values)])
    points = curve.points
    assert MAX_STRETCHES / 2 <= len(points) <= 2 * MAX_STRETCHES + 1, "not thinner than it has to be"
    assert {(float(x), y) for x, y in extremes.items()} <= set(points)
    assert points == sorted(points)
    assert points[-1] == (9_999.0, values[-1]), "the newest point is shown"
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(points)]
    assert max(gaps) <= 2 * 10_000 / (MAX_STRETCHES / 2)
    assert len(curve.model_dump_json()) < 40_000


_NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5).map(float)


@examples(40)
@given(added=st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=40), times=st.integers(1, 40), place=st.integers(0, 1600))
def test_any_points_are_bounded_with_their_extremes_and_a_curve_goes_on_from_its_state(
    added: list[Point], times: int, place: int
) -> None:
    points = added * times
    seen = {(x, y) for x, y in added if math.isfinite(x) and math.isfinite(y)}
    curve = _curve(points)
    assert len(curve.points) <= 2 * MAX_STRETCHES + 1
    assert set(curve.points) <= seen, "nothing is made up"
    heights = {y for _, y in seen}
    assert {min(heights, default=0), max(heights, default=0)} <= {y for _, y in curve.points} | {0}
    parted = Curve.model_validate_json(_curve(points[:place]).model_dump_json())
    assert _curve(points[place:], parted) == curve
