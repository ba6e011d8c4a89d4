"""The memory of recovery points: a keeper on each node of the run, which holds it, and its use by the workers there.

The state of a rank is in an anonymous file (``memfd``) of the keeper, an actor that outlives workers and drivers. The
worker maps the file into its memory, so that a recovery point costs one copy. The kernel frees the file with the last
process that has it, however that process ends. Unlike a file in ``/dev/shm``, it is not limited to the size of that
mount, which is 64 MiB in most containers. Ray's object store cannot hold the states: its objects die with the process
that made them.

Each keeper replicates the states of its node to the keeper of another node, from where they are read if the node is
lost.

Uses ``ray._private.utils``, which knows the memory of a container.
"""

import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from typing import Any, NamedTuple

import ray
from ray._private.utils import get_system_memory, get_used_memory

from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.loop.recovery_points import (
    FILES,
    HEADER_BYTES,
    TRANSFER_SECONDS_AT,
    RecoveryPointError,
    StateHeader,
    StateReader,
    read_header,
)

NAMESPACE = "elastic-train"
#: Seconds for which a keeper lives without a controller: for the delays between attempts, and for a resume by hand.
_EXIT_AFTER_SECONDS = 900.0
#: Seconds for which a keeper waits for workers to exit that still map a file for writing.
_WRITER_SECONDS = 5.0
_POLL_SECONDS = 0.05
_REPLICATE_SECONDS = 0.005  # between two checks for a new state
_RETRY_SECONDS = 0.5  # between two requests for memory
_TRANSFER_SECONDS = 30.0  # timeout of a call that sends bytes to another node, or reads them there
_CHUNK_BYTES = 64 * 2**20
_MAX_FAILURES = 3  # transfers in a row that may fail, as at a restart, before that is logged
_USABLE = 0.9  # share of a node's memory that may be used; Ray kills workers at 0.95

logger = logging.getLogger(__name__)


def keeper_name(run_id: str, node_id: str) -> str:
    """Return the name of the keeper of a run on a node, in :data:`NAMESPACE`."""
    return f"recovery-points-{run_id}-{node_id}"


class StoredState(NamedTuple):
    """The state of a rank in the memory of a keeper.

    Attributes:
        header: The header of the state.
        node_id: The node of the keeper.
        path: The keeper's file, as other processes of the node see it.
    """

    header: StateHeader
    node_id: str
    path: str


class _File(NamedTuple):
    """A file of a keeper.

    Attributes:
        group: Attempt and number of the worker group that writes it.
        rank: The rank whose state it has.
        is_replica: True if that rank is on another node.
        file: The file. It is closed when nothing refers to it any more.
        memory: The file, mapped for reading.
    """

    group: tuple[int, int]
    rank: int
    is_replica: bool
    file: FileIO
    memory: memoryview

    def write(self, data: bytes, start: int) -> None:
        """Write bytes with ``pwrite``. A mapping for writing would prevent the seal against writes."""
        os.pwrite(self.file.fileno(), data, start)

    @property
    def step(self) -> int:
        header = read_header(self.memory)
        return header.step if header else -1


class Keeper:
    """The actor that holds the states of the ranks on its node. It exits some time after the last heartbeat.

    Args:
        run_id: The id of the run.
        node_id: The node.
        memory_fraction: Largest share of the node's memory that it holds.
    """

    _neighbor = ""
    _ranks = 0

    def __init__(self, run_id: str, node_id: str, memory_fraction: float) -> None:
        self._run_id = run_id
        self._node_id = node_id
        self._total = get_system_memory()
        self._limit = memory_fraction * self._total
        self._files: dict[str, _File] = {}  # by path
        self._lock = threading.Lock()
        self._failures = Counter[int]()  # transfers in a row that have failed, by rank
        self._heard_at = time.monotonic()
        start_thread(self._replicate)

    def heartbeat(self, neighbor: str, ranks: int) -> None:
        """Record that a controller still needs this keeper.

        Args:
            neighbor: The node to replicate to; empty: none.
            ranks: Largest number of ranks on a node, whose states are sent one after the other; 0: no neighbor.
        """
        self._heard_at = time.monotonic()
        self._neighbor = neighbor
        self._ranks = ranks

    def reserve(self, group: tuple[int, int], rank: int, size: int, is_replica: bool = False) -> str:
        """Allocate a file for the state of a rank. If the rank has two files, free the one with the older state.

        Returns:
            The path; empty while files of earlier worker groups leave no room, until this one commits a checkpoint.

        Raises:
            MemoryError: There is not so much memory.
        """
        with self._lock:
            paths = [path for path, file in self._files.items() if file[:3] == (group, rank, is_replica)]
            if len(paths) >= FILES:
                del self._files[min(paths, key=lambda path: self._files[path].step)]
            used = sum(len(file.memory) for file in self._files.values())
            replicas = sum(len(file.memory) for file in self._files.values() if file.is_replica)
            # The states of this node come first.
            is_full = used + size > self._limit or (is_replica and replicas + size > self._limit / 2)
            free = int(_USABLE * self._total) - get_used_memory()
            if is_full or size > free:
                if any(file.group < group for file in self._files.values()):
                    return ""
                raise MemoryError(
                    f"a file of {size:,} bytes does not fit: recovery points use {used:,} of at most "
                    f"{self._limit:,.0f} bytes (recovery_memory_fraction, of which half for replicas), and "
                    f"{free:,} bytes are left of the node's memory"
                )
            file = os.fdopen(os.memfd_create("recovery-point", os.MFD_ALLOW_SEALING), "r+b", buffering=0)
            os.posix_fallocate(file.fileno(), 0, size)  # so that the first copy is as fast as the later ones
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            self._files[path] = _File(group, rank, is_replica, file, open_file(path))
        return path

    def states(self) -> list[StoredState]:
        """Return the complete states that no process can change any more.

        Wait up to 5 s in all for workers that still map a file for writing to exit, and then leave these files out.
        """
        self._heard_at = time.monotonic()
        deadline = time.monotonic() + _WRITER_SECONDS
        states = []
        for path, file in [*self._files.items()]:
            while not (is_final := _forbid_writes(file.file)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            header = read_header(file.memory)
            if header and is_final:
                states.append(StoredState(header, self._node_id, path))
        return states

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a state, for a worker on another node."""
        return bytes(self._files[path].memory[start:stop])

    def write_replica(self, header: StateHeader, path: str, start: int, data: bytes, is_whole: bool) -> str:
        """Write bytes of the state of a rank on another node.

        Args:
            header: The header of the state.
            path: The file; empty: a new one.
            start: Position of the bytes.
            data: The bytes.
            is_whole: True for the last bytes of a state, if it was not overwritten meanwhile.

        Returns:
            The path of the file.
        """
        group = header[1:3]
        path = path or self.reserve(group, header.rank, header.size, is_replica=True)
        if not path:
            raise MemoryError("earlier worker groups use the memory")
        file = self._files[path]
        if file[:3] != (group, header.rank, True):  # the file was freed, and another one has its descriptor
            raise MemoryError("the worker group has ended")
        file.write(data, start)
        if is_whole:
            file.write(header.encode(), 0)
        return path

    def free_before(self, group: tuple[int, int]) -> None:
        """Free the memory of all worker groups before one."""
        with self._lock:
            self._files = {path: file for path, file in self._files.items() if file.group >= group}

    def _replicate(self) -> None:
        """Process new states of this node's ranks, in a loop. Exit without heartbeats."""
        done: dict[int, StateHeader] = {}
        while time.monotonic() - self._heard_at < _EXIT_AFTER_SECONDS:
            time.sleep(_REPLICATE_SECONDS if self._neighbor else _RETRY_SECONDS)
            self._process_new(done)
        os._exit(0)

    def _process_new(self, done: dict[int, StateHeader]) -> None:
        """Compute the checksums of each new state of this node's ranks, and send it to the neighbor."""
        for path in [*self._files]:
            file = self._files.get(path)  # it may be freed meanwhile
            if not file or file.is_replica:
                continue
            header = read_header(file.memory)
            if not header or header <= done.get(file.rank, ()):
                continue
            done[file.rank] = header
            began = time.monotonic()
            try:
                is_whole = self._process(header, file)
            except Exception as error:  # noqa: BLE001 - a lost node, too little memory there, or an ended group
                self._failures[file.rank] += 1
                if self._failures[file.rank] == _MAX_FAILURES:
                    logger.warning("Cannot copy recovery points to another node: %s", getattr(error, "cause", error))
            else:
                self._failures[file.rank] = 0
                seconds = self._ranks * (time.monotonic() - began)
                with suppress(OSError):  # the worker group has ended, and the file is read-only
                    file.write(struct.pack("d", seconds if is_whole else -seconds), TRANSFER_SECONDS_AT)

    def _process(self, header: StateHeader, file: _File) -> bool:
        """Compute the checksums of a state, and send it. Return False if it was overwritten meanwhile."""
        memory = file.memory
        with suppress(RecoveryPointError, OSError):  # it is overwritten already, or the worker group has ended
            table = StateReader(header, lambda start, stop: memory[start:stop]).compute_checksum_table()
            if read_header(memory) == header:  # the table of a later state may be elsewhere
                file.write(*table)
        neighbor = self._neighbor
        target = ""
        for start, stop in _chunks(HEADER_BYTES, header.size) if neighbor else ():
            data = bytes(memory[start:stop])
            if read_header(memory) != header:
                return False
            keeper = ray.get_actor(keeper_name(self._run_id, neighbor), NAMESPACE)
            request = keeper.write_replica.remote(header, target, start, data, stop == header.size)
            target = ray.get(request, timeout=_TRANSFER_SECONDS)
        return read_header(memory) == header


def _forbid_writes(file: FileIO) -> bool:
    """Forbid all later writes to a file; return False while another process can write it."""
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    except OSError:
        return False
    return True


def open_file(path: str, write: bool = False) -> memoryview:
    """Map a keeper's file into memory. Without ``write``, what is written there stays in this process."""
    descriptor = os.open(path, os.O_RDWR if write else os.O_RDONLY)
    try:
        mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED if write else mmap.MAP_PRIVATE)
        mapping.madvise(mmap.MADV_DONTFORK)  # processes of a data loader would keep the file writable
        return memoryview(mapping)
    finally:
        os.close(descriptor)


def _chunks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(first, min(first + _CHUNK_BYTES, stop)) for first in range(start, stop, _CHUNK_BYTES)]


class WorkerMemory:
    """The memory of this worker's recovery points, in the keeper of its node.

    Attributes:
        group_id: The id of the run, and the numbers of the attempt and of the worker group.
    """

    _paths: Sequence[str] = ()
    _request: Any = None
    _requested_at = 0.0

    def __init__(self, group_id: tuple[str, int, int], rank: int, restored: Sequence[Sequence[StoredState]]) -> None:
        self.group_id = group_id
        self._rank = rank
        self._restored = restored
        self._node_id = ray.get_runtime_context().get_node_id()

    def reserve(self, size: int) -> memoryview | None:
        """Request memory of at least ``size`` bytes, without waiting, because allocating a gigabyte can take seconds.

        Returns:
            The memory, once it is there. None: call again later.

        Raises:
            MemoryError: There will be no such memory.
        """
        try:
            if self._request is None and time.monotonic() > self._requested_at + _RETRY_SECONDS:
                self._requested_at = time.monotonic()
                self._request = self._keeper(self._node_id).reserve.remote(self.group_id[1:], self._rank, size)
            if self._request is None or not ray.wait([self._request], timeout=0)[0]:
                return None
            answer = self._request
            self._request = None
            path = ray.get(answer)
            file = open_file(path, write=True) if path else None
        except ray.exceptions.RayTaskError as error:
            raise MemoryError(str(error.cause)) from None
        except (ray.exceptions.RayError, FileNotFoundError, ValueError):
            return None  # there is no keeper yet, or it has just died
        # A raylet that is a zombie has no such file.
        self._paths = [*filter(os.path.exists, (path, f"/proc/{os.environ['RAY_RAYLET_PID']}/exe"))]
        return file

    def is_lost(self) -> bool:
        """Return True if the keeper or the raylet has died. That does not free memory that this worker has mapped."""
        return not all(map(os.path.exists, self._paths))

    def read_restored(self) -> list[StateReader]:
        """Return the states, by rank, of the recovery point that this worker group restores; empty: none."""
        return [self._reader(locations) for locations in self._restored]

    def _reader(self, locations: Sequence[StoredState]) -> StateReader:
        location = min(locations, key=lambda location: location.node_id != self._node_id)
        if location.node_id == self._node_id:
            memory = open_file(location.path)
            return StateReader(location.header, lambda start, stop: memory[start:stop])
        keeper = self._keeper(location.node_id)

        def read(start: int, stop: int) -> bytearray:
            requests = (keeper.read.remote(location.path, *chunk) for chunk in _chunks(start, stop))
            return bytearray().join(ray.get(request, timeout=_TRANSFER_SECONDS) for request in requests)

        return StateReader(location.header, read)

    def _keeper(self, node_id: str) -> Any:
        return ray.get_actor(keeper_name(self.group_id[0], node_id), NAMESPACE)
