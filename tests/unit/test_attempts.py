"""Beginning attempts: take-over, refusals, budgets."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import psutil
import pytest

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, EndedRecord, Heartbeat, RunRecord, decode, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import (
    Finished,
    begin_attempt,
    end_attempt,
    host_id,
    is_alive,
    peek,
    process_start,
)
from prefect_elastic_train.runs.commits import all_attempts
from prefect_elastic_train.runs.heartbeat import HeartbeatWriter
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import wait_for
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN, Training, begin, claim, tear


def _ended(store: LocalRunStore, attempt: int) -> EndedRecord | None:
    return decode(EndedRecord, store.read(layout.ended_name(attempt)))


def _refused(store: LocalRunStore, wanted: Any, **arguments: Any) -> AttemptFailedError:
    with pytest.raises(AttemptFailedError) as refused:
        begin_attempt(store, wanted, **arguments)
    return refused.value


@pytest.fixture
def old_driver() -> Iterator[subprocess.Popen[bytes]]:
    """A living process on this machine that does not heed polite signals."""
    ignore = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", ignore])
    yield process
    process.kill()
    process.wait()


def _claim_of(process: subprocess.Popen[bytes], **arguments: Any) -> Any:
    return claim(host=host_id(), pid=process.pid, process_started_at=process_start(process.pid), **arguments)


def test_a_refusal_says_since_when_and_where_the_attempt_runs(store: LocalRunStore) -> None:
    begin(store, claim(host="gpu-7/boot/1"))
    store.replace(layout.HEARTBEAT, encode(Heartbeat(attempt=1, beat=3, interval_seconds=5, at=time.time() - 12)))
    begun = r"attempt 1, begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC on gpu-7,"
    error = str(_refused(store, claim(OTHER_FLOW_RUN)))
    assert re.search(rf"{begun} may still be running \(last sign of life 12 s ago\)\.", error), error


def test_the_first_attempt_is_number_one_and_starts_from_the_beginning(store: LocalRunStore) -> None:
    begun = begin(store, claim(config={"lr": 0.1}))
    assert (begun.attempt, begun.counted, begun.without_progress) == (1, 1, 0)
    assert begun.point.base is None
    assert begun.point.checkpoint == ""
    assert begun.notes == []
    run = decode(RunRecord, store.read(layout.RUN))
    assert run is not None
    assert (run.name, run.creator.flow_run_id, run.versions["ray"]) == ("mnist", FLOW_RUN, version("ray"))
    record = decode(AttemptRecord, store.read(layout.attempt_name(1)))
    assert record is not None
    assert record.owner == claim().request.owner


def test_the_same_flow_run_takes_over_and_resumes(store: LocalRunStore) -> None:
    training = Training(store, begin(store).attempt)
    training.report("a")
    training.report("b")
    begun = begin(store)
    assert begun.attempt == 2
    assert begun.point.base == (1, 2)
    assert begun.point.checkpoint == "b"
    assert begun.point.snapshot == training.snapshot
    assert begun.notes == []
    record = decode(AttemptRecord, store.read(layout.attempt_name(2)))
    assert record is not None
    assert record.base == (1, 2)
    ended = _ended(store, 1)
    assert ended is not None
    assert (ended.outcome, ended.message) == ("driver_lost", "taken over by attempt 2")


def test_a_finished_run_gives_its_result_and_begins_nothing(store: LocalRunStore) -> None:
    begin(store)
    assert peek(store, claim()) is None
    end_attempt(store, 1, "completed", result={"run_name": "mnist", "goodput": 0.5})
    for finished in (peek(store, claim()), begin_attempt(store, claim())):
        assert isinstance(finished, Finished)
        assert finished.attempt == 1
        assert finished.ended.result == {"run_name": "mnist", "goodput": 0.5}
    assert all_attempts(store) == [1]


def test_peeking_at_a_new_run_finds_nothing_and_writes_nothing(store: LocalRunStore) -> None:
    assert peek(store, claim()) is None
    assert store.names("") == []
    assert store.folders() == []


@pytest.mark.parametrize("ended", [None, "completed", "user_error"])
def test_a_run_of_another_flow_run_is_refused_with_its_owner_and_what_to_do(
    store: LocalRunStore, ended: str | None
) -> None:
    begin(store)
    if ended:
        end_attempt(store, 1, ended)
    wanted = claim(OTHER_FLOW_RUN)
    errors = [_refused(store, wanted)]
    with pytest.raises(AttemptFailedError) as refused:
        peek(store, wanted)
    errors.append(refused.value)
    for error in errors:
        assert error.outcome is Outcome.INVALID
        for words in ("'mnist'", store.uri, "'eager-otter'", "'nightly'", FLOW_RUN, "run_name", "resume=True"):
            assert words in str(error)
        assert (f"ended as {ended}" if ended else "may still be running") in str(error)
    assert all_attempts(store) == [1]


def test_a_run_that_another_flow_run_created_a_moment_ago_is_refused(store: LocalRunStore) -> None:
    owner = claim().request.owner
    record = RunRecord(name="mnist", creator=owner, fingerprint=claim().request.fingerprint)
    store.create(layout.RUN, encode(record))
    error = _refused(store, claim(OTHER_FLOW_RUN))
    assert FLOW_RUN in str(error)
    assert "has not begun an attempt yet" in str(error)
    assert begin(store, claim(OTHER_FLOW_RUN, resume=True)).attempt == 1


def test_resume_takes_over_an_ended_run_at_once(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    end_attempt(store, 1, "user_error")
    begun = begin(store, claim(OTHER_FLOW_RUN, resume=True), observe_seconds=60)
    assert begun.point.checkpoint == "a"
    assert begun.counted == 1


def test_resume_takes_over_a_run_that_shows_no_sign_of_life(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    store.replace(layout.HEARTBEAT, encode(Heartbeat(attempt=1, beat=7, interval_seconds=0.05)))
    begun = begin(store, claim(OTHER_FLOW_RUN, resume=True))
    assert begun.point.checkpoint == "a"


def test_resume_is_refused_while_the_heart_of_the_run_beats(store: LocalRunStore) -> None:
    begin(store, claim(host="gpu-7/boot", pid=4711))
    heart = HeartbeatWriter(store, 1, interval_seconds=0.05)
    heart.start()
    try:
        error = _refused(store, claim(OTHER_FLOW_RUN, resume=True), observe_seconds=5)
    finally:
        heart.stop()
    assert error.outcome is Outcome.INVALID
    for words in ("is being trained right now", "'eager-otter'", FLOW_RUN, "gpu-7", "pid 4711", "cancel"):
        assert words in str(error)
    assert "boot" not in str(error)
    assert all_attempts(store) == [1]


def test_on_its_own_machine_a_driver_is_alive_while_its_process_is(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    begin(store, _claim_of(old_driver))
    record = decode(AttemptRecord, store.read(layout.attempt_name(1)))
    assert record is not None
    assert is_alive(store, record)
    error = _refused(store, claim(OTHER_FLOW_RUN, resume=True))
    assert f"pid {old_driver.pid}" in str(error)
    with pytest.raises(AttemptFailedError, match="is being trained right now by"):
        peek(store, claim(OTHER_FLOW_RUN, resume=True))  # before it starts or joins a cluster
    assert old_driver.poll() is None, "another flow run's driver was ended"
    old_driver.kill()
    wait_for(lambda: psutil.Process(old_driver.pid).status() == psutil.STATUS_ZOMBIE, 5, "its death")
    assert not is_alive(store, record)
    old_driver.wait()
    assert not is_alive(store, record)


def test_a_driver_lives_on_although_the_clock_is_set(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, _claim_of(old_driver))
    boot_time = psutil._psplatform.boot_time  # the kernel's answer moves with the clock
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time() + 3600)
    assert f"pid {old_driver.pid}" in str(_refused(store, claim(OTHER_FLOW_RUN, resume=True)))
    assert begin(store).notes == [f"the driver of attempt 1 (pid {old_driver.pid}) was still alive and was ended"]


def test_another_process_with_the_same_id_is_not_the_driver(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    begin(store, claim(host=host_id(), pid=old_driver.pid, process_started_at=1.0))
    record = decode(AttemptRecord, store.read(layout.attempt_name(1)))
    assert record is not None
    assert not is_alive(store, record)
    begun = begin(store)
    assert begun.notes == []
    assert old_driver.poll() is None


def test_the_old_driver_of_the_same_flow_run_is_ended_and_told(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    begin(store, _claim_of(old_driver))
    begun = begin(store)
    assert not psutil.pid_exists(old_driver.pid)
    assert begun.notes == [f"the driver of attempt 1 (pid {old_driver.pid}) was still alive and was ended"]


def test_a_driver_that_has_ended_its_attempt_is_left_alone(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    begin(store, _claim_of(old_driver))
    end_attempt(store, 1, "driver_lost")
    begin(store)
    assert old_driver.poll() is None


def test_a_driver_does_not_end_itself(store: LocalRunStore) -> None:
    own = claim(host=host_id(), pid=os.getpid(), process_started_at=process_start(os.getpid()))
    assert begin(store, own).attempt == 1
    assert begin(store, own).attempt == 2


def test_the_host_is_where_a_process_id_means_one_process() -> None:
    name, boot, processes = host_id().split("/")
    assert name == socket.gethostname()
    assert len(boot) == 36
    assert processes == str(os.stat("/proc/self/ns/pid").st_ino)


def test_restarts_are_counted_over_all_resumes_of_the_flow_run(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=2, max_attempts_without_progress=100)
    for number in (1, 2, 3):
        begun = begin(store, wanted)
        assert begun.counted == number
        Training(store, begun.attempt).report(f"checkpoint-{number}")
    error = _refused(store, wanted)
    assert error.outcome is Outcome.DRIVER_LOST
    assert error.final
    assert not error.retryable
    assert error.attempt == 3
    assert "3 attempts began, 1 + driver_restarts (2) are allowed" in str(error)
    verdict = _ended(store, 3)
    assert verdict is not None
    assert verdict.final
    assert verdict.outcome == "driver_lost"
    assert all_attempts(store) == [1, 2, 3]


def test_no_restarts_allow_one_attempt(store: LocalRunStore) -> None:
    begin(store, claim(driver_restarts=0))
    assert _refused(store, claim(driver_restarts=0)).final


def test_attempts_in_a_row_without_a_checkpoint_end_the_run(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=100, max_attempts_without_progress=2)
    Training(store, begin(store, wanted).attempt).report("a")
    assert begin(store, wanted).without_progress == 0
    assert begin(store, wanted).without_progress == 1
    error = _refused(store, wanted)
    assert error.outcome is Outcome.NO_PROGRESS
    assert error.final
    assert "2 attempts in a row ended without a new checkpoint" in str(error)
    assert "max_attempts_without_progress (now 2)" in str(error)
    assert "The last of them ended as driver_lost" in str(error), "its cause is told"
    last = _ended(store, 3)
    assert last is not None
    assert (last.outcome, last.final) == ("driver_lost", True), "and kept"
    assert last.verdict in str(error)


@pytest.mark.parametrize(("config", "trains_on"), [({"epochs": 3}, False), ({"epochs": 9}, True)])
def test_a_retry_after_the_success_of_a_resumed_run_trains_on_only_with_another_config(
    store: LocalRunStore, config: dict[str, Any], trains_on: bool
) -> None:
    first = begin(store)
    end_attempt(store, first.attempt, "user_error")
    wanted = claim(OTHER_FLOW_RUN, config={"epochs": 3}, resume=True)
    end_attempt(store, begin(store, wanted).attempt, "completed")
    again = claim(OTHER_FLOW_RUN, config=config, resume=True)
    assert (peek(store, again) is None) is trains_on
    assert isinstance(begin_attempt(store, again), Finished) is not trains_on


def test_resume_of_a_run_that_does_not_exist_says_that_it_is_a_new_one(store: LocalRunStore) -> None:
    assert begin(store, claim(resume=True)).notes == [
        "resume=True, but there was no run 'mnist' in this storage: it is a new one"
    ]


def test_a_number_whose_record_was_removed_is_not_used_again(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    store.delete(layout.attempt_name(1))
    again = begin(store)
    assert (again.attempt, again.point.checkpoint) == (2, "a")


def test_a_checkpoint_ends_the_row_of_attempts_without_one(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=100, max_attempts_without_progress=2)
    for number in range(6):
        begun = begin(store, wanted)
        if number % 2:
            Training(store, begun.attempt).report(f"checkpoint-{number}")
    assert begun.counted == 6


@pytest.mark.parametrize("wanted", [{"driver_restarts": 1}, {"max_attempts_without_progress": 2}])
def test_a_persons_retry_after_a_verdict_starts_with_fresh_budgets(
    store: LocalRunStore, wanted: dict[str, int]
) -> None:
    for _ in range(2):
        for number in (1, 2):
            begun = begin(store, claim(**wanted))
            assert (begun.counted, begun.without_progress) == (number, number - 1)
        assert _refused(store, claim(**wanted)).final


@pytest.mark.parametrize(
    "outcome", ["user_error", "storage_error", "cancelled", "timed_out", "invalid", "from_the_future"]
)
def test_an_end_that_no_restart_follows_starts_fresh_budgets(store: LocalRunStore, outcome: str) -> None:
    wanted = claim(driver_restarts=0)
    begin(store, wanted)
    end_attempt(store, 1, outcome)
    assert begin(store, wanted).counted == 1


@pytest.mark.parametrize("outcome", ["driver_lost", "cluster_lost"])
def test_an_end_that_a_restart_follows_counts(store: LocalRunStore, outcome: str) -> None:
    begin(store)
    end_attempt(store, 1, outcome)
    assert begin(store).counted == 2


def test_attempts_of_another_flow_run_do_not_count(store: LocalRunStore) -> None:
    for _ in range(2):
        begin(store)
    begun = begin(store, claim(OTHER_FLOW_RUN, resume=True, driver_restarts=0), observe_seconds=0)
    assert (begun.attempt, begun.counted, begun.without_progress) == (3, 1, 0)


def test_an_attempt_that_gave_way_before_it_did_anything_does_not_count(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    store.create(layout.attempt_name(2), encode(AttemptRecord(attempt=2, owner=claim().request.owner, base=(1, 1))))
    end_attempt(store, 2, "superseded", void=True)
    begun = begin(store, claim(driver_restarts=1))
    assert (begun.attempt, begun.counted) == (3, 2)


def test_a_run_that_two_flow_runs_create_at_once_is_one_of_theirs(store: LocalRunStore) -> None:
    gate = threading.Barrier(6)

    def start(number: int) -> int | AttemptFailedError:
        gate.wait()
        try:
            return begin(store, claim(f"flow-run-{number}", flow_run_name=f"run-{number}")).attempt
        except AttemptFailedError as error:
            return error

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(start, range(6)))
    winners = [number for number, result in enumerate(results) if result == 1]
    assert len(winners) == 1
    for number, result in enumerate(results):
        if number not in winners:
            assert isinstance(result, AttemptFailedError)
            assert result.outcome is Outcome.INVALID
            assert f"flow run 'run-{winners[0]}'" in str(result)
    assert all_attempts(store) == [1]


def test_drivers_of_one_flow_run_that_begin_at_once_get_different_numbers(store: LocalRunStore) -> None:
    gate = threading.Barrier(4)

    def start(_: int) -> int:
        gate.wait()
        return begin(store, claim(driver_restarts=100, max_attempts_without_progress=100)).attempt

    with ThreadPoolExecutor(4) as pool:
        attempts = list(pool.map(start, range(4)))
    assert len(set(attempts)) == 4
    assert max(attempts) == max(all_attempts(store))


def test_another_configuration_is_refused_with_the_differences(store: LocalRunStore) -> None:
    begin(store, claim(config={"lr": 0.1}))
    error = _refused(store, claim(config={"lr": 0.2, "wd": 0}))
    assert error.outcome is Outcome.INVALID
    assert "train_loop_config['lr'] changed; train_loop_config['wd'] was added" in str(error)
    assert "run_name='mnist'" in str(error)
    assert "0.2" not in str(error)


@pytest.mark.parametrize(
    "wanted",
    [
        claim(config={"lr": 0.2}, named=True),
        claim(config={"lr": 0.2}, resume=True),
        claim(OTHER_FLOW_RUN, config={"lr": 0.2}, resume=True, named=True),
    ],
)
def test_a_run_named_by_its_user_continues_with_another_configuration_and_says_so(
    store: LocalRunStore, wanted: Any
) -> None:
    begin(store, claim(config={"lr": 0.1}))
    begun = begin(store, wanted, observe_seconds=0)
    assert begun.notes == ["the run has another configuration than before: train_loop_config['lr'] changed"]


def test_a_run_that_did_not_start_from_the_other_is_refused(store: LocalRunStore) -> None:
    begin(store)
    error = _refused(store, claim(resume_from="base"))
    assert error.outcome is Outcome.INVALID
    assert "did not start from 'base'" in str(error)


def test_a_torn_run_record_is_written_anew_and_told(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    tear(store, layout.RUN)
    begun = begin(store)
    assert begun.point.checkpoint == "a"
    assert begun.notes == ["run.json was torn or missing and was written anew"]
    assert decode(RunRecord, store.read(layout.RUN)) is not None


def test_a_torn_attempt_record_keeps_its_number_and_its_commits(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    tear(store, layout.attempt_name(1))
    begun = begin(store)
    assert begun.attempt == 2
    assert begun.point.checkpoint == "a"


@pytest.fixture
def beating(store: LocalRunStore) -> Iterator[None]:
    """A heart that beats in the run directory."""
    heart = HeartbeatWriter(store, 1, interval_seconds=0.05)
    heart.start()
    yield
    heart.stop()


@pytest.mark.usefixtures("beating")
def test_a_living_run_whose_newest_record_is_torn_still_has_its_owner(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    store.replace(layout.attempt_name(1), b"")
    wanted = claim(OTHER_FLOW_RUN, named=True)
    errors = [_refused(store, wanted)]
    with pytest.raises(AttemptFailedError) as refused:
        peek(store, wanted)
    errors.append(refused.value)
    for error in errors:
        assert error.outcome is Outcome.INVALID
        for words in ("'eager-otter'", FLOW_RUN, "attempt 1 may still be running", "its record is torn", "resume=True"):
            assert words in str(error)
    error = _refused(store, claim(OTHER_FLOW_RUN, resume=True), observe_seconds=5)
    for words in ("is being trained right now", "'eager-otter'", FLOW_RUN, "its heart beats", "cancel"):
        assert words in str(error)
    assert all_attempts(store) == [1]


def test_a_dead_run_whose_newest_record_is_torn_is_taken_over_with_resume(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    store.replace(layout.attempt_name(1), b"")
    begun = begin(store, claim(OTHER_FLOW_RUN, resume=True), observe_seconds=0.1)
    assert (begun.attempt, begun.point.checkpoint) == (2, "a")


def test_a_torn_record_is_of_whoever_held_the_run_before(store: LocalRunStore) -> None:
    begin(store)
    begin(store, claim(OTHER_FLOW_RUN, resume=True, flow_run_name="calm-heron"), observe_seconds=0)
    begin(store, claim(OTHER_FLOW_RUN, resume=True, flow_run_name="calm-heron"))
    store.replace(layout.attempt_name(3), b"")
    assert "'calm-heron'" in str(_refused(store, claim()))
    end_attempt(store, 3, "completed", result={"run_name": "mnist"})
    assert isinstance(begin_attempt(store, claim(OTHER_FLOW_RUN)), Finished)


def test_a_run_whose_owner_cannot_be_read_any_more_is_taken_over_only_with_resume(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    for name in (layout.attempt_name(1), layout.RUN):
        store.replace(name, b"")
    for wanted in (claim(), claim(OTHER_FLOW_RUN)):
        error = _refused(store, wanted)
        assert error.outcome is Outcome.INVALID
        assert "a flow run whose name cannot be read any more" in str(error)
    assert begin(store, claim(resume=True), observe_seconds=0.1).point.checkpoint == "a"


def test_a_flow_run_that_is_refused_does_not_become_the_creator_of_a_run_that_lost_its_record(
    store: LocalRunStore,
) -> None:
    begin(store, claim(config={"lr": 0.1}))
    tear(store, layout.RUN)
    _refused(store, claim(OTHER_FLOW_RUN, config={"lr": 0.2}))
    begun = begin(store, claim(config={"lr": 0.1}))
    assert begun.notes == []
    run = decode(RunRecord, store.read(layout.RUN))
    assert run is not None
    assert run.creator.flow_run_id == FLOW_RUN


def test_checkpoints_of_a_cancelled_attempt_are_progress(store: LocalRunStore) -> None:
    wanted = claim(max_attempts_without_progress=2, driver_restarts=100)
    begin(store, wanted)
    end_attempt(store, 1, "driver_lost")
    second = Training(store, begin(store, wanted).attempt)
    for number in range(3):
        second.report(f"epoch-{number}")
    end_attempt(store, 2, "cancelled")
    begin(store, wanted)
    end_attempt(store, 3, "driver_lost")
    begun = begin(store, wanted)
    assert (begun.counted, begun.without_progress) == (3, 1)
    assert "2 attempts in a row" in str(_refused(store, wanted))


def test_the_first_record_of_an_end_stays(store: LocalRunStore) -> None:
    end_attempt(store, 1, "user_error", "first")
    end_attempt(store, 1, "driver_lost", "second")
    ended = _ended(store, 1)
    assert ended is not None
    assert (ended.outcome, ended.message) == ("user_error", "first")


def test_the_seed_is_planted_in_an_empty_run_only(store: LocalRunStore) -> None:
    planted = []
    begin(store, seed=lambda: planted.append("first"))
    Training(store, 1).report("a")
    begin(store, seed=lambda: planted.append("second"))
    assert planted == ["first"]


class Heart:
    """The heart of an attempt, and a run directory whose storage fails when it is told to."""

    def __init__(self, store: LocalRunStore, attempt: int) -> None:
        self.fails = False
        self.fenced_off: list[int] = []
        heart = self

        class Failing(LocalRunStore):
            def replace(self, name: str, data: bytes) -> None:
                if heart.fails:
                    raise OSError(errno.EIO, "Input/output error")
                super().replace(name, data)

        self._store = store
        self.writer = HeartbeatWriter(Failing(store.path), attempt, lambda: self.fenced_off.append(1), 0.02)
        self.writer.start()

    @property
    def beat(self) -> int:
        """Number of the last beat."""
        beat = decode(Heartbeat, self._store.read(layout.HEARTBEAT))
        return beat.beat if beat is not None else 0


def test_a_heart_beats_at_its_interval_and_stops_when_told(store: LocalRunStore) -> None:
    heart = Heart(store, 3)
    wait_for(lambda: heart.beat >= 3, 5, "three beats")
    heart.writer.stop()
    last = store.read(layout.HEARTBEAT)
    beat = decode(Heartbeat, last)
    assert beat is not None
    assert (beat.attempt, beat.interval_seconds) == (3, 0.02)
    time.sleep(0.1)
    assert store.read(layout.HEARTBEAT) == last


def test_a_heart_goes_on_after_errors_of_the_storage_and_ends_when_it_is_fenced_off(store: LocalRunStore) -> None:
    begin(store)
    heart = Heart(store, 1)
    wait_for(lambda: heart.beat, 5, "a beat")
    heart.fails = True
    time.sleep(0.1)
    heart.fails, before = False, heart.beat
    wait_for(lambda: heart.beat > before, 5, "a beat after the errors")
    begin(store)
    wait_for(lambda: heart.fenced_off, 5, "the end")
    last = store.read(layout.HEARTBEAT)
    time.sleep(0.1)
    assert (heart.fenced_off, store.read(layout.HEARTBEAT)) == ([1], last), "it beats in its successor's place"
    heart.writer.stop()


@pytest.mark.parametrize(("misses", "is_taken"), [(2.5, False), (4.5, True)])
def test_a_heart_counts_as_still_after_its_third_missed_beat(
    store: LocalRunStore, misses: float, is_taken: bool
) -> None:
    begin(store)
    interval = 0.4
    beat = Heartbeat(attempt=1, beat=1, interval_seconds=interval)
    store.replace(layout.HEARTBEAT, encode(beat))
    late = threading.Timer(
        misses * interval, lambda: store.replace(layout.HEARTBEAT, encode(beat.model_copy(update={"beat": 2})))
    )
    late.start()
    wanted = claim(OTHER_FLOW_RUN, resume=True)
    if is_taken:
        assert begin(store, wanted).attempt == 2
    else:
        assert "is being trained right now" in str(_refused(store, wanted))
    late.join()
