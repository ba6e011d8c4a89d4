"""The sign of life of the attempt that holds a run: who writes it, and what those who look make of it."""

from __future__ import annotations

import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from prefect_elastic_train.core.records import Heartbeat, Owner, decode, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.model import Attempt, RunDirectory, newest_attempt
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
_MISSED_BEATS = 3  # whoever lives has a heartbeat no older than so many of its intervals, and moves it within them
#: A heartbeat that is as old as that is no sign of life by any clock. A driver whose storage is away beats again when
#: that is back, and gives up after ``retry_seconds`` of the storage block, by default half of it.
_SILENT_SECONDS = 600.0


class Life(str, enum.Enum):
    """What can be told of the process that holds a run."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class HeartbeatWriter:
    """Writes ``heartbeat.json`` from a thread until it is stopped. Errors are logged once and passed over.

    ``on_fenced_off`` is called once, when a later attempt has begun; nothing is written from then on.
    """

    def __init__(
        self,
        store: RunStore,
        attempt: int,
        on_fenced_off: Callable[[], object] = lambda: None,
        interval_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._store = store
        self._on_fenced_off = on_fenced_off
        self._beat = Heartbeat(attempt=attempt, beat=0, interval_seconds=interval_seconds)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-train-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop writing; returns within two seconds."""
        self._stopped.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        is_failing = False
        while not self._stopped.is_set():
            self._beat = self._beat.model_copy(update={"beat": self._beat.beat + 1, "at": time.time()})
            try:
                if newest_attempt(self._store) > self._beat.attempt:
                    self._on_fenced_off()
                    return
                self._store.replace(layout.HEARTBEAT, encode(self._beat))
                is_failing = False
            except Exception as error:  # noqa: BLE001 - a beat that ends for good looks like a death
                if not is_failing:
                    logger.warning("could not write the heartbeat, will keep trying: %s", error)
                is_failing = True
            self._stopped.wait(self._beat.interval_seconds)


def host_id() -> str:
    """Return where a process id means one process: this machine or container, since it was booted."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{socket.gethostname()}/{boot}/{namespace}"


def process_start(pid: int) -> float:
    """When a process of this machine began, in clock ticks since boot: a time of day moves when the clock is set."""
    return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def this_process() -> dict[str, Any]:
    """Return what an :class:`Owner` says of its process, for this one."""
    return {"host": host_id(), "pid": os.getpid(), "process_started_at": process_start(os.getpid())}


def driver_process(owner: Owner) -> psutil.Process | None:
    """Return the driver's process if it lives on this machine."""
    try:
        process = psutil.Process(owner.pid)
        is_same = owner.host == host_id() and process_start(owner.pid) == owner.process_started_at
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError, ValueError):
        return None


def is_alive(store: RunStore, owner: Owner | None) -> bool:
    """Whether an attempt that has not ended shows a sign of life; no clocks are compared.

    On the driver's own machine its process is looked up; elsewhere, and where nothing tells whose it is, the heartbeat
    is watched for a change, for three of its intervals.
    """
    if owner is not None and owner.host == host_id():
        return driver_process(owner) is not None
    first = store.read(layout.HEARTBEAT)
    beat = decode(Heartbeat, first)
    watch_seconds = _MISSED_BEATS * (beat.interval_seconds if beat else HEARTBEAT_SECONDS)
    deadline = time.monotonic() + watch_seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.5, watch_seconds / 10))
        if store.read(layout.HEARTBEAT) != first:
            return True
    return False


def look_for_life(run: RunDirectory, attempt: Attempt) -> tuple[Life, str, float]:
    """Look at once whether the driver of an attempt that has not ended lives; also in words, and when that was seen.

    On the driver's own machine its process is looked up. Elsewhere its last sign of life is held against this machine's
    clock, which proves nothing if one of the two is wrong; :func:`is_alive` does.
    """
    now, record = time.time(), attempt.record
    beat = decode(Heartbeat, run.read(layout.HEARTBEAT))
    beats_at = beat.at if beat is not None and beat.attempt == attempt.number else 0.0
    at = max(beats_at, record.started_at if record is not None else 0.0)
    owner = record.owner if record is not None else Owner(flow_run_id="", host="an unknown machine")
    if owner.host == host_id():
        lives = driver_process(owner) is not None
        words = f"process {owner.pid} on this machine" + ("" if lives else " is gone")
        return Life.ALIVE if lives else Life.DEAD, words, at
    life = Life.DEAD if at and now - at > _SILENT_SECONDS else Life.UNKNOWN
    if beat is not None and abs(now - beats_at) <= _MISSED_BEATS * beat.interval_seconds:
        life = Life.ALIVE
    words = f"last sign of life {now - at:.0f} s ago on {owner.host.partition('/')[0]}" if at else "no sign of life"
    return life, words, at
