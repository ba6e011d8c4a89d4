"""A curve of any length in a bounded number of points that keeps its peaks, and a value that changes now and then."""

from __future__ import annotations

import itertools
import math

from pydantic import BaseModel, ConfigDict, Field

#: Stretches of points that a curve consists of at most, each of which keeps up to two.
MAX_STRETCHES = 200
#: How many are left when they are joined.
_JOINED = 120
#: Changes of a value over time that are kept.
MAX_CHANGES = 400

#: x and y.
Point = tuple[float, float]


class _Stretch(BaseModel):
    """Neighbouring points of a segment: their lowest and their highest as they came, and how many they are."""

    segment: int
    points: list[Point]
    count: int = 1

    def add(self, later: _Stretch) -> None:
        """Take in the stretch that comes next."""
        points = [*self.points, *later.points]
        values = [y for _, y in points]
        extremes = sorted({values.index(min(values)), values.index(max(values))})
        self.points = [points[place] for place in extremes]
        self.segment, self.count = later.segment, self.count + later.count


class Curve(BaseModel):
    """Points in segments, such as what each worker group has reported; x may go back between segments."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    stretches: list[_Stretch] = Field(default_factory=list)
    last: Point | None = None
    total: int = 0

    def add(self, segment: int, x: float, y: float) -> None:
        """Add a point; what is no finite number is left out."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self.last = (x, y)
        self.total += 1
        made = _Stretch(segment=segment, points=[self.last])
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
        """Return the points of each segment, in the order in which they came."""
        found: dict[int, list[Point]] = {}
        for stretch in self.stretches:
            found.setdefault(stretch.segment, []).extend(stretch.points)
        if self.last is not None and found[self.stretches[-1].segment][-1] != self.last:
            found[self.stretches[-1].segment].append(self.last)
        return found

    def _join(self, across: bool) -> None:
        """Join neighbours until each stands for about as many points; across segments where these are too many."""
        most = 2 * self.total // _JOINED
        joined = self.stretches[:1]
        for stretch in self.stretches[1:]:
            newest = joined[-1]
            if (across or newest.segment == stretch.segment) and newest.count + stretch.count <= most:
                newest.add(stretch)
            else:
                joined.append(stretch)
        self.stretches = joined


class Steps(BaseModel):
    """A value that changes now and then; of too many changes that goes which lasted shortest."""

    #: When, and to what.
    changes: list[tuple[float, int]] = Field(default_factory=list)

    def add(self, at: float, value: int) -> None:
        """Take a change in; the same value again is none."""
        if self.changes and self.changes[-1][1] == value:
            return
        self.changes.append((at, value))
        if len(self.changes) > MAX_CHANGES:
            lasted = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self.changes)]
            place = min(range(1, len(lasted)), key=lasted.__getitem__)
            del self.changes[place]
            if self.changes[place - 1][1] == self.changes[place][1]:
                del self.changes[place]
