"""Recovery points: copies of the state, every few steps, in memory that outlives the worker processes.

A recovery point has the state of each rank after a step. A restarted worker group continues from the newest point of
which the states of all ranks can be read, if it is newer than the newest committed checkpoint. This module has the
format of a rank's state in memory, and the choice between points.
"""

import json
import logging
import math
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .cadence import best_interval

logger = logging.getLogger(__name__)

#: Module state: the threads that copy arrays.
threads = ThreadPoolExecutor(4, "recovery points")

#: Largest share of the training time for which ``"auto"`` lets recovery points block the loop.
_MAX_BLOCKED = 0.01
#: Shortest interval, as a multiple of the time in which rank 0's state is replicated. The replicas of ranks that are
#: slower by up to this factor still have a step in common.
_INTERVAL_PER_TRANSFER = 1.5
#: Files of a rank: one has a complete state while the other is written.
FILES = 2
#: Pause of a worker whose keeper or raylet has died, or whose last state is not replicated. If a node is failing, Ray
#: stops the worker group during the pause, before it does steps that would be lost.
_LOST_SECONDS = 2.0
_POLL_SECONDS = 0.005
_MAGIC = b"elastic\3"  # the first bytes of a complete state
HEADER_BYTES = 4096
#: Offset in the header of the seconds in which the states of a node are replicated, as a float64. Negative: this state
#: was overwritten meanwhile. 0: it is not replicated yet.
TRANSFER_SECONDS_AT = HEADER_BYTES - 8
_ALIGNMENT = 64
_CHUNK_BYTES = 2**22  # copied by one thread at once
_SPARE_BYTES = 2**18  # by which a file is larger than needed, since the description of a state can grow

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
#: The state of one rank: a description that can be pickled, and the bytes of each array.
RankState = tuple[Any, Sequence[ByteArray]]


class RecoveryPointError(RuntimeError):
    """The state of a rank in memory is incomplete or damaged."""


class StateHeader(NamedTuple):
    """The header of the state of one rank after a step.

    Headers compare by run, attempt, worker group and step, so of a run the greatest is the newest.

    Attributes:
        run_id: The id of the run.
        attempt: The number of the attempt.
        group: The number of the worker group within the attempt, from 1.
        step: Optimizer steps that were done.
        world_size: The number of workers of the group.
        rank: The rank.
        made_at: Time of the copy in nanoseconds, by the node's monotonic clock. Two states of a step differ in it.
        arrays: Number of arrays, with the description.
        size: Bytes of the state.
    """

    run_id: str
    attempt: int
    group: int
    step: int
    world_size: int
    rank: int
    made_at: int
    arrays: int
    size: int

    def encode(self) -> bytes:
        """Return the header as the first bytes of a state."""
        return (_MAGIC + json.dumps(self).encode()).ljust(TRANSFER_SECONDS_AT)


def read_header(source: Any) -> StateHeader | None:
    """Return the header of the state in some memory; None if there is no complete one."""
    text = bytes(source[:TRANSFER_SECONDS_AT])
    if not text.startswith(_MAGIC):
        return None
    try:
        return StateHeader(*json.loads(text[len(_MAGIC) :]))
    except ValueError:  # it is being overwritten
        return None


def newest_point(states: Iterable[StateHeader], run_id: str, committed: tuple[int, int, int]) -> StateHeader | None:
    """Return the newest recovery point that a worker group may restore, by the header of its rank 0; None: none.

    A later attempt or worker group has continued from what the earlier ones had committed or held in memory, so its
    points are newer, whatever their steps. A point is complete if there is a state of each rank.

    Args:
        states: States that can be read. Those of other runs are ignored.
        run_id: The id of the run.
        committed: Attempt, worker group and step of the newest committed checkpoint. Older points are ignored.
    """
    points = defaultdict[tuple[Any, ...], dict[int, StateHeader]](dict)
    for state in states:
        if state.run_id == run_id and state[1:4] > committed:
            points[state[:5]][state.rank] = state
    return max((ranks[0] for (*_, world_size), ranks in points.items() if len(ranks) == world_size), default=None)


#: Module state, which the training sets in a worker before the loop begins: memory that outlives this process, a
#: ``worker.recovery_memory.WorkerMemory``. None: there are no recovery points.
memory: Any = None


def state_size(arrays: Sequence[ByteArray]) -> int:
    """Return the bytes of memory that a state with these arrays takes."""
    return _first_array(len(arrays)) + sum(_aligned(len(array)) for array in arrays)


def write_state(target: memoryview, identity: tuple[Any, ...], arrays: Sequence[ByteArray]) -> None:
    """Copy arrays into memory. The header is written last, so until then readers find no state there.

    The keeper computes checksums later: here, they would block the loop for as long as the copy does.

    Args:
        target: The memory, of at least :func:`state_size` bytes.
        identity: Run id, attempt, worker group, step, world size and rank, as in the header.
        arrays: The description and the arrays.
    """
    target[:HEADER_BYTES] = bytes(HEADER_BYTES)
    memory = np.frombuffer(target, np.uint8)
    memory[HEADER_BYTES:][: 8 * len(arrays)] = np.array([*map(len, arrays)], np.uint64).view(np.uint8)
    start = _first_array(len(arrays))
    sources = []
    targets = []
    for array in arrays:
        for first in range(0, len(array), _CHUNK_BYTES):
            sources.append(array[first : first + _CHUNK_BYTES])
            targets.append(memory[start + first :][: len(sources[-1])])
        start += _aligned(len(array))
    run_all = threads.map if start > _CHUNK_BYTES else map
    list(run_all(np.copyto, targets, sources))
    header = StateHeader._make((*identity, time.monotonic_ns(), len(arrays), start)).encode()
    target[len(_MAGIC) : len(header)] = header[len(_MAGIC) :]
    target[: len(_MAGIC)] = _MAGIC


@dataclass
class StateReader(Sequence[ByteArray]):
    """The arrays of a rank's state in memory, without the first one, the description.

    Each array is read on access, and compared with its checksum if that has been computed.

    Attributes:
        header: The header of the state.
        read: Function that returns the bytes of the state from a first one to a last one (exclusive).

    Raises:
        RecoveryPointError: On access, if the memory is damaged or has another state.
    """

    header: StateHeader
    read: Callable[[int, int], Any]

    def __len__(self) -> int:
        return self.header.arrays - 1

    def __getitem__(self, number: Any) -> Any:
        return self._array(number + 1)

    def description(self) -> Any:
        """Return the description that the rank has pickled."""
        return pickle.loads(self._array(0).data)

    def compute_checksum_table(self) -> tuple[bytes, int]:
        """Compute the checksum of each array. Return the checksum table as bytes, and its offset in the state."""
        checksums = [self._read_with_checksum(number)[1] for number in range(self.header.arrays)]
        table = np.array([self.header.made_at, *checksums], np.uint64)
        return table.tobytes(), HEADER_BYTES + 8 * len(checksums)

    @cached_property
    def _lengths_and_checksums(self) -> tuple[list[int], list[int]]:
        """Length of each array in bytes, and the checksums: empty if they are not known."""
        self._check(read_header(self.read(0, HEADER_BYTES)) == self.header)
        count = self.header.arrays
        numbers = np.frombuffer(self.read(HEADER_BYTES, _first_array(count)), np.uint64).tolist()
        are_known = numbers[count] == self.header.made_at
        return numbers[:count], numbers[count + 1 :] if are_known else []

    @cached_property
    def _bounds(self) -> list[int]:
        """First byte of each array, and last byte (exclusive) of the last one."""
        lengths, _ = self._lengths_and_checksums
        return [*accumulate(map(_aligned, lengths), initial=_first_array(len(lengths)))]

    def _array(self, number: int) -> ByteArray:
        lengths, checksums = self._lengths_and_checksums
        data, checksum = self._read_with_checksum(number)
        self._check(not checksums or checksum == checksums[number])
        return np.frombuffer(data, np.uint8, lengths[number])

    def _read_with_checksum(self, number: int) -> tuple[Any, int]:
        length = self._lengths_and_checksums[0][number]
        data = self.read(*self._bounds[number : number + 2])
        return data, (length + int(np.frombuffer(data, np.uint64).sum())) % 2**64

    def _check(self, is_equal: bool) -> None:
        if not is_equal:
            raise RecoveryPointError(
                f"the recovery point of rank {self.header.rank}, step {self.header.step} is damaged or was overwritten"
            )


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _first_array(count: int) -> int:
    """Return the offset of the first array, after the header, the lengths and the checksum table.

    The table has ``made_at`` of the state that it is for, and the checksums.
    """
    return HEADER_BYTES + _aligned(8 * (2 * count + 1))


class RecoveryPoints:
    """The recovery points of one rank: decides when to make them, and makes them.

    Args:
        interval: Number of steps from one to the next; ``"auto"``; or ``"off"``.

    Attributes:
        memory: The memory, which outlives this process. None: recovery points are off.
        every: The current interval in steps; 0: no recovery points are made.
        seconds: Seconds for which the last one blocked the loop.
        step: Step of the last one; 0: there is none, or no memory for the next one.
    """

    seconds = 0.0
    step = 0
    _needed = 0  # bytes of a file; 0: not known yet
    _step_seconds = math.inf  # the shortest time of a step between two points
    _made_at = 0.0

    def __init__(self, interval: int | str, rank: int, world_size: int) -> None:
        if interval not in ("auto", "off") and not (isinstance(interval, int) and interval >= 1):
            raise ValueError(f'recovery_points={interval!r}: give a number of steps, "auto" or "off"')
        self.memory = memory if interval != "off" else None
        self._is_auto = interval == "auto"
        self._shortest = interval if isinstance(interval, int) else 1
        self.every = self._shortest if self.memory else 0
        self._size_and_rank = (world_size, rank)
        self._files: list[memoryview] = []  # the newest comes last

    def plan(self, between_failures_seconds: float) -> int:
        """Return the interval in steps from now on. Rank 0 decides it for all ranks."""
        if not self.memory:
            return 0
        seconds = _INTERVAL_PER_TRANSFER * min(filter(None, map(abs, self._transfers())), default=0.0)
        if self._is_auto and self.seconds:
            seconds = max(seconds, best_interval(self.seconds, between_failures_seconds), self.seconds / _MAX_BLOCKED)
        return max(self._shortest, math.ceil(seconds / self._step_seconds))

    def _transfers(self) -> list[float]:
        """Return the seconds in the header of each file that the replication has taken."""
        return [float(np.frombuffer(file, np.float64, 1, TRANSFER_SECONDS_AT)[0]) for file in self._files]

    def turn_off(self, reason: str) -> None:
        """Make no more recovery points, and log the reason."""
        if self.memory:
            logger.warning("Recovery points in memory are off, and restarts continue from checkpoints: %s", reason)
        self.memory = None
        self.step = 0

    def make(self, step: int, capture: Callable[[], RankState]) -> None:
        """Copy the state after a step into the file with the older state, or the state of the same step into its own.

        Skip the step while the memory is being allocated. On an error, log it, and make no more recovery points.

        Args:
            step: Optimizer steps that are done.
            capture: Function that returns the state.
        """
        if not self.memory:
            return
        try:
            if self._files and self.memory.is_lost():
                self._files = []
                self.step = 0
                logger.warning(
                    "The keeper of recovery points or the raylet has died; "
                    "restarts continue from checkpoints until there is a new one"
                )
                time.sleep(_LOST_SECONDS)
            if self._needed and (len(self._files) < FILES or len(self._files[0]) < self._needed):
                target = self.memory.reserve(self._needed)
                if target is None:
                    self.step = 0
                    return
                self._files = [target, *self._files[-1:]]
            deadline = time.monotonic() + _LOST_SECONDS * (step != self.step)
            # Do not overwrite the only replicated state: wait for the replica of the newer one.
            while sum(self._transfers()[-1:]) <= 0 < max(self._transfers(), default=0) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            began = time.monotonic()
            description, captured = capture()
            arrays = [np.frombuffer(pickle.dumps(description), np.uint8), *captured]
            size = state_size(arrays)
            if not self._files or size > len(self._files[0]):
                self._needed = size + size // 16 + _SPARE_BYTES
                return
            if step != self.step:
                self._files.append(self._files.pop(0))
            elif size > len(self._files[-1]):
                return
            write_state(self._files[-1], (*self.memory.group_id, step, *self._size_and_rank), arrays)
        except Exception as error:  # noqa: BLE001 - too little memory, or a state that cannot be pickled
            self.turn_off(str(error))
            return
        if self.step and step > self.step:
            self._step_seconds = min(self._step_seconds, (began - self._made_at) / (step - self.step))
        self.seconds = time.monotonic() - began
        self._made_at = began
        self.step = step
