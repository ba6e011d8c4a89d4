"""How large what is told of a run may become, and how the rest is left out: visibly, and never the end of a run.

Ray's snapshot and our commits hold whatever a loop reports, whole. All else has a bound here, in bytes as UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

#: An event, on any channel and in the history: a line that a pipe, a log and a log's reader in a browser take.
MAX_EVENT_BYTES = 512 * 1024
MAX_LINE_BYTES = MAX_EVENT_BYTES + 1024  # a line of a driver's output: an event fits in, so none is cut on its way
MAX_METRICS_BYTES = 32 * 1024
#: How an attempt ended. It is the message of a Prefect state, too, of which Prefect's events keep 100,000 characters.
MAX_MESSAGE_BYTES = 32 * 1024
#: A log record. In Prefect's JSON it is up to six times as long, of which its API takes 1,000,000 bytes.
MAX_LOG_BYTES = 128 * 1024

#: Metrics that go before others: where a report stands, and in a row of the history when it was.
_FIRST = ("global_step", "iteration", "step", "epoch", "progress", "_attempt", "_at", "_world_size")
#: In place of a metric that is no number, or that takes more than a fourth of what there is room for.
_MAX_METRIC_TEXT = 200

Item = TypeVar("Item")


def cut(text: str, most: int) -> str:
    """Text of at most so many bytes, with a note in the middle of how much is left out."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    note = f"[… {len(data) - most:,} bytes left out …]"
    side = max(0, most - len(note.encode()) - 8) // 2
    return f"{data[:side].decode(errors='ignore')} {note} {data[len(data) - side :].decode(errors='ignore')}"


def size_of(value: Any) -> int:
    """Bytes of a value as JSON."""
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return len(json.dumps(plain, ensure_ascii=False, default=str).encode(errors="replace"))


def as_json(model: BaseModel, indent: int | None = None) -> str:
    """A model as JSON, whatever texts it holds."""
    try:
        return model.model_dump_json(indent=indent)
    except PydanticSerializationError:
        # A file name or a traceback may hold bytes that are no text.
        text = json.dumps(model.model_dump(), ensure_ascii=False, default=str, indent=indent)
        return text.encode(errors="replace").decode()


def bounded_metrics(metrics: Mapping[str, Any], score: str = "") -> dict[str, Any]:
    """Metrics as they are; of too many the `score`, where a report stands, short names, and a count of the rest."""
    if size_of(metrics) <= MAX_METRICS_BYTES:
        return dict(metrics)
    kept: dict[str, Any] = {}
    room = MAX_METRICS_BYTES - 100
    for name in sorted(metrics, key=lambda name: (name != score and name not in _FIRST, len(name))):
        entry = {name: metrics[name]}
        if size_of(entry) > MAX_METRICS_BYTES // 4:
            entry = {cut(name, _MAX_METRIC_TEXT): cut(str(metrics[name]), _MAX_METRIC_TEXT)}
        room -= size_of(entry)
        if room < 0:
            break
        kept |= entry
    left_out = len(metrics) - len(kept)
    return kept | ({"…": f"{left_out:,} of {len(metrics):,} metrics left out"} if left_out else {})


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Items of at most so many bytes, evenly taken, the first and the last among them."""
    kept = list(items)
    while len(kept) > 2 and (size := sum(size_of(item) + 2 for item in kept)) > most:
        number = max(2, min(len(kept) - 1, len(kept) * most // size))
        step = (len(items) - 1) / (number - 1)
        kept = [items[round(place * step)] for place in range(number)]
    return kept


def whole_lines(pieces: Iterable[bytes], *, with_rest: bool = True) -> Iterator[bytes]:
    """Lines of a stream without their ends, cut with a note where too long for any event; the last only `with_rest`."""
    line, left_out = bytearray(), 0

    def noted() -> bytes:
        return bytes(line) + (f" [… {left_out:,} bytes left out …]".encode() if left_out else b"")

    for piece in pieces:
        for number, part in enumerate(piece.split(b"\n")):
            if number:
                yield noted()
                line, left_out = bytearray(), 0
            room = MAX_LINE_BYTES - len(line)
            line += part[:room]
            left_out += max(0, len(part) - room)
    if line and with_rest:
        yield noted()
