"""A curve of any length in a bounded number of points that keeps its peaks."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

#: Stretches of points that a curve consists of at most, each of which keeps up to two.
MAX_STRETCHES = 200

#: x and y.
Point = tuple[float, float]


class Curve(BaseModel):
    """Points in the order in which they came: of each stretch of as many the lowest and the highest, and the newest."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    stretches: list[list[Point]] = Field(default_factory=list)
    #: Points of a stretch, and those that the newest has room for.
    length: int = 1
    room: int = 0
    last: Point | None = None

    def add(self, x: float, y: float) -> None:
        """Add a point; what is no finite number is left out."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        if not self.room and len(self.stretches) == MAX_STRETCHES:
            pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
            self.stretches = [_extremes([*one, *other]) for one, other in pairs]
            self.length *= 2
        if not self.room:
            self.stretches.append([])
            self.room = self.length
        self.room -= 1
        self.last = (x, y)
        self.stretches[-1] = _extremes([*self.stretches[-1], self.last])

    @property
    def points(self) -> list[Point]:
        """All points that are kept; x goes back where something was done again."""
        kept = [point for stretch in self.stretches for point in stretch]
        return kept if self.last is None or kept[-1] == self.last else [*kept, self.last]


def _extremes(points: list[Point]) -> list[Point]:
    values = [y for _, y in points]
    return [points[place] for place in sorted({values.index(min(values)), values.index(max(values))})]
