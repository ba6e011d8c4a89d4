"""Recovery points: the format of a state in memory, the choice of a point, where it is held, and its use."""

from __future__ import annotations

import gc
import math
import mmap
import os
import pickle
import struct
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train import loop
from prefect_elastic_train.controller.keepers import Keepers
from prefect_elastic_train.loop import jax_state, recovery_points
from prefect_elastic_train.loop.recovery_points import (
    HEADER_BYTES,
    TRANSFER_SECONDS_AT,
    RecoveryPointError,
    RecoveryPoints,
    StateHeader,
    StateReader,
    newest_point,
    read_header,
    state_size,
    write_state,
)
from prefect_elastic_train.loop.state import State, bytes_of
from prefect_elastic_train.loop.training_session import _is_whole_in_memory
from prefect_elastic_train.worker import recovery_memory
from prefect_elastic_train.worker.recovery_memory import Keeper, StoredState, WorkerMemory, open_file

IDENTITY = ("run", 1, 1, 7, 1, 0)


def _identity(**changed: int) -> Any:
    return StateHeader(*IDENTITY, 0, 0, 0)._replace(**changed)[:6]


def _bytes(*values: int) -> Any:
    return np.array(values, np.uint8)


def _memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def _state(identity: Any, arrays: list[Any]) -> memoryview:
    memory = _memory(state_size(arrays))
    write_state(memory, identity, arrays)
    return memory


def _header(memory: memoryview) -> StateHeader:
    found = read_header(memory)
    assert found
    return found


def _reader(memory: memoryview, header: StateHeader | None = None) -> StateReader:
    return StateReader(header or _header(memory), lambda start, stop: memory[start:stop])


# The format of a state


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6))
def test_a_state_is_what_was_written_and_there_is_none_before_it_is_complete(values: list[bytes]) -> None:
    arrays = [np.frombuffer(value, np.uint8) for value in values]
    memory = _state(IDENTITY, arrays)
    header = _header(memory)
    assert (header[:6], header.size) == (IDENTITY, state_size(arrays))
    assert [bytes(array) for array in _reader(memory)] == values[1:]
    with pytest.raises(TypeError):  # the next one, by a worker that dies then
        write_state(memory, IDENTITY, [*arrays[:-1], None])  # type: ignore[list-item]
    assert read_header(memory) is None
    with pytest.raises(RecoveryPointError, match="rank 0, step 7 is damaged or was overwritten"):
        [*_reader(memory, header)]


def test_another_state_is_not_read_as_the_one_that_was_listed() -> None:
    memory = _state(IDENTITY, [_bytes(1)])
    listed = _header(memory)
    for identity in (_identity(step=8), IDENTITY):
        write_state(memory, identity, [_bytes(1)])
        with pytest.raises(RecoveryPointError, match="was overwritten"):
            _reader(memory, listed).description()


@given(st.data())
def test_no_byte_of_an_array_changes_unseen(data: st.DataObject) -> None:
    arrays = [_bytes(*range(100)), _bytes(*range(50))]
    memory = _state(IDENTITY, arrays)
    checksums, start = _reader(memory).compute_checksum_table()
    memory[start : start + len(checksums)] = checksums
    place = data.draw(st.sampled_from([*range(4096, 4096 + 16), *range(4160, 4160 + 100), *range(4288, 4288 + 50)]))
    memory[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecoveryPointError, match="damaged"):
        [bytes(_reader(memory)._array(number)) for number in range(2)]


# Which point is restored


Point = tuple[int, int, int]


def _states(*points: Point, ranks: tuple[int, ...] = (0, 1), world: int = 2, run: str = "run") -> Any:
    return [StateHeader(run, *point, world, rank, 0, 0, 0) for point in points for rank in ranks]


@pytest.mark.parametrize(
    ("states", "committed", "point"),
    [
        ([], (1, 1, 10), None),
        (_states((1, 1, 12), (1, 1, 13)), (1, 1, 10), (1, 1, 13)),
        ([*_states((1, 1, 12)), *_states((1, 1, 13), ranks=(1,))], (1, 1, 10), (1, 1, 12)),  # rank 0 died before 13
        (_states((1, 1, 10)), (1, 1, 10), None),
        (_states((1, 1, 9)), (1, 1, 10), None),
        (_states((1, 1, 50)), (1, 2, 10), None),  # of a group whose successor has committed since
        (_states((1, 9, 50)), (2, 1, 10), None),  # of an attempt that was replaced, and trained on
        (_states((1, 3, 50), (2, 1, 11)), (1, 2, 10), (2, 1, 11)),  # the later attempt had begun elsewhere
        (_states((1, 2, 11)), (1, 1, 40), (1, 2, 11)),  # a group that restored less than its predecessor committed
        (_states((1, 1, 99), run="another"), (1, 1, 10), None),
        ([*_states((1, 1, 12), world=3)], (0, 0, 0), None),  # two of three
        ([*_states((1, 1, 12), ranks=(0,)), *_states((1, 2, 12), ranks=(1,))], (0, 0, 0), None),  # of two groups
    ],
)
def test_the_newest_point_of_all_ranks_that_is_newer_than_the_commit_is_restored(
    states: list[StateHeader], committed: Point, point: Point | None
) -> None:
    found = newest_point(states, "run", committed)
    assert (found and found[1:4]) == point


# When they are made


class Memory:
    """Memory of this process, as much as there is; the first answer to each request is that it is not there yet."""

    group_id = ("run", 1, 1)

    def __init__(self, free: int = 2**30) -> None:
        self.free, self.files, self.lost, self.requests = free, list[memoryview](), False, 0

    def reserve(self, size: int) -> memoryview | None:
        if size > self.free:
            raise MemoryError("too little")
        self.requests += 1
        if self.requests % 2:
            return None
        self.files.append(_memory(size))
        return self.files[-1]

    def is_lost(self) -> bool:
        return self.lost

    def read_restored(self) -> list[StateReader]:
        return []


def _points(monkeypatch: pytest.MonkeyPatch, memory: Memory, interval: int | str = 1) -> RecoveryPoints:
    monkeypatch.setattr(recovery_points, "memory", memory)
    return RecoveryPoints(interval, 0, 1)


def _make(points: RecoveryPoints, *steps: int, size: int = 3) -> None:
    for step in steps:
        points.make(step, lambda: ({}, [np.zeros(size, np.uint8)]))


def _steps(memory: Memory) -> list[int]:
    return [header.step if header else 0 for header in map(read_header, memory.files)]


def test_one_of_two_files_is_complete_whenever_a_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    points = _points(monkeypatch, memory)
    _make(points, 1, 2)
    assert (points.step, memory.files) == (0, []), "there is no memory yet"
    _make(points, 3, 4, 5)
    assert (points.step, _steps(memory)) == (5, [3, 5])
    _make(points, 6, 7)
    assert _steps(memory) == [6, 7]
    monkeypatch.setattr(recovery_points.json, "dumps", lambda _: 1 / 0)  # it dies before
    _make(points, 8)
    assert _steps(memory) == [0, 7]


def test_a_second_point_of_a_step_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    points = _points(monkeypatch, memory)
    _make(points, *range(1, 8))
    points.make(7, lambda: ("second", []))
    assert sorted(_steps(memory)) == [6, 7]
    [newest] = [file for file in memory.files if _header(file).step == 7]
    assert _reader(newest).description() == "second"


def test_a_state_that_grows_gets_larger_files_and_keeps_the_complete_ones_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    points = _points(monkeypatch, memory)
    _make(points, *range(1, 8))
    _make(points, 8, 9, size=10**6)
    assert _steps(memory) == [6, 7], "of 8 and 9 there is none"
    _make(points, *range(10, 16), size=10**6)
    assert sorted(_steps(memory)[-2:]) == [14, 15]


def test_a_state_that_does_not_fit_is_logged_once_and_a_lost_keeper_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery_points, "_LOST_SECONDS", 0.0)
    memory = Memory()
    points = _points(monkeypatch, memory)
    _make(points, *range(1, 6))
    memory.lost = True
    _make(points, 6)
    memory.lost = False
    _make(points, 7)
    assert len(memory.files) == 3
    assert _steps(memory)[-1] == 7
    memory.free = 10
    _make(points, 8, 9, size=10**6)
    assert points.memory is None
    assert [record.getMessage() for record in caplog.records] == [
        "The keeper of recovery points or the raylet has died; "
        "restarts continue from checkpoints until there is a new one",
        "Recovery points in memory are off, and restarts continue from checkpoints: too little",
    ]


def test_a_state_that_cannot_be_pickled_turns_them_off_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = _points(monkeypatch, Memory())
    points.make(1, lambda: (lambda: None, []))
    assert points.memory is None
    assert "pickle" in caplog.text


def test_the_automatic_interval_blocks_the_loop_for_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recovery_points.time, "monotonic", lambda: now[0])
    points = _points(monkeypatch, Memory(), "auto")

    def capture() -> Any:
        now[0] += 0.02
        return {}, [_bytes(1)]

    for step in range(1, 20):
        now[0] += 0.08
        if step % points.plan(3600.0) == 0:
            points.make(step, capture)
    assert points.plan(1e9) > points.plan(3600.0) >= 20, "of steps of 0.1 s"
    assert 20 <= points.plan(0.001) <= 25


def test_a_state_is_overwritten_once_the_next_one_is_replicated_and_after_one_pause_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    points = _points(monkeypatch, memory)
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept.append(seconds)
        if now[0] > replicated_at:
            replicate(points._files[-1])

    def replicate(file: memoryview) -> None:
        file[TRANSFER_SECONDS_AT:HEADER_BYTES] = struct.pack("d", 0.01)

    monkeypatch.setattr(
        recovery_points, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], monotonic_ns=int)
    )
    replicated_at = math.inf
    _make(points, *range(1, 9))
    assert slept == [], "there is no other node"
    replicate(points._files[-1])
    _make(points, 9)
    replicated_at = 1.0
    _make(points, 10)
    assert 1.0 < sum(slept) < 1.1
    slept.clear()
    replicated_at = math.inf
    _make(points, 11)
    assert 2.0 <= sum(slept) < 2.1
    assert points.step == 11
    _make(points, 12, 13)
    assert sum(slept) < 2.1, "it pauses once"
    slept.clear()
    replicate(points._files[0])
    _make(points, 13)
    assert slept == [], "a state of the same step overwrites no replicated one"


@pytest.mark.parametrize("seconds", [1.0, -1.0])
def test_points_are_not_made_faster_than_they_are_copied_to_another_node(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(recovery_points.time, "monotonic", lambda: now[0])
    memory = Memory()
    points = _points(monkeypatch, memory)
    for step in range(1, 10):
        now[0] += 0.125
        _make(points, step)
    assert points.plan(3600.0) == 1
    memory.files[0][TRANSFER_SECONDS_AT:HEADER_BYTES] = struct.pack("d", seconds)
    assert points.plan(3600.0) == 12, "1.5 times 8 steps"


@pytest.mark.parametrize("interval", [0, -1, "often", 1.5])
def test_an_invalid_interval_is_refused(interval: Any) -> None:
    with pytest.raises(ValueError, match="recovery_points="):
        RecoveryPoints(interval, 0, 1)


# Where they are held


def _keeper(node_id: str = "node", fraction: float = 0.5) -> Keeper:
    with mock.patch.object(recovery_memory.threading, "Thread"):  # its work is called by the tests
        return Keeper("run", node_id, fraction)


def _write(keeper: Keeper, group: int, size: int = 8192) -> memoryview:
    file = open_file(keeper.reserve((1, group), 0, size), write=True)
    write_state(file, _identity(group=group), [_bytes(group)])
    return file


def test_a_keeper_lists_only_states_that_nobody_can_change_and_frees_older_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery_memory, "_WRITER_SECONDS", 0.1)
    keeper = _keeper()
    files = [_write(keeper, group) for group in (1, 2)]
    assert keeper.states() == [], "workers may write them"
    del files
    gc.collect()
    first, second = keeper.states()
    assert [one.header.group for one in (first, second)] == [1, 2]
    with pytest.raises(PermissionError):
        open_file(first.path, write=True)
    private = open_file(second.path)
    private[0] = 0  # as a loop that changes what it has restored
    assert [one.header.group for one in keeper.states()] == [1, 2]
    keeper.free_before((1, 2))
    assert [one.header.group for one in keeper.states()] == [2]
    assert not os.path.exists(first.path)


def test_a_keeper_gives_no_more_than_its_share_of_the_memory() -> None:
    keeper = _keeper(fraction=1e-9)
    with pytest.raises(MemoryError, match=r"use 0 of at most \d+ bytes \(recovery_memory_fraction"):
        keeper.reserve((1, 1), 0, 10**6)
    keeper._limit = 10_000
    _write(keeper, 1)
    assert keeper.reserve((1, 2), 0, 8192) == "", "the group before may still be needed"
    keeper.free_before((1, 2))
    assert keeper.reserve((1, 2), 0, 8192)


def test_a_state_reaches_the_keeper_of_another_node_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = _keeper("here"), _keeper("there")

    class Remote:
        def __init__(self, method: Any) -> None:
            self.remote = method

    handle = type("Handle", (), {"write_replica": Remote(there.write_replica)})
    monkeypatch.setattr(recovery_memory.ray, "get_actor", lambda *_: handle)
    monkeypatch.setattr(recovery_memory.ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(recovery_memory, "_CHUNK_BYTES", 1000)
    path = here.reserve((1, 1), 0, 10**5)
    source = open_file(path, write=True)
    here.heartbeat("there", 2)
    done: dict[int, StateHeader] = {}

    def fill(step: int, value: int) -> None:
        arrays = [_bytes(step), np.full(50_000, value, np.uint8)]
        write_state(source, _identity(step=step), arrays)

    def seconds() -> float:
        return float(np.frombuffer(source, np.float64, 1, TRANSFER_SECONDS_AT)[0])

    for step, value in [(1, 1), (2, 2), (3, 3), (3, 4)]:  # the last one is the second of a step
        fill(step, value)
        assert seconds() == 0
        here._process_new(done)
        assert seconds() > 0
    fill(4, 5)

    def overtaken(*call: Any) -> str:
        fill(5, 6)
        return there.write_replica(*call)

    handle.write_replica = Remote(overtaken)  # type: ignore[attr-defined]
    here._process_new(done)
    assert seconds() < 0, "the transfer was longer than the interval, and there is no replica"
    [newest] = there.states()  # that of 3 before was replaced by a part of 4
    assert newest.header.step == 3
    read = partial(there.read, newest.path)
    assert set(StateReader(newest.header, read)[0]) == {4}


def _process_with_file() -> subprocess.Popen[str]:
    """Start a process that holds a file in memory, and prints its descriptor."""
    program = "import os, time; fd = os.memfd_create(''); os.truncate(fd, 8192); print(fd, flush=True); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process, and leave it as a zombie."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_the_time_of_a_replication_is_that_of_all_ranks_on_a_node_and_a_rank_whose_state_does_not_fit_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = _keeper()
    keeper.heartbeat("there", 4)
    files = [open_file(keeper.reserve((1, 1), rank, 8192), write=True) for rank in range(2)]
    now = [0.0]
    monkeypatch.setattr(recovery_memory, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def process(header: StateHeader, file: Any) -> bool:
        now[0] += 0.5
        if header.rank == 0:
            raise MemoryError("a file of 8,192 bytes does not fit")
        return True

    monkeypatch.setattr(keeper, "_process", process)
    done: dict[int, StateHeader] = {}
    for step in range(1, 4):
        for rank, file in enumerate(files):
            write_state(file, ("run", 1, 1, step, 2, rank), [_bytes(rank)])
        keeper._process_new(done)
    assert [np.frombuffer(file, np.float64, 1, TRANSFER_SECONDS_AT)[0] for file in files] == [0.0, 2.0]
    assert caplog.messages == ["Cannot copy recovery points to another node: a file of 8,192 bytes does not fit"]


def test_late_bytes_of_a_replica_are_not_written_into_a_file_that_has_the_descriptor_of_theirs() -> None:
    keeper = _keeper()
    header = StateHeader(*_identity(), 1, 1, 8192)
    path = keeper.write_replica(header, "", HEADER_BYTES, b"1", False)
    keeper.free_before((1, 9))
    # As if the kernel had given the same descriptor again.
    keeper._files[path] = keeper._files.pop(keeper.reserve((1, 9), 0, 8192))
    with pytest.raises(MemoryError, match="the worker group has ended"):
        keeper.write_replica(header, path, HEADER_BYTES, b"2", True)
    assert bytes(keeper.read(path, 0, 8192)) == bytes(8192)


def test_replicas_use_at_most_half_of_the_memory_and_only_what_is_left() -> None:
    keeper = _keeper()
    keeper._limit = 40_000
    header = StateHeader(*_identity(), 1, 1, 8192)
    for step in (1, 2):
        keeper.write_replica(header._replace(step=step), "", HEADER_BYTES, b"1", True)
    with pytest.raises(MemoryError, match=r"use 16,384 of at most 40,000 bytes"):
        keeper.write_replica(header._replace(rank=1), "", HEADER_BYTES, b"1", True)
    for rank in (2, 3):
        assert keeper.reserve((1, 1), rank, 8192)
    keeper._limit = 60_000
    with pytest.raises(MemoryError, match=r"use 32,768 of at most 60,000 bytes"):
        keeper.reserve((1, 1), 1, 27_240)
    keeper.reserve((1, 1), 4, 20_480)
    with pytest.raises(MemoryError, match=r"use 53,248 of at most 60,000 bytes"):
        keeper.write_replica(header._replace(rank=1), "", HEADER_BYTES, b"1", True)


def test_a_point_is_given_up_after_three_failures_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keepers = Keepers("run", 0.3)
    header = StateHeader(*IDENTITY, 1, 1, 8192)
    states = [StoredState(header, "node", "path")]
    monkeypatch.setattr(keepers, "_list_states", lambda committed: (states, header))
    for _ in range(9):  # groups that find no resources, and never start
        assert keepers.newest_states(None) == [states]
    keepers.failures[header] = 3
    keepers.restored_point = None
    assert keepers.newest_states(None) == []
    assert keepers.restored_point is None
    assert caplog.messages == ["3 worker groups have failed at the recovery point of step 7; trying the checkpoint"]


def test_a_worker_knows_that_its_keeper_or_its_raylet_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ""
    handle = SimpleNamespace(reserve=SimpleNamespace(remote=lambda *_: path))
    monkeypatch.setattr(recovery_memory.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(recovery_memory.ray, "get_actor", lambda *_: handle)
    monkeypatch.setattr(recovery_memory.ray, "wait", lambda requests, timeout: (requests, []))
    monkeypatch.setattr(recovery_memory.ray, "get", lambda value: value)
    with _process_with_file() as keeper, _process_with_file() as another, subprocess.Popen(["sleep", "60"]) as raylet:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        memory = WorkerMemory(("run", 1, 1), 0, [])
        assert not memory.is_lost()
        for process in (keeper, another):
            assert process.stdout
            path = f"/proc/{process.pid}/fd/{process.stdout.readline().strip()}"
            memory._requested_at = 0.0
            assert memory.reserve(8192)
            assert not memory.is_lost()
            if process is keeper:
                _kill(keeper)
                assert memory.is_lost()
        _kill(raylet)
        assert memory.is_lost(), "its raylet is a zombie"
        another.kill()


def test_a_state_that_changes_after_its_checksums_were_computed_is_not_read() -> None:
    keeper = _keeper()
    file = _write(keeper, 1)
    keeper._process_new({})
    file[4160] ^= 1
    del file
    gc.collect()
    [state] = keeper.states()
    with pytest.raises(RecoveryPointError, match="damaged"):
        StateReader(state.header, partial(keeper.read, state.path)).description()


def test_checksums_of_a_state_are_not_written_into_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = _keeper()
    path = keeper.reserve((1, 1), 0, 10**5)
    file = open_file(path, write=True)
    write_state(file, IDENTITY, [_bytes(1)] * 20)
    later = [_bytes(*range(number, number + 90)) for number in range(5)]
    compute = StateReader.compute_checksum_table

    def overtaken(reader: StateReader) -> tuple[bytes, int]:
        table = compute(reader)
        write_state(file, _identity(step=9), later)
        return table

    monkeypatch.setattr(StateReader, "compute_checksum_table", overtaken)
    keeper._process_new({})
    assert [bytes(array) for array in _reader(file)] == [bytes(array) for array in later[1:]]


# States


def _restored(state: Any, into: Any, ranks: int = 1) -> Any:
    description, arrays = state.capture()
    parts = [np.frombuffer(pickle.dumps(description), np.uint8), *arrays]
    keeper = _keeper()
    path = keeper.reserve((1, 1), 0, state_size(parts))
    file = open_file(path, write=True)
    write_state(file, IDENTITY, parts)
    header = _header(file)
    del file
    keeper._process_new({})
    restored = open_file(path)
    readers = [StateReader(header, lambda start, stop: restored[start:stop]) for _ in range(ranks)]
    into.restore([(reader.description(), reader) for reader in readers], 0)
    return into


def test_values_come_back_from_memory_as_what_they_were() -> None:
    values = {"weights": np.arange(6.0).reshape(2, 3).T, "count": 3, "name": "abc", "tensor": torch.ones(2)}
    empty = {"weights": np.zeros((3, 2)), "count": 0, "name": "", "tensor": torch.zeros(2)}
    found = vars(_restored(loop.ArrayState(**values), loop.ArrayState(**empty), ranks=2))
    assert {name: (type(one), np.asarray(one).tolist()) for name, one in found.items()} == {
        name: (type(one), np.asarray(one).tolist()) for name, one in values.items()
    }
    with pytest.raises(loop.StateMismatchError, match=r"count: \(\) in the checkpoint, missing in the state"):
        _restored(loop.ArrayState(**values), loop.ArrayState(weights=np.zeros((3, 2))))


def _torch_parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1).bfloat16().float()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def _train_torch(parts: dict[str, Any]) -> list[Any]:
    for _ in range(3):
        parts["model"](torch.randn(8, 3)).square().mean().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["schedule"].step()
    return [value.clone() for value in parts["model"].state_dict().values()]


def test_a_torch_state_trains_on_from_memory_as_if_nothing_had_happened() -> None:
    parts, others = _torch_parts(0), _torch_parts(1)
    _train_torch(parts)
    _restored(loop.TorchState(**parts), loop.TorchState(**others), ranks=2)
    torch.manual_seed(2)
    expected = _train_torch(parts)
    torch.manual_seed(2)
    assert all(map(torch.equal, expected, _train_torch(others)))
    wide = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    with pytest.raises(loop.StateMismatchError, match=r"model\.0\.weight"):
        _restored(loop.TorchState(**parts), loop.TorchState(model=wide))


def test_tensors_are_restored_into_any_data_type_and_memory_layout() -> None:
    saved = torch.nn.Linear(3, 4)
    for data_type in (torch.float32, torch.bfloat16, torch.float64):
        columns = torch.nn.Linear(3, 4, dtype=data_type)
        columns.weight = torch.nn.Parameter(torch.empty(3, 4, dtype=data_type).T)
        _restored(loop.TorchState(model=saved), loop.TorchState(model=columns))
        assert torch.equal(columns.weight, saved.weight.to(data_type))
        assert torch.equal(columns.bias, saved.bias.to(data_type))
        rows = _restored(loop.TorchState(model=columns), loop.TorchState(model=torch.nn.Linear(3, 4, dtype=data_type)))
        assert torch.equal(rows._modules["model"].bias, columns.bias)
        assert torch.equal(rows._modules["model"].weight, columns.weight)


def test_the_leaves_of_a_jax_state_are_restored_from_shards_of_any_sharding() -> None:
    tree = {"inner": jax.numpy.arange(6, dtype=jax.numpy.bfloat16).reshape(2, 3), "none": 2}
    state = loop.JaxState(params=tree, key=jax.random.key(3))
    zero = loop.JaxState(params=jax.tree.map(lambda one: one * 0, tree), key=jax.random.key(0))
    found = _restored(state, zero)
    assert jax.tree.map(np.array_equal, found.params, tree) == {"inner": True, "none": True}
    assert (found.params["inner"].dtype, type(found.params["none"])) == (jax.numpy.bfloat16, int)
    assert jax.random.uniform(found.key) == jax.random.uniform(state.key)
    whole = np.arange(24.0).reshape(4, 6)
    cuts = [((0, 1), (0, 6)), ((1, 4), (0, 2)), ((1, 4), (2, 6))]
    pieces = {cut: bytes_of(np.ascontiguousarray(whole[slice(*cut[0]), slice(*cut[1])])) for cut in cuts}
    leaf = jax_state._Leaf(whole.dtype, whole.shape, {cut: partial(pieces.__getitem__, cut) for cut in cuts})
    for rows in (slice(0, 4), slice(0, 2), slice(2, 4)):
        assert np.array_equal(leaf._at((rows, slice(1, 5))), whole[rows, 1:5])
    del leaf.shards[cuts[1]]
    assert np.array_equal(leaf._at((slice(0, 1), slice(0, 6))), whole[:1]), "this shard is there"
    with pytest.raises(RecoveryPointError, match="the sharding has changed"):
        leaf._at((slice(0, 2), slice(0, 6)))


def test_a_class_with_recovery_points_must_define_all_four_methods() -> None:
    stage_only = type("StageOnly", (loop.TorchState,), {"stage": lambda self, directory: None})
    whole = type("Whole", (loop.TorchState,), {})
    assert [_is_whole_in_memory(one) for one in (loop.TorchState, whole, loop.JaxState, loop.ArrayState)] == [True] * 4
    assert not _is_whole_in_memory(stage_only)
    assert not _is_whole_in_memory(type("Own", (State,), {"stage": None, "read": None}))
    assert not _is_whole_in_memory(
        type("Duck", (), {name: getattr(loop.ArrayState, name) for name in ("stage", "read")})
    )
