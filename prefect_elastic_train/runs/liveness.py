"""Whether anybody works on a run, for those who look from outside and have no time to watch each run."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection
from dataclasses import dataclass

from prefect_elastic_train.core.records import AttemptRecord, Heartbeat, Owner, decode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import host_id, is_alive
from prefect_elastic_train.runs.view import RunReader

#: A heartbeat that is as old as that is no sign of life. A driver whose storage is away beats again when that is back,
#: and gives up after ``retry_seconds`` of the storage block, by default half of it.
SILENT_SECONDS = 600.0
#: A heartbeat is a sign of life for so many of its intervals.
_FRESH_BEATS = 3


class Life(str, enum.Enum):
    """What can be told of the process that holds a run."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Sign:
    """What was found.

    Attributes:
        life: What it means.
        words: What it is, for people.
        at: When the process has lived last, by its own clock, in seconds since the epoch.
    """

    life: Life
    words: str
    at: float = 0.0


def look_for_life(
    store: RunReader,
    attempt: int,
    record: AttemptRecord | None,
    *,
    watch: Collection[Life] = (),
    now: float | None = None,
) -> Sign:
    """Look whether the driver of an attempt that has not ended lives.

    On the driver's own machine its process is looked up. Elsewhere the time in its heartbeat is held against this
    machine's clock, which proves nothing if one of the two is wrong; watching the heartbeat for a change does.

    Args:
        store: The run directory.
        attempt: The attempt.
        record: Its record, None if that is torn.
        watch: Answers that are given only after the heartbeat was watched for three of its intervals (15 s).
        now: Seconds since the epoch.
    """
    now = time.time() if now is None else now
    beat = decode(Heartbeat, store.read(layout.HEARTBEAT))
    if beat is not None and beat.attempt != attempt:
        beat = None
    last = max(beat.at if beat else 0.0, record.started_at if record else 0.0)
    if record is not None and record.owner.host == host_id():
        if is_alive(store, record, 0):
            return Sign(Life.ALIVE, f"process {record.owner.pid} on this machine", last)
        return Sign(Life.DEAD, f"process {record.owner.pid} on this machine is gone", last)
    sign = _judge(beat, record, now)
    if sign.life in watch and is_alive(store, record or _of_nobody(attempt)):
        return Sign(Life.ALIVE, f"its heart beats{_on(record)}", now)
    return sign


def _judge(beat: Heartbeat | None, record: AttemptRecord | None, now: float) -> Sign:
    if beat is None:
        if record is None:
            return Sign(Life.UNKNOWN, "its record is torn, and it has no heartbeat")
        age = now - record.started_at
        life = Life.DEAD if age > SILENT_SECONDS else Life.UNKNOWN
        return Sign(life, f"no heartbeat since it began {age:.0f} s ago{_on(record)}", record.started_at)
    age = now - beat.at
    bound = _FRESH_BEATS * beat.interval_seconds
    if age < -bound:
        return Sign(Life.UNKNOWN, f"its heartbeat is {-age:.0f} s ahead of this machine's clock{_on(record)}", beat.at)
    life = Life.ALIVE if age <= bound else Life.DEAD if age > SILENT_SECONDS else Life.UNKNOWN
    return Sign(life, f"last heartbeat {max(age, 0.0):.0f} s ago{_on(record)}", beat.at)


def _on(record: AttemptRecord | None) -> str:
    host = record.owner.host.partition("/")[0] if record is not None else ""
    return f" on {host}" if host else ""


def _of_nobody(attempt: int) -> AttemptRecord:
    """Stand in for a torn record: nobody knows whose machine it was, so the heartbeat is watched."""
    return AttemptRecord(attempt=attempt, owner=Owner(flow_run_id=""))
