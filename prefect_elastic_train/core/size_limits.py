"""Size limits of events, log records and results. What exceeds a limit is truncated with a marker.

Ray's snapshot and our commits hold in full what a loop reports. Everything else has a limit here, in bytes of UTF-8.

Belongs to all processes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

#: An event, on any channel and in the history: a line that pipes, logs and a browser's log view can carry.
MAX_EVENT_BYTES = 512 * 1024
MAX_LINE_BYTES = MAX_EVENT_BYTES + 1024  # a line of a driver's output, which an event with its tag fits into
MAX_METRICS_BYTES = 32 * 1024
#: The message of an attempt's end. It is also that of a Prefect state; Prefect's events keep 100,000 characters of it.
MAX_MESSAGE_BYTES = 32 * 1024
#: A log record. As Prefect's JSON it is up to six times as long, and Prefect's API accepts 1,000,000 bytes.
MAX_LOG_BYTES = 128 * 1024

#: Metrics that are kept before others: the position of a report.
_KEPT_FIRST = ("global_step", "iteration", "step", "epoch", "progress")
#: Length of name and text of a metric that takes more than a fourth of the limit.
_MAX_METRIC_TEXT = 200

Item = TypeVar("Item")


def truncate(text: str, limit: int) -> str:
    """Return ``text`` in at most ``limit`` bytes.

    In a longer text, a marker with the number of bytes left out replaces the middle.
    """
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    note = f"[… {len(data) - limit:,} bytes left out …]"
    side = max(0, limit - len(note.encode()) - 8) // 2
    return f"{data[:side].decode(errors='ignore')} {note} {data[len(data) - side :].decode(errors='ignore')}"


def size_of(value: Any) -> int:
    """Return the size of a value as JSON, in bytes."""
    return len(_encoded(value))


def as_json(model: BaseModel) -> str:
    """Return a model as JSON. Characters that cannot be encoded, such as those of file names, are replaced."""
    try:
        return model.model_dump_json()
    except PydanticSerializationError:  # file names and tracebacks may contain bytes that are not text
        return _encoded(model).decode()


def _encoded(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. Characters that cannot be encoded are replaced."""
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, ensure_ascii=False, default=str).encode(errors="replace")


def bounded_metrics(metrics: Mapping[str, Any], score: str) -> dict[str, Any]:
    """Return the metrics of a report in at most :data:`MAX_METRICS_BYTES`.

    If they are larger, the metric named ``score`` and those of the position, such as ``step``, are kept first. A large
    value becomes truncated text. The entry ``"…"`` has the number of metrics left out.
    """
    if size_of(metrics) <= MAX_METRICS_BYTES:
        return dict(metrics)
    fitting: dict[str, Any] = {}
    room = MAX_METRICS_BYTES - 100
    for name in sorted(metrics, key=lambda name: name != score and name not in _KEPT_FIRST):
        entry = {name: metrics[name]}
        if size_of(entry) > MAX_METRICS_BYTES // 4:
            entry = {truncate(name, _MAX_METRIC_TEXT): truncate(str(metrics[name]), _MAX_METRIC_TEXT)}
        room -= size_of(entry)
        if room < 0:
            break
        fitting |= entry
    left_out = len(metrics) - len(fitting)
    return fitting | ({"…": f"{left_out:,} of {len(metrics):,} metrics left out"} if left_out else {})


def thinned(items: Sequence[Item], limit: int) -> list[Item]:
    """Return evenly spaced items of a sequence that have at most ``limit`` bytes together. First and last are kept."""
    remaining = list(items)
    while len(remaining) > 2 and sum(map(size_of, remaining)) > limit:
        remaining = [*remaining[:-1:2], remaining[-1]]
    return remaining


def whole_lines(pieces: Iterable[bytes], *, with_rest: bool = True) -> Iterator[bytes]:
    """Yield the lines of a stream of bytes, which arrives in pieces of any length, without the line ends.

    A line longer than :data:`MAX_LINE_BYTES` is truncated with a marker. An unfinished last line is yielded only with
    ``with_rest``.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(_marked, lines)
        rest = rest[: MAX_LINE_BYTES + 1]
    if rest and with_rest:
        yield _marked(rest)


def _marked(line: bytes) -> bytes:
    return line if len(line) <= MAX_LINE_BYTES else line[:MAX_LINE_BYTES] + " [… the rest is left out …]".encode()
