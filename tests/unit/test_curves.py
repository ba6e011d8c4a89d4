"""A curve of any length in a bounded number of points."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.report.curves import MAX_STRETCHES, Curve, Point
from tests.unit.support import examples


def _curve(*points: tuple[int, float, float]) -> Curve:
    curve = Curve()
    for segment, x, y in points:
        curve.add(segment, x, y)
    return curve


def _points(curve: Curve) -> list[Point]:
    return [point for points in curve.segments().values() for point in points]


def test_a_short_curve_is_kept_as_it_is() -> None:
    assert Curve().segments() == {}
    assert _curve((1, 5, 2)).segments() == {1: [(5, 2)]}
    points = [(float(number), float(number % 7)) for number in range(MAX_STRETCHES)]
    assert _curve(*((1, x, y) for x, y in points)).segments() == {1: points}


def test_the_peaks_of_a_hundred_thousand_points_are_kept_and_little_else() -> None:
    noise = random.Random(1)
    values = [2.5 * math.exp(-number / 30_000) + noise.random() / 20 for number in range(100_000)]
    peaks = {17: 9.0, 4_000: 8.0, 50_001: 99.0, 99_990: 7.0}
    lows = {100: -1.0, 33_333: -50.0, 99_998: -2.0}
    for place, value in {**peaks, **lows}.items():
        values[place] = value
    curve = _curve(*((1, float(x), y) for x, y in enumerate(values)))
    points = _points(curve)
    assert len(points) <= 2 * MAX_STRETCHES + 1
    assert len(points) >= MAX_STRETCHES / 2, "not thinner than it has to be"
    assert {(float(x), y) for x, y in {**peaks, **lows}.items()} <= set(points)
    assert points == sorted(points)
    assert points[-1] == (99_999.0, values[-1]), "the newest point is shown"
    assert points[0][0] <= 1_000, "so is the beginning"
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(points)]
    assert max(gaps) <= 2 * 100_000 / (MAX_STRETCHES / 2)
    assert len(curve.model_dump_json()) < 40_000


def test_segments_are_kept_apart_and_x_may_go_back_between_them() -> None:
    curve = Curve()
    for segment, (begin, end) in enumerate([(0, 30_000), (20_000, 60_000), (50_000, 80_000)]):
        for x in range(begin, end):
            curve.add(segment, float(x), float(segment))
    segments = curve.segments()
    assert list(segments) == [0, 1, 2]
    for segment, (begin, end) in enumerate([(0, 30_000), (20_000, 60_000), (50_000, 80_000)]):
        assert {y for _, y in segments[segment]} == {float(segment)}
        xs = [x for x, _ in segments[segment]]
        assert xs == sorted(xs)
        assert begin <= xs[0] < begin + 2_000
        assert end - 2_000 < xs[-1] < end
    assert len(_points(curve)) <= 2 * MAX_STRETCHES + 1


def test_ten_thousand_tiny_segments_are_bounded_and_their_peaks_kept() -> None:
    curve = Curve()
    for segment in range(10_000):
        for x in range(3):
            curve.add(segment, float(segment + x), 1000.0 if (segment, x) == (4_321, 1) else float(x))
    points = _points(curve)
    assert len(curve.stretches) <= MAX_STRETCHES
    assert (4_322.0, 1000.0) in points
    assert min(y for _, y in points) == 0.0
    assert points[-1] == (10_001.0, 2.0)
    assert len(curve.model_dump_json()) < 40_000


def test_a_long_segment_after_many_tiny_ones_is_still_drawn_finely() -> None:
    curve = Curve()
    for segment in range(5_000):
        curve.add(segment, float(segment), 0.0)
    for x in range(100_000):
        curve.add(9_999, 5_000.0 + x, math.sin(x / 5_000))
    assert len(curve.segments()[9_999]) >= MAX_STRETCHES / 3


def test_what_is_no_finite_number_is_not_drawn() -> None:
    curve = _curve((1, 1, math.nan), (1, 2, math.inf), (1, 3, -math.inf), (1, math.nan, 4), (1, math.inf, 5))
    assert curve.segments() == {}
    curve.add(1, 6, 0.5)
    assert curve.segments() == {1: [(6, 0.5)]}


_NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5).map(float)
_ADDED = st.lists(st.tuples(st.integers(0, 3), _NUMBERS, _NUMBERS), max_size=60)


@examples(100)
@given(added=_ADDED, times=st.integers(1, 40))
def test_any_points_are_bounded_and_the_extremes_among_them(added: list[tuple[int, float, float]], times: int) -> None:
    curve = Curve()
    seen: set[Point] = set()
    for segment, x, y in added * times:
        curve.add(segment, x, y)
        if math.isfinite(x) and math.isfinite(y):
            seen.add((x, y))
    points = _points(curve)
    assert len(curve.stretches) <= MAX_STRETCHES
    assert set(points) <= seen, "nothing is made up"
    if seen:
        assert min(y for _, y in points) == min(y for _, y in seen)
        assert max(y for _, y in points) == max(y for _, y in seen)


@examples(50)
@given(added=_ADDED, times=st.integers(1, 40), place=st.integers(0, 2400))
def test_a_curve_that_goes_on_from_its_state_is_the_same(
    added: list[tuple[int, float, float]], times: int, place: int
) -> None:
    points = added * times
    whole, parted = _curve(*points), _curve(*points[:place])
    parted = Curve.model_validate_json(parted.model_dump_json())
    for point in points[place:]:
        parted.add(*point)
    assert parted == whole
