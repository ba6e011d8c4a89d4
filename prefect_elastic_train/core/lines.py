"""Lines of a stream that may be cut anywhere, and may be longer than anything that is said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefect_elastic_train.core.bounds import MAX_LINE_BYTES


def whole_lines(pieces: Iterable[bytes], *, with_rest: bool = True) -> Iterator[bytes]:
    """Lines without their ends; of one that is too long for any event the beginning, and how much of it is left out.

    Args:
        pieces: What comes, cut anywhere.
        with_rest: Whether what comes after the last newline is a line.
    """
    line, left_out = bytearray(), 0
    for piece in pieces:
        for number, part in enumerate(piece.split(b"\n")):
            if number:
                yield _noted(line, left_out)
                line, left_out = bytearray(), 0
            room = MAX_LINE_BYTES - len(line)
            line += part[:room]
            left_out += max(0, len(part) - room)
    if line and with_rest:
        yield _noted(line, left_out)


def _noted(line: bytearray, left_out: int) -> bytes:
    return bytes(line) + (f" [… {left_out:,} bytes left out …]".encode() if left_out else b"")
