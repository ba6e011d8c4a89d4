"""Attempts that overlap and die between any two operations on the store.

Every attempt runs in a thread of its own, and the test decides before each operation on the store and on the disk who
goes on and who dies there: between two files of an upload, in the middle of a file, within a deletion. Checkpoints
are named by their number, so overlapping attempts use the same names. Each of their files holds the history that led
to it, all of one size, so a mixture of two attempts or lineages is seen here and nowhere else.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.elastic import local_filesystem
from prefect_elastic_train.elastic.local_filesystem import LocalRunFilesystem
from prefect_elastic_train.elastic.run_filesystem import uploading
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt
from prefect_elastic_train.runs.commits import newest_attempt
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.runs.snapshots import checkpoint_names, latest_checkpoint, parse_snapshot
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.support import claim, empty_snapshot, examples, private_folder, with_result

Chain = tuple[str, ...]
"""The uploads that training went through, oldest first; each has a name of its own."""

FILES = ("rank-0.json", "rank-1.json")

_of_thread = threading.local()
"""Whose attempt a thread is."""


class Died(BaseException):
    """The process of an attempt was killed."""


class Driver:
    """An attempt in a thread that stands still before each operation on the store."""

    def __init__(self, work: Callable[[Driver], None]) -> None:
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self.killed = False
        self.next_operation = ""
        self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._wait()

    def turn(self, operation: str) -> None:
        """Stand still until the test lets this attempt do its next operation; the dead do none."""
        if self.killed:
            raise Died
        self.next_operation = operation
        self._stands.release()
        self._go.acquire()
        if self.killed:
            raise Died

    def step(self) -> None:
        """Let it do one operation."""
        if not self.ended:
            self._go.release()
            self._wait()

    def step_until(self, operation: str) -> None:
        """Let it go on to the next operation of a kind, or to its end."""
        self.step()
        while not self.ended and not self.next_operation.startswith(operation):
            self.step()

    def kill(self) -> None:
        """Let it die where it stands."""
        self.killed = True
        self.step()

    def _run(self, work: Callable[[Driver], None]) -> None:
        _of_thread.driver = self
        try:
            self.turn("start")
            work(self)
        except Died:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stands.release()

    def _wait(self) -> None:
        assert self._stands.acquire(timeout=20), "an attempt hangs"


class SteppedStore(LocalRunStore):
    """A store whose every operation waits for its turn."""

    def __init__(self, path: str, driver: Driver) -> None:
        super().__init__(path)
        self.turn = driver.turn

    def create(self, name: str, data: bytes) -> bool:
        self.turn(f"create {name}")
        return super().create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self.turn(f"replace {name}")
        super().replace(name, data)

    def read(self, name: str) -> bytes | None:
        self.turn(f"read {name}")
        return super().read(name)

    def names(self, folder: str) -> list[str]:
        self.turn(f"list {folder}")
        return super().names(folder)

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        self.turn(f"list {folder}")
        return super().file_sizes(folder)

    def delete(self, name: str) -> None:
        self.turn(f"delete {name}")
        super().delete(name)

    def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        def check_and_wait() -> None:
            if check is not None:
                check()
            self.turn(f"sweep {name}")

        self.turn(f"delete {name}")
        return super().delete_folder(name, check_and_wait)

    def _unlink(self, name: str, handle: int) -> None:
        self.turn(f"unlink {name}")
        super()._unlink(name, handle)

    def _remove_empty(self, path: Path) -> None:
        self.turn(f"rmdir {path}")
        super()._remove_empty(path)


class SteppedDisk:
    """The filesystem below the run filesystem, where a new folder waits for its turn."""

    def __init__(self, turn: Callable[[str], None]) -> None:
        self._disk = fs.LocalFileSystem()
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._turn(f"mkdir {path}")
        self._disk.create_dir(path, recursive=recursive)


class SteppedFilesystem(LocalRunFilesystem):
    """The run filesystem of an attempt, over a store and a disk that wait for their turn."""

    def __init__(self, store: SteppedStore, attempt: int, driver: Driver) -> None:
        super().__init__(store, attempt)
        self._inner = SteppedDisk(store.turn)
        self._driver = driver
        self.turn = store.turn

    def _copy(self, source: str, target: str) -> None:
        _of_thread.driver = self._driver  # it may be a thread of the upload
        super()._copy(source, target)


def _turn(operation: str) -> None:
    driver = getattr(_of_thread, "driver", None)
    if driver is not None:
        driver.turn(operation)


class SteppedOs:
    """The `os` of the run filesystem, where what becomes of a file waits for its turn."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, *arguments: Any, **options: Any) -> int:
        _turn(f"copy {path}")
        return os.open(path, *arguments, **options)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        _turn("write")
        return os.pwrite(descriptor, data, offset)

    def replace(self, source: str, target: str, **options: Any) -> None:
        _turn(f"rename {source}")
        os.replace(source, target, **options)

    def unlink(self, path: str, **options: Any) -> None:
        if not getattr(getattr(_of_thread, "driver", None), "killed", False):  # the dead tidy nothing up
            os.unlink(path, **options)


class SteppedShutil:
    """The `shutil` of the run filesystem, which waits for its turn before a copy and in the middle of it."""

    def copyfile(self, source: str, target: str) -> None:
        data = Path(source).read_bytes()
        _turn(f"copy {source}")
        with open(target, "wb", buffering=0) as copy:
            copy.write(data[: len(data) // 2])
            _turn("write")
            copy.write(data[len(data) // 2 :])


def _open_folder_in_turn(path: str) -> int:
    _turn(f"open {path}")
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


@pytest.fixture(autouse=True, scope="module")
def _stepped_disk() -> Iterator[None]:
    """Have the run filesystem wait for its turns; the rest of the process sees nothing of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_filesystem, "os", SteppedOs())
        patch.setattr(local_filesystem, "shutil", SteppedShutil())
        patch.setattr(local_filesystem, "open_folder", _open_folder_in_turn)
        patch.setattr(local_filesystem, "_COPIES", 1)  # one turn after the other
        yield


@dataclass
class Ledger:
    """What the attempts have seen and reached."""

    path: str
    begun: list[tuple[Begun, Chain]] = field(default_factory=list)
    #: Commits whose attempt was told that they are durable.
    acknowledged: list[tuple[int, Chain]] = field(default_factory=list)

    def chain(self, checkpoint: str) -> Chain:
        """Read the history out of a checkpoint."""
        if not checkpoint:
            return ()
        files = {Path(self.path, checkpoint, file).read_bytes() for file in FILES}
        assert len(files) == 1, f"{checkpoint} is of two attempts: {files}"
        return tuple(json.loads(files.pop()))

    def check_whole(self, snapshot: dict[str, Any]) -> None:
        """All checkpoints of a snapshot are there, with the histories of one lineage."""
        chains = [self.chain(name) for name in checkpoint_names(snapshot)]
        for earlier, later in itertools.pairwise(chains):
            assert later[: len(earlier)] == earlier, f"two lineages are mixed: {earlier} and {later}"


@dataclass(frozen=True)
class Workload:
    """What each attempt does.

    Attributes:
        reports: How many checkpoints it reports.
        keep: How many of them stay.
        interrupted: Whether its first upload is cut short by a worker that dies, and begun anew.
        streams: Whether files are written by streams, as Ray itself does, or by the copies that we have it make.
    """

    reports: int
    keep: int
    interrupted: bool = False
    streams: bool = False


def drive(driver: Driver, ledger: Ledger, label: str, workload: Workload) -> None:
    """Do what a driver and Ray Train do in one attempt; a fenced-off one may fail in any way."""
    store = SteppedStore(ledger.path, driver)
    begun = begin_attempt(store, claim(driver_restarts=1000, max_attempts_without_progress=1000))
    assert isinstance(begun, Begun)
    try:
        _train(store, driver, ledger, begun, label, workload)
    except Exception:
        if newest_attempt(LocalRunStore(ledger.path)) == begun.attempt:
            raise


def _train(store: SteppedStore, driver: Driver, ledger: Ledger, begun: Begun, label: str, workload: Workload) -> None:
    chain = ledger.chain(begun.point.checkpoint)
    ledger.begun.append((begun, chain))
    filesystem = SteppedFilesystem(store, begun.attempt, driver)
    upload = _upload_by_streams if workload.streams else _upload
    loaded = _load_snapshot(filesystem)
    assert (loaded or None) == begun.point.snapshot, "Ray would start from another snapshot"
    snapshot = loaded or empty_snapshot()
    ledger.check_whole(snapshot)
    remove_interrupted_uploads(store, begun.attempt)
    for number in range(workload.reports):
        name = f"epoch-{len(chain) + 1}"
        chain = (*chain, f"{label:>4}-{number}")
        if workload.interrupted and number == 0:
            upload(filesystem, name, (*chain[:-1], f"{label:>4}-x"), FILES[:1])
            remove_interrupted_uploads(store, begun.attempt)
        try:
            upload(filesystem, name, chain, FILES)
        except FileNotFoundError:
            # One that was stopped before the very end of a deletion removes a successor's folder while it is empty:
            # a failure of the worker group, which starts anew.
            remove_interrupted_uploads(store, begun.attempt)
            upload(filesystem, name, chain, FILES)
        snapshot = with_result(snapshot, name, {})
        dropped = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"][: -workload.keep]]
        for field_name in ("checkpoint_results", "checkpoint_report_indices"):
            snapshot[field_name] = snapshot[field_name][-workload.keep :]
        filesystem._log.commit(json.dumps(snapshot).encode())
        ledger.acknowledged.append((begun.attempt, chain))
        ledger.check_whole(snapshot)
        for old in dropped:
            filesystem.delete_dir(f"{ledger.path}/{old}")


def _upload(filesystem: SteppedFilesystem, name: str, chain: Chain, files: tuple[str, ...]) -> None:
    """Upload a checkpoint as a worker does."""
    path = f"{filesystem._run_path}/{name}"
    with uploading():
        filesystem.create_dir(path, recursive=True)
    with private_folder() as folder:
        for file in files:
            Path(folder, file).write_text(json.dumps(chain))
        filesystem.upload_folder(folder, path)


def _upload_by_streams(filesystem: SteppedFilesystem, name: str, chain: Chain, files: tuple[str, ...]) -> None:
    """Upload a checkpoint file by file, each in two writes."""
    path = f"{filesystem._run_path}/{name}"
    with uploading():
        filesystem.create_dir(path, recursive=True)
    data = json.dumps(chain).encode()
    for file in files:
        with filesystem.open_output_stream(f"{path}/{file}", None) as stream:
            stream.write(data[: len(data) // 2])
            stream.write(data[len(data) // 2 :])


def _load_snapshot(filesystem: SteppedFilesystem) -> dict[str, Any] | None:
    """Load Ray's file as Ray does: through the filesystem that it was handed."""
    path = f"{filesystem._run_path}/{layout.SNAPSHOT}"
    filesystem.turn("load")
    if filesystem.get_file_info([path])[0].type == fs.FileType.NotFound:
        return None
    with filesystem.open_input_stream(path) as stream:
        return parse_snapshot(stream.read())


@dataclass(frozen=True)
class Turn:
    """One line of a schedule: who goes on, how far, and whether it dies then.

    Attributes:
        who: Number of the attempt.
        until: The kind of operation before which it stands still again.
        times: How many operations of that kind it goes on.
        dies: Whether it is killed there, and another attempt takes its place.
    """

    who: int
    until: str
    times: int = 1
    dies: bool = False


def play(schedule: list[Turn], drivers: int, workload: Workload) -> None:
    """Run attempts by a schedule.

    What must hold after any schedule: a later attempt has everything that an earlier one was told is durable,
    its checkpoints are there and are of one lineage, and the next attempt can begin.
    """
    with private_folder() as folder:
        ledger = Ledger(f"{folder}/run")

        def start(label: str) -> Driver:
            return Driver(lambda driver: drive(driver, ledger, label, workload))

        running = [start(str(number)) for number in range(drivers)]
        everybody = list(running)
        try:
            for turn in schedule:
                driver = running[turn.who % drivers]
                for _ in range(turn.times):
                    driver.step_until(turn.until)
                if turn.dies or driver.ended:
                    driver.kill()
                    running[turn.who % drivers] = start(str(len(everybody)))
                    everybody.append(running[turn.who % drivers])
            for driver in running:
                driver.kill()
            last = start("last")
            everybody.append(last)
            last.step_until("the end")
        finally:
            for driver in everybody:
                driver.kill()
        for driver in everybody:
            if driver.error is not None and not isinstance(driver.error, AttemptFailedError):
                raise driver.error
        if last.error is not None:
            raise last.error
        _check(ledger)


def _check(ledger: Ledger) -> None:
    for begun, chain in ledger.begun:
        assert not begun.point.repairs, f"attempt {begun.attempt} found damage: {begun.point.repairs}"
        for attempt, durable in ledger.acknowledged:
            if attempt < begun.attempt:
                assert chain[: len(durable)] == durable, (
                    f"attempt {begun.attempt} began from {chain} and lost {durable}, committed by attempt {attempt}"
                )
    newest = latest_checkpoint(parse_snapshot(LocalRunStore(ledger.path).read(layout.SNAPSHOT)) or {})
    assert newest is not None
    longest = max((chain for _, chain in ledger.acknowledged), key=len)
    assert ledger.chain(newest["checkpoint_dir_name"]) == longest


#: Operations before which something of interest can happen; an empty one is any operation.
OPERATIONS = [
    "",
    f"create {layout.ATTEMPTS}",
    f"create {layout.COMMITS}",
    f"create {layout.UPLOADS}",
    f"list {layout.ATTEMPTS}",
    f"list {layout.COMMITS}",
    f"replace {layout.SNAPSHOT}",
    "delete",
    "sweep",
    "unlink",
    "rmdir",
    "load",
    "mkdir",
    "open",
    "copy",
    "write",
    "rename",
]


def schedules(drivers: int, max_turns: int) -> st.SearchStrategy[list[Turn]]:
    """Give schedules for so many attempts at a time."""
    turn = st.builds(
        Turn,
        who=st.integers(0, drivers - 1),
        until=st.sampled_from(OPERATIONS),
        times=st.integers(1, 3),
        dies=st.sampled_from([False, False, True]),
    )
    return st.lists(turn, min_size=1, max_size=max_turns)


def workloads(reports: int) -> st.SearchStrategy[Workload]:
    """Give workloads of so many reports."""
    return st.builds(
        Workload, reports=st.just(reports), keep=st.integers(1, 2), interrupted=st.booleans(), streams=st.booleans()
    )


@examples(40)
@given(schedule=schedules(drivers=3, max_turns=16), workload=workloads(2))
def test_nothing_committed_is_lost_or_mixed_whoever_overlaps_and_dies(schedule: list[Turn], workload: Workload) -> None:
    play(schedule, drivers=3, workload=workload)


@examples(20)
@given(schedule=schedules(drivers=1, max_turns=12), workload=workloads(3))
def test_nothing_committed_is_lost_when_attempts_die_one_after_the_other(
    schedule: list[Turn], workload: Workload
) -> None:
    play(schedule, drivers=1, workload=workload)


@examples(40)
@given(holder=st.integers(1, 30), successor=st.integers(1, 40), dies=st.booleans(), workload=workloads(3))
def test_a_commit_that_falls_into_the_beginning_of_a_successor_is_not_lost(
    holder: int, successor: int, dies: bool, workload: Workload
) -> None:
    play(
        [
            Turn(0, f"create {layout.UPLOADS}"),
            Turn(0, "", times=holder),
            Turn(1, "", times=successor),
            Turn(0, f"create {layout.UPLOADS}"),
            Turn(1, "load", dies=dies),
        ],
        drivers=2,
        workload=workload,
    )


#: Operations of an upload and of a deletion before which a holder is stopped for a while.
STOPS_OF_A_FILE = ["open", "copy", "write", "rename"]
STOPS = [f"create {layout.UPLOADS}", "mkdir", *STOPS_OF_A_FILE, "delete", "sweep", "unlink", "rmdir"]


@pytest.mark.parametrize(("commits", "keep"), [(0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    ("stop", "streams"), [*((stop, False) for stop in STOPS), *((stop, True) for stop in STOPS_OF_A_FILE)]
)
def test_one_that_was_stopped_in_an_upload_or_a_deletion_does_not_touch_what_took_the_name(
    stop: str, streams: bool, commits: int, keep: int
) -> None:
    workload = Workload(reports=3, keep=keep, interrupted=True, streams=streams)
    holder_commits = [Turn(0, f"create {layout.COMMITS}", times=commits)] * bool(commits)
    for times, more in itertools.product((1, 2), (1, 3)):
        holder_is_stopped = Turn(0, stop, times=times)
        successor_commits = Turn(1, f"create {layout.COMMITS}", times=more)
        holder_goes_on = Turn(0, "the end")
        play([*holder_commits, holder_is_stopped, successor_commits, holder_goes_on], drivers=2, workload=workload)


def test_a_holder_that_froze_before_it_mirrored_a_commit_cannot_make_ray_start_from_it_later() -> None:
    frozen_before_mirror = Turn(0, f"replace {layout.SNAPSHOT}")
    successor_commits = Turn(1, f"create {layout.UPLOADS}", times=2)
    third_has_begun = Turn(2, "load")
    frozen_wakes_up = Turn(0, "")
    third_loads = Turn(2, f"create {layout.UPLOADS}")
    play(
        [frozen_before_mirror, successor_commits, third_has_begun, frozen_wakes_up, third_loads],
        drivers=3,
        workload=Workload(reports=3, keep=1),
    )
