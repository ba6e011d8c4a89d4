"""A curve of any length in a bounded number of points that keeps its peaks."""

from __future__ import annotations

import itertools
import math

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Curve", "Point", "Steps"]

#: Stretches of points that a curve consists of at most, each of which gives up to two.
MAX_STRETCHES = 200
#: How many are left when they are joined.
_JOINED = 120

#: Changes of a value over time that are kept, and how many are left when some have to go.
MAX_CHANGES = 400
_CHANGES_LEFT = 300

#: x and y.
Point = tuple[float, float]


class _Stretch(BaseModel):
    """Neighbouring points of a segment: their lowest and their highest, and how many they are."""

    segment: int
    low: Point
    high: Point
    low_first: bool = True
    count: int = 1

    def points(self) -> list[Point]:
        """Give them in the order in which they came."""
        if self.low == self.high:
            return [self.low]
        return [self.low, self.high] if self.low_first else [self.high, self.low]

    def add(self, later: _Stretch) -> None:
        lower, higher = later.low[1] < self.low[1], later.high[1] > self.high[1]
        if lower or higher:
            self.low_first = later.low_first if lower and higher else higher
        self.low = later.low if lower else self.low
        self.high = later.high if higher else self.high
        self.segment, self.count = later.segment, self.count + later.count


class Curve(BaseModel):
    """Points in segments, such as what each worker group has reported; x may go back between segments."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    stretches: list[_Stretch] = Field(default_factory=list)
    last: Point | None = None
    total: int = 0
    #: Points that were no finite numbers.
    skipped: int = 0

    def add(self, segment: int, x: float, y: float) -> None:
        """Add a point; what is no finite number is only counted."""
        if not (math.isfinite(x) and math.isfinite(y)):
            self.skipped += 1
            return
        self.last = (x, y)
        self.total += 1
        made = _Stretch(segment=segment, low=self.last, high=self.last)
        newest = self.stretches[-1] if self.stretches else None
        if newest is not None and newest.segment == segment and newest.count < self.total // MAX_STRETCHES:
            newest.add(made)
            return
        self.stretches.append(made)
        if len(self.stretches) > MAX_STRETCHES:
            self._join(across=False)
            if len(self.stretches) > MAX_STRETCHES * 3 // 4:
                self._join(across=True)

    def segments(self) -> dict[int, list[Point]]:
        """Give the points of each segment, in the order in which they came."""
        found: dict[int, list[Point]] = {}
        for stretch in self.stretches:
            found.setdefault(stretch.segment, []).extend(stretch.points())
        if self.last is not None and found[self.stretches[-1].segment][-1] != self.last:
            found[self.stretches[-1].segment].append(self.last)
        return found

    def _join(self, across: bool) -> None:
        """Join neighbours until each stands for about as many points; across segments where these are too many."""
        most = 2 * self.total // _JOINED
        joined: list[_Stretch] = []
        for stretch in self.stretches:
            newest = joined[-1] if joined else None
            same = newest is not None and (across or newest.segment == stretch.segment)
            if newest is not None and same and newest.count + stretch.count <= most:
                newest.add(stretch)
            else:
                joined.append(stretch)
        self.stretches = joined


class Steps(BaseModel):
    """A value that changes now and then; of too many changes those go that lasted shortest."""

    #: When, and to what.
    changes: list[tuple[float, int]] = Field(default_factory=list)

    def add(self, at: float, value: int) -> None:
        """Take a change in; the same value again is none."""
        if self.changes and self.changes[-1][1] == value:
            return
        self.changes.append((at, value))
        if len(self.changes) > MAX_CHANGES:
            self._thin()

    def _thin(self) -> None:
        lasted = [later[0] - change[0] for change, later in itertools.pairwise(self.changes)]
        brief = sorted(range(1, len(lasted)), key=lambda place: lasted[place])[: MAX_CHANGES - _CHANGES_LEFT]
        gone = set(brief)
        kept: list[tuple[float, int]] = []
        for place, change in enumerate(self.changes):
            if place not in gone and not (kept and kept[-1][1] == change[1]):
                kept.append(change)
        self.changes = kept
