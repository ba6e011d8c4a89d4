"""Liveness of a run's driver: the heartbeat that it writes, and the checks by other processes."""

import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from prefect_elastic_train.core.records import Heartbeat, Owner, decode, encode
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.storage.store import RunStore

from . import layout
from .run_directory import RecordedAttempt, RunDirectory, newest_attempt_number

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
_MISSED_BEATS = 3  # number of intervals without a new heartbeat after which a driver counts as dead
#: Age at which a heartbeat counts as that of a dead driver, even if clocks differ. A driver without storage gives up
#: after ``retry_seconds`` of the storage block, by default half of it.
_DEAD_SECONDS = 600.0


class Liveness(str, enum.Enum):
    """State of the driver of a run's newest attempt, as far as another process can observe it."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class DriverState(NamedTuple):
    """Liveness of a driver, a message about it, and when the driver was last active, in seconds since the epoch."""

    liveness: Liveness
    detail: str
    active_at: float


def start_heartbeat(store: RunStore, attempt: int, on_fenced_off: Callable[[], object]) -> Callable[[], None]:
    """Write ``heartbeat.json`` of an attempt from a thread. Return a function that stops it within two seconds.

    An outage of the storage is logged once. ``on_fenced_off`` is called once, when a later attempt has started; no
    heartbeat is written after that.
    """
    stopped = threading.Event()

    def write() -> None:
        is_failing = False
        while True:
            try:
                if newest_attempt_number(store) > attempt:
                    on_fenced_off()
                    return
                store.replace(layout.HEARTBEAT, encode(Heartbeat(attempt=attempt)))
                is_failing = False
            except Exception as error:  # noqa: BLE001 - without heartbeats the driver would count as dead
                if not is_failing:
                    logger.warning("could not write the heartbeat, will keep trying: %s", error)
                is_failing = True
            if stopped.wait(HEARTBEAT_SECONDS):
                return

    def stop() -> None:
        stopped.set()
        thread.join(timeout=2)

    thread = start_thread(write)
    return stop


def host_id() -> str:
    """Return an id of this machine or container since its boot, within which a process id is unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def process_start(pid: int) -> float:
    """Return the start time of a process on this machine, in clock ticks since boot.

    Setting the clock does not change it.
    """
    return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def this_process() -> dict[str, Any]:
    """Return the fields of an :class:`Owner` that identify this process: host, process id and start time."""
    return {"host": host_id(), "pid": os.getpid(), "process_started_at": process_start(os.getpid())}


def driver_process(owner: Owner) -> psutil.Process | None:
    """Return the driver process of an owner if it runs on this machine, else None."""
    try:
        process = psutil.Process(owner.pid)
        is_same = owner.host == host_id() and process_start(owner.pid) == owner.process_started_at
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError, ValueError):
        return None


def is_alive(store: RunStore, owner: Owner | None) -> bool:
    """Return True if the driver that holds a run is alive. Call it only if the newest attempt has no recorded end.

    On the driver's own machine its process is looked up. Elsewhere, or if the owner is unknown, the heartbeat is
    watched for three of its intervals, until it changes. Clocks of different machines are not compared.
    """
    if owner and owner.host == host_id():
        return driver_process(owner) is not None
    first = store.read(layout.HEARTBEAT)
    deadline = time.monotonic() + _MISSED_BEATS * HEARTBEAT_SECONDS
    is_over = False
    while not is_over:
        time.sleep(HEARTBEAT_SECONDS / 10)
        is_over = time.monotonic() >= deadline  # before the last read, which may be slow
        if store.read(layout.HEARTBEAT) != first:
            return True
    return False


def observe_driver(run: RunDirectory, attempt: RecordedAttempt) -> DriverState:
    """Return the state of the driver of an attempt that has no recorded end, without waiting.

    On the driver's own machine its process is looked up. Elsewhere the time of its last heartbeat is compared with this
    machine's clock, which proves nothing if one of the two clocks is wrong; :func:`is_alive` does not depend on them.
    """
    now = time.time()
    heartbeat = decode(Heartbeat, run.read(layout.HEARTBEAT))
    beat_at = heartbeat.at if heartbeat and heartbeat.attempt == attempt.number else 0.0
    active_at = max(beat_at, attempt.record.started_at if attempt.record else 0.0)
    owner = attempt.owner or Owner(flow_run_id="", host="an unknown machine")
    if owner.host == host_id():
        if driver_process(owner):
            return DriverState(Liveness.ALIVE, f"process {owner.pid} on this machine", active_at)
        return DriverState(Liveness.DEAD, f"process {owner.pid} on this machine exited", active_at)
    if not active_at:
        return DriverState(Liveness.UNKNOWN, "no heartbeat", 0.0)
    liveness = Liveness.DEAD if now - active_at > _DEAD_SECONDS else Liveness.UNKNOWN
    if abs(now - beat_at) <= _MISSED_BEATS * HEARTBEAT_SECONDS:
        liveness = Liveness.ALIVE
    return DriverState(
        liveness, f"last active {now - active_at:.0f} s ago on {owner.host.partition('/')[0]}", active_at
    )
