"""Attempts that overlap and die between any two operations on the store.

Every attempt runs in a thread of its own, and the test decides before each operation on the store and each file of an
upload who goes on and who dies there. Loops name their checkpoints by number, so overlapping attempts and worker groups
give the same names, and nothing but the names of the folders keeps them apart. Each file holds the history that led to
it, so a mixture of two attempts or lineages is seen here and nowhere else.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.loop.recovery_points import StateHeader, newest_point
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt
from prefect_elastic_train.runs.commits import remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory, newest_attempt_number
from prefect_elastic_train.runs.run_filesystem import RunFilesystem
from prefect_elastic_train.runs.snapshots import checkpoint_names, parse_snapshot
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.support import SteppedStore, claim, empty_snapshot, examples, private_folder, with_result

Chain = tuple[str, ...]
"""The uploads that training went through, oldest first; each has a name of its own."""

FILES = ("rank-0.json", "rank-1.json")


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
    """What each attempt does: how many checkpoints it reports, and how many of them stay."""

    reports: int
    keep: int
    #: All checkpoints are kept, and every other commit is incremental.
    adds: bool = False
    #: Its first upload is cut short by a worker that dies, and another group begins it anew.
    interrupted: bool = False


def drive(driver: Driver, ledger: Ledger, label: str, workload: Workload) -> None:
    """Do what a driver and Ray Train do in one attempt; a fenced-off one may fail in any way."""
    store = SteppedStore(ledger.path, driver.turn)
    begun = begin_attempt(store, claim(driver_restarts=1000, max_attempts_without_progress=1000))
    assert isinstance(begun, Begun)
    try:
        _train(store, driver, ledger, begun, label, workload)
    except Exception:
        if newest_attempt_number(LocalRunStore(ledger.path)) == begun.attempt:
            raise


def _train(store: SteppedStore, driver: Driver, ledger: Ledger, begun: Begun, label: str, workload: Workload) -> None:
    chain = ledger.chain(begun.point.checkpoint)
    ledger.begun.append((begun, chain))
    filesystem = RunFilesystem(store, begun.attempt)
    loaded = _load_snapshot(filesystem, driver)
    expected = begun.point.commit and begun.point.commit.snapshot
    assert loaded == expected, "Ray would start from another snapshot"
    snapshot = loaded or empty_snapshot()
    ledger.check_whole(snapshot)
    remove_leftovers(store, begun.attempt)
    group = 1
    for number in range(workload.reports):
        name = f"epoch-{len(chain) + 1}"
        chain = (*chain, f"{label}-{number}")
        late = ""
        if workload.interrupted and number == 0:
            late = physical_name(name, begun.attempt, group)
            _upload(filesystem, late, (*chain[:-1], f"{label}-x"), FILES[:1])
            remove_leftovers(store, begun.attempt)
            group += 1
        folder = physical_name(name, begun.attempt, group, number)
        _upload(filesystem, folder, chain, FILES)
        snapshot = with_result(snapshot, folder, {})
        kept = 0 if workload.adds else -workload.keep
        dropped = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"][:kept]]
        lists = ("checkpoint_results", "checkpoint_report_indices")
        snapshot |= {field_name: snapshot[field_name][kept:] for field_name in lists}
        is_full = not (workload.adds and number % 2)
        written = snapshot if is_full else snapshot | {field_name: snapshot[field_name][-1:] for field_name in lists}
        filesystem.commits.commit(json.dumps(written).encode(), is_full)
        ledger.acknowledged.append((begun.attempt, chain))
        if late:  # a worker of the first group was only frozen
            Path(ledger.path, late).mkdir(exist_ok=True)
            Path(ledger.path, late, FILES[1]).write_text("late")
        ledger.check_whole(snapshot)
        for old in dropped:
            filesystem.delete_dir(f"{ledger.path}/{old}")


def _upload(filesystem: RunFilesystem, folder: str, chain: Chain, files: tuple[str, ...]) -> None:
    """Upload a checkpoint as a worker does."""
    path = f"{filesystem.store.path}/{folder}"
    filesystem.create_dir(path, recursive=True)
    with private_folder() as local:
        for file in files:
            Path(local, file).write_text(json.dumps(chain))
            filesystem.upload_folder(f"{local}/{file}", f"{path}/{file}")


def _load_snapshot(filesystem: RunFilesystem, driver: Driver) -> dict[str, Any] | None:
    """Load Ray's file as Ray does: through the filesystem that it was handed."""
    path = f"{filesystem.store.path}/{layout.SNAPSHOT}"
    driver.turn("load")
    if filesystem.get_file_info([path])[0].type == fs.FileType.NotFound:
        return None
    with filesystem.open_input_stream(path) as stream:
        return parse_snapshot(stream.read())


@dataclass(frozen=True)
class Turn:
    """One line of a schedule: who goes on, before which kind of operation it stands still, and whether it dies then."""

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
            last.step_until("end")
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
    numbers = [begun.attempt for begun, _ in ledger.begun]
    assert len(numbers) == len(set(numbers)), f"two attempts have one number: {numbers}"
    for begun, chain in ledger.begun:
        assert not begun.point.repairs, f"attempt {begun.attempt} found damage: {begun.point.repairs}"
        for attempt, durable in ledger.acknowledged:
            if attempt < begun.attempt:
                assert chain[: len(durable)] == durable, (
                    f"attempt {begun.attempt} began from {chain} and lost {durable}, committed by attempt {attempt}"
                )
    commit = RunDirectory(LocalRunStore(ledger.path)).newest_commit
    if not commit.since:  # Ray's file does not have incremental ones
        assert RunDirectory(LocalRunStore(ledger.path)).mirror["latest_checkpoint_result"] == commit.latest
    longest = max((chain for _, chain in ledger.acknowledged), key=len)
    assert ledger.chain(commit.checkpoint) == longest


#: Operations before which something of interest can happen, by the names that schedules use.
OPERATIONS = {
    "any": "",
    "begin": f"create {layout.ATTEMPTS}",
    "commit": f"create {layout.COMMITS}",
    "check": f"list {layout.ATTEMPTS}",
    "look": f"list {layout.COMMITS}",
    "mirror": f"replace {layout.SNAPSHOT}",
    **{name: name for name in ("delete", "unlink", "load", "copy", "sizes", "end")},
}


def schedule_of(text: str) -> list[Turn]:
    """Turns such as ``0 commit, 1 copy 3``: who goes on, what it does next when it stands still, and how often."""
    turns = (turn.split() for turn in text.split(", "))
    return [Turn(int(who), OPERATIONS[until], *map(int, more)) for who, until, *more in turns]


def schedules(drivers: int, max_turns: int) -> st.SearchStrategy[list[Turn]]:
    """Return schedules for so many attempts at a time."""
    turn = st.builds(
        Turn,
        who=st.integers(0, drivers - 1),
        until=st.sampled_from([*OPERATIONS.values()][:10]),
        times=st.integers(1, 3),
        dies=st.sampled_from([False, False, True]),
    )
    return st.lists(turn, min_size=1, max_size=max_turns)


def workloads(reports: int) -> st.SearchStrategy[Workload]:
    """Workloads of so many reports."""
    flags = {"adds": st.booleans(), "interrupted": st.booleans()}
    return st.builds(Workload, reports=st.just(reports), keep=st.integers(1, 2), **flags)


@examples(30)
@given(schedule=schedules(drivers=3, max_turns=16), workload=workloads(2))
def test_nothing_committed_is_lost_or_mixed_whoever_overlaps_and_dies(schedule: list[Turn], workload: Workload) -> None:
    play(schedule, drivers=3, workload=workload)


@pytest.mark.parametrize(("commits", "keep"), [(0, 1), (1, 2), (2, 1), (2, 0)])
@pytest.mark.parametrize("stop", ["copy", "sizes", "delete", "unlink", "commit", "mirror"])
def test_one_that_was_stopped_for_a_while_does_not_touch_what_its_successor_needs(
    stop: str, commits: int, keep: int
) -> None:
    workload = Workload(reports=3, keep=keep, adds=not keep, interrupted=True)
    for times in (1, 2):
        for successor_does in ("copy", "commit", "commit 2", "commit 3"):
            play(schedule_of(f"0 commit {commits}, 0 {stop} {times}, 1 {successor_does}, 0 end"), 2, workload)


@pytest.mark.parametrize(
    ("schedule", "drivers"),
    [
        # A commit between two looks of a successor, and of one that dies.
        ("0 commit, 1 begin, 0 copy, 1 look, 1 load", 2),
        ("0 commit, 1 begin, 0 copy, 1 look 1 1, 1 load", 2),
        # Two that begin at once.
        ("0 begin, 1 begin, 0 copy, 1 copy", 2),
        # A holder that froze before it mirrored a commit and wakes up late.
        ("0 mirror, 1 copy 3, 2 load, 0 any, 2 copy", 3),
    ],
)
def test_neither_two_that_begin_at_once_nor_a_late_write_loses_a_commit(schedule: str, drivers: int) -> None:
    play(schedule_of(schedule), drivers, Workload(reports=3, keep=1))


# The choice between a commit and a recovery point in memory

Point = tuple[int, int, int]  # attempt, worker group and step
Choose = Callable[[list[StateHeader], str, Point], StateHeader | None]


def _required_before(step: int) -> int:
    """The last step before a step that must be saved: every third."""
    return (step - 1) // 3 * 3 if step else 0


def _simulate(choose: Choose, random: Random, blocks_points: bool = True) -> None:
    """Simulate a run with steps, commits, deaths and late workers in random order. Its state is the list of its steps.

    ``blocks_points``: no recovery point is made while a required save is not committed.

    Raise an AssertionError if a group continues from a mixture, from less than what was committed, or from a step after
    a required save that was never committed.
    """
    states: dict[StateHeader, tuple[Any, ...]] = {}
    commit: tuple[Point, tuple[Any, ...]] = ((0, 0, 0), ())
    groups: list[tuple[int, int, tuple[Any, ...]]] = []
    attempt, group = 1, 0
    for _ in range(random.randint(1, 6)):
        if random.random() < 0.5:
            attempt, group = attempt + 1, 0
        group += 1
        point = choose([*states], "run", commit[0])
        found = {states.get(point._replace(rank=rank)) for rank in range(point.world_size)} if point else {commit[1]}
        assert len(found) == 1, "all ranks continue from the same state"
        [state] = found
        assert state is not None, "each state is there"
        assert state[: len(commit[1])] == commit[1], "what is committed is not lost"
        assert _required_before(len(state)) <= len(commit[1]), "no required save was skipped"
        size = random.randint(1, 3)
        has_memory = random.random() < 0.7
        for _ in range(random.randint(0, 5)):
            state = (*state, (attempt, group))
            made = random.choice([size, size, random.randint(0, size)])  # the others died before, or are late
            is_allowed = has_memory and not (blocks_points and _required_before(len(state)) > len(commit[1]))
            ranks = range(made if is_allowed else 0)
            point = StateHeader("run", attempt, group, len(state), size, 0, 0, 0, 0)
            states |= {point._replace(rank=rank): state for rank in ranks}
            if made < size:
                break
            if random.random() < 0.3:
                commit = ((attempt, group, len(state)), state)
        groups.append((attempt, group, state))
        if random.random() < 0.3:  # a worker of an earlier group trains on
            of_attempt, of_group, old = random.choice(groups)
            late = (*old, *[("late", of_attempt, of_group)] * random.randint(1, 9))
            is_allowed = not (blocks_points and _required_before(len(late)) > len(commit[1]))
            if is_allowed and (of_attempt, of_group) != (attempt, group):
                states[StateHeader("run", of_attempt, of_group, len(late), 1, 0, 0, 0, 0)] = late


def _ignoring_ranks(states: list[StateHeader], run: str, committed: Point) -> StateHeader | None:
    return max((state for state in states if state[1:4] > committed), default=None)


def _ignoring_the_group(states: list[StateHeader], run: str, committed: Point) -> StateHeader | None:
    found = newest_point([state._replace(attempt=1, group=1) for state in states], run, (1, 1, committed[2]))
    return found and next(state for state in states if state[3:] == found[3:])


def _ignoring_the_commit(states: list[StateHeader], run: str, committed: Point) -> StateHeader | None:
    return newest_point(states, run, (0, 0, committed[2]))


def test_no_order_of_steps_commits_deaths_and_late_workers_loses_or_mixes_what_was_done() -> None:
    for seed in range(2000):
        _simulate(newest_point, Random(seed))


@pytest.mark.parametrize("wrong", [_ignoring_ranks, _ignoring_the_group, _ignoring_the_commit])
def test_the_model_rejects_wrong_choices(wrong: Choose) -> None:
    with pytest.raises(AssertionError):
        [_simulate(wrong, Random(seed)) for seed in range(2000)]


def test_the_model_rejects_points_after_a_required_save_that_is_not_committed() -> None:
    with pytest.raises(AssertionError, match="no required save was skipped"):
        [_simulate(newest_point, Random(seed), blocks_points=False) for seed in range(2000)]
