"""Start of attempts: take-over, refusals, budgets, and liveness."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import (
    AttemptRecord,
    CommitRecord,
    EndedRecord,
    Heartbeat,
    RunRecord,
    decode,
    encode,
)
from prefect_elastic_train.runs import heartbeat, layout
from prefect_elastic_train.runs.attempts import begin_attempt, check_run_is_free, end_attempt
from prefect_elastic_train.runs.heartbeat import HeartbeatWriter, host_id, is_alive, process_start
from prefect_elastic_train.runs.repair import remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import wait_for
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN, SteppedStore, Training, begin, claim, tear

OTHERS_RESUME = claim(OTHER_FLOW_RUN, resume=True)


def _ended(store: LocalRunStore, attempt: int) -> EndedRecord:
    return EndedRecord.model_validate_json(store.read(layout.ended_name(attempt)) or b"")


def _run(store: LocalRunStore) -> RunRecord:
    return RunRecord.model_validate_json(store.read(layout.RUN) or b"")


def _refused(store: LocalRunStore, wanted: Any, *words: str, **arguments: Any) -> AttemptFailedError:
    """Have an attempt refused for good, with those words."""
    with pytest.raises(AttemptFailedError) as refused:
        begin_attempt(store, wanted, **arguments)
    for word in words:
        assert word in str(refused.value)
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


def _beat(store: LocalRunStore, beat: int = 1, interval: float = 5.0) -> None:
    store.replace(layout.HEARTBEAT, encode(Heartbeat(attempt=1, beat=beat, interval_seconds=interval)))


def test_the_first_attempt_is_number_one_and_starts_from_the_beginning(store: LocalRunStore) -> None:
    assert check_run_is_free(RunDirectory(store), claim().request) is None
    assert (store.names(""), store.folders()) == ([], []), "a look has written something"
    begun = begin(store, claim(config={"lr": 0.1}))
    assert (begun.attempt, begun.counted, begun.point.base, begun.point.checkpoint) == (1, 1, None, "")
    assert begun.notes == []
    run = _run(store)
    assert (run.name, run.creator.flow_run_id, run.versions["ray"]) == ("mnist", FLOW_RUN, version("ray"))
    assert RunDirectory(store).owner == claim().request.owner


def test_the_same_flow_run_takes_over_and_resumes(store: LocalRunStore) -> None:
    training = Training(store, begin(store).attempt)
    training.report("a")
    training.report("b")
    begun = begin(store)
    assert (begun.attempt, begun.point.base, begun.point.checkpoint, begun.notes) == (2, (1, 2), "b", [])
    assert begun.point.snapshot == training.snapshot
    record = RunDirectory(store).attempt_record(2)
    assert record is not None
    assert (record.base, record.confirmed, record.run_id) == ((1, 2), True, _run(store).id)
    assert (_ended(store, 1).outcome, _ended(store, 1).message) == ("driver_lost", "taken over by attempt 2")


def test_a_finished_run_gives_its_result_and_begins_nothing(store: LocalRunStore) -> None:
    begin(store)
    assert check_run_is_free(RunDirectory(store), claim().request) is None
    end_attempt(store, 1, "completed", result={"goodput": 0.5})
    end_attempt(store, 1, "driver_lost", "the first record of an end stays")
    for finished in (check_run_is_free(RunDirectory(store), claim().request), begin_attempt(store, claim())):
        assert isinstance(finished, EndedRecord)
        assert (finished.attempt, finished.result) == (1, {"goodput": 0.5})
    assert RunDirectory(store).attempt_numbers == [1]


@pytest.mark.parametrize("state", ["training", "completed", "claimed"])
def test_a_run_of_another_flow_run_is_refused_with_its_owner_and_what_to_do(store: LocalRunStore, state: str) -> None:
    if state == "claimed":
        owner, marks = claim().request.owner, claim().request.fingerprint
        store.create(layout.RUN, encode(RunRecord(name="mnist", creator=owner, fingerprint=marks)))
    else:
        begin(store)
    if state == "completed":
        end_attempt(store, 1, "completed")
    before = RunDirectory(store).attempt_numbers
    words = ("'mnist'", store.uri, "'eager-otter'", "'nightly'", FLOW_RUN, "run_name", "resume=True")
    assert _refused(store, claim(OTHER_FLOW_RUN), *words).outcome is Outcome.INVALID
    with pytest.raises(AttemptFailedError, match="belongs to flow run 'eager-otter'"):
        check_run_is_free(RunDirectory(store), claim(OTHER_FLOW_RUN).request)
    assert RunDirectory(store).attempt_numbers == before
    # A heart that stands still; one of a run that has ended is not looked at.
    _beat(store, interval=20 if state == "completed" else 0.05)
    assert begin(store, OTHERS_RESUME).counted == 1


@pytest.mark.parametrize("torn", [False, True])
def test_resume_is_refused_while_the_heart_of_the_run_beats(store: LocalRunStore, torn: bool) -> None:
    # Of a torn record nobody knows whose process it was, so that of the run's creator says nothing.
    begin(store, claim(host=host_id() if torn else "gpu-7/boot", pid=4711))
    if torn:
        tear(store, layout.attempt_name(1))
    heart = HeartbeatWriter(store, 1, interval_seconds=0.3)
    wait_for(lambda: store.read(layout.HEARTBEAT), 5, "the first beat")
    words = ("is being trained right now", "'eager-otter'", FLOW_RUN, "cancel", *([] if torn else ["gpu-7, pid 4711"]))
    assert _refused(store, OTHERS_RESUME, *words).outcome is Outcome.INVALID
    heart.stop()
    assert RunDirectory(store).attempt_numbers == [1]


def test_a_heart_counts_as_still_after_its_third_missed_beat(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    _beat(store, interval=10.0)
    now, beats_at = [0.0], [25.0, 45.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if beats_at and now[0] >= beats_at[0]:
            _beat(store, int(beats_at.pop(0)), interval=10.0)

    monkeypatch.setattr(heartbeat.time, "sleep", sleep)
    assert is_alive(store, None), "it beat after two and a half intervals"
    beats_at[:] = [now[0] + 35.0]
    assert not is_alive(store, None)
    assert beats_at, "it was watched beyond the third"


def test_on_its_own_machine_a_driver_is_alive_while_its_process_is(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, _claim_of(old_driver))
    boot_time = psutil._psplatform.boot_time  # the kernel's answer moves when the clock is set
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time() + 3600)
    _refused(store, OTHERS_RESUME, f"pid {old_driver.pid}")
    with pytest.raises(AttemptFailedError, match="is being trained right now by"):
        check_run_is_free(RunDirectory(store), OTHERS_RESUME.request)  # before it starts or joins a cluster
    assert old_driver.poll() is None, "another flow run's driver was ended"
    owner = _claim_of(old_driver).request.owner
    assert is_alive(store, owner)
    assert not is_alive(store, owner.model_copy(update={"process_started_at": 1.0})), "another process of the same id"
    old_driver.kill()
    wait_for(lambda: psutil.Process(old_driver.pid).status() == psutil.STATUS_ZOMBIE, 5, "its death")
    assert not is_alive(store, owner)


def test_the_old_driver_of_the_same_flow_run_is_ended_unless_its_attempt_has(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    wanted = _claim_of(old_driver, max_attempts_without_progress=9)
    begin(store, wanted)
    end_attempt(store, 1, "driver_lost")
    begin(store, wanted)
    assert old_driver.poll() is None
    assert begin(store, claim(max_attempts_without_progress=9)).notes == [
        f"the driver of attempt 2 (pid {old_driver.pid}) was still alive and was killed"
    ]
    assert not psutil.pid_exists(old_driver.pid)


def test_a_process_gives_way_to_another_one_of_its_flow_run_that_has_taken_over(store: LocalRunStore) -> None:
    def of(supervisor: str) -> Any:
        wanted = claim().request
        owner = wanted.owner.model_copy(update={"supervisor": supervisor})
        return replace(claim(max_attempts_without_progress=9, driver_restarts=9), request=replace(wanted, owner=owner))

    for supervisor in ("old", "old", "new"):
        begin(store, of(supervisor))
    assert _refused(store, of("old"), "another process of the same flow run").outcome is Outcome.SUPERSEDED
    assert begin(store, of("new")).attempt == 4


def test_a_second_training_in_one_execution_of_a_flow_run_is_refused_and_a_later_execution_takes_over(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    begin(store, _claim_of(old_driver, supervisor="one", execution=1))
    beside = claim(supervisor="two", execution=1)
    refused = _refused(store, beside, "another training of the same flow run", "need a run_name each")
    assert refused.outcome is Outcome.INVALID
    assert old_driver.poll() is None
    assert begin(store, claim(supervisor="three", execution=2)).attempt == 2
    assert not psutil.pid_exists(old_driver.pid), "its driver was ended"


def test_a_training_whose_run_was_taken_over_between_two_of_its_drivers_fails_if_its_own_flow_run_did_that(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    first = _claim_of(old_driver, supervisor="one", execution=1)
    begin(store, first)
    old_driver.kill()
    old_driver.wait()
    assert begin(store, claim(supervisor="two", execution=1)).attempt == 2
    assert _refused(store, first, "another training of the same flow run").outcome is Outcome.INVALID


def test_a_run_that_two_flow_runs_create_at_once_is_one_of_theirs(store: LocalRunStore) -> None:
    gate = threading.Barrier(6)

    def start(number: int) -> int | str:
        gate.wait()
        try:
            return begin(store, claim(f"flow-run-{number}", flow_run_name=f"run-{number}")).attempt
        except AttemptFailedError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(start, range(6)))
    [winner] = [number for number, result in enumerate(results) if result == 1]
    assert all(f"flow run 'run-{winner}'" in str(result) for result in results if result != 1)
    assert RunDirectory(store).attempt_numbers == [1]


@pytest.mark.parametrize("is_finished", [False, True])
def test_another_configuration_is_refused_with_the_differences(store: LocalRunStore, is_finished: bool) -> None:
    begin(store, claim(config={"lr": 0.1}))
    if is_finished:
        end_attempt(store, 1, "completed")
    # Who names the run means it, unless the run has nothing left to do.
    wanted = claim(config={"lr": 0.2, "wd": 0}, named=is_finished)
    words = ("train_loop_config['lr'] changed; train_loop_config['wd'] was added", "run_name='mnist'")
    error = _refused(store, wanted, *words)
    assert error.outcome is Outcome.INVALID
    assert "0.2" not in str(error)


@pytest.mark.parametrize(
    "wanted", [claim(config={"lr": 0.2}, named=True), claim(OTHER_FLOW_RUN, config={"lr": 0.2}, resume=True)]
)
def test_a_run_named_by_its_user_goes_on_with_another_config_and_says_so(store: LocalRunStore, wanted: Any) -> None:
    begin(store, claim(config={"lr": 0.1}))
    begun = begin(store, wanted)
    assert begun.notes == ["the run has another configuration than before: train_loop_config['lr'] changed"]


@pytest.mark.parametrize(("config", "trains_on"), [({"epochs": 3}, False), ({"epochs": 9}, True)])
def test_a_retry_after_the_success_of_a_resumed_run_trains_on_only_with_another_config(
    store: LocalRunStore, config: dict[str, Any], trains_on: bool
) -> None:
    end_attempt(store, begin(store).attempt, "user_error")
    wanted = claim(OTHER_FLOW_RUN, config={"epochs": 3}, resume=True)
    end_attempt(store, begin(store, wanted).attempt, "completed")
    again = claim(OTHER_FLOW_RUN, config=config, resume=True)
    assert (check_run_is_free(RunDirectory(store), again.request) is None) is trains_on
    assert isinstance(begin_attempt(store, again), EndedRecord) is not trains_on


def test_the_result_of_another_configuration_is_not_given_back(store: LocalRunStore) -> None:
    cats, dogs = ({"data": Path(f"/data/{name}")} for name in ("cats", "dogs"))
    begin(store, claim(config=cats, named=True))
    begin(store, claim(config=dogs, named=True))
    end_attempt(store, 2, "completed", result={"trained on": "dogs"})
    assert check_run_is_free(RunDirectory(store), claim(config=dogs, named=True).request) is not None, (
        "it is that of this one"
    )
    for named in (True, False):
        _refused(store, claim(config=cats, named=named), "train_loop_config['data'] changed")


def test_a_value_that_cannot_be_compared_is_named_once_in_each_process_and_refuses_nothing(
    store: LocalRunStore,
) -> None:
    def wanted(supervisor: str) -> Any:
        config = {"model": object(), "lr": 0.1}
        return claim(config=config, supervisor=supervisor, max_attempts_without_progress=9)

    assert begin(store, wanted("1")).notes == []
    assert begin(store, wanted("1")).notes == [], "a task retry passes the same object"
    [note] = begin(store, wanted("2")).notes
    assert note.startswith("train_loop_config['model'] (builtins:object) cannot be compared")


def test_a_run_that_had_begun_is_not_begun_again_where_its_storage_is_missing(tmp_path: Path) -> None:
    mount = tmp_path / "mnt" / "shared"
    there = LocalRunStore(str(mount / "runs" / "mnist"))
    begin(there, claim(begun=False))
    begin(there, claim(begun=True))
    mount.rename(tmp_path / "unmounted")
    error = _refused(there, claim(begun=True), there.uri, "not mounted", "retry the flow run", "another run_name")
    assert (error.outcome, mount.exists()) == (Outcome.STORAGE_ERROR, False)
    (tmp_path / "unmounted").rename(mount)
    assert begin(there, claim(begun=True, max_attempts_without_progress=9)).attempt == 3


def test_a_flow_run_whose_first_execution_died_before_an_attempt_began_begins_one(store: LocalRunStore) -> None:
    begun = begin(store, claim(resumed=True, begun=False))
    assert begun.attempt == 1
    [note] = begun.notes
    assert note.startswith("the flow run ran before, and there was no run 'mnist' in ")


def test_what_the_user_has_mistaken_is_said(store: LocalRunStore) -> None:
    note = "resume=True, but there was no run 'mnist' in this storage: it is a new one"
    assert begin(store, claim(resume=True)).notes == [note]
    assert _refused(store, claim(resume_from="base"), "did not start from 'base'").outcome is Outcome.INVALID


def test_a_run_that_lost_its_record_keeps_its_creator_whoever_asks_for_it(store: LocalRunStore) -> None:
    begin(store, claim(config={"lr": 0.1}))
    run_id = _run(store).id
    tear(store, layout.RUN)
    _refused(store, claim(OTHER_FLOW_RUN, config={"lr": 0.2}), "'eager-otter'")
    assert begin(store, claim(config={"lr": 0.1})).notes == ["run.json was torn or missing and was rewritten"]
    assert (_run(store).creator.flow_run_id, _run(store).id) == (FLOW_RUN, run_id)


def test_a_torn_attempt_record_keeps_its_number_commits_and_owner(store: LocalRunStore) -> None:
    Training(store, begin(store, claim(flow_run_name="calm-heron")).attempt).report("a")
    store.replace(layout.attempt_name(1), b"")
    _refused(store, claim(OTHER_FLOW_RUN), "'calm-heron'")
    begun = begin(store)
    assert (begun.attempt, begun.point.checkpoint) == (2, "a")


def test_a_run_whose_owner_cannot_be_read_any_more_is_taken_over_only_with_resume(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    for name in (layout.attempt_name(1), layout.RUN):
        store.replace(name, b"")
    for wanted in (claim(), claim(OTHER_FLOW_RUN)):
        error = _refused(store, wanted, "a flow run whose name cannot be read any more")
        assert error.outcome is Outcome.INVALID
    assert begin(store, claim(resume=True)).point.checkpoint == "a"


def test_restarts_are_counted_over_all_resumes_of_the_flow_run(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=2, max_attempts_without_progress=100)
    for number in (1, 2, 3):
        begun = begin(store, wanted)
        assert begun.counted == number
        Training(store, begun.attempt).report(f"checkpoint-{number}")
    error = _refused(store, wanted, "3 attempts began, 1 + driver_restarts (2) are allowed")
    assert (error.outcome, error.final, error.retryable, error.attempt) == (Outcome.DRIVER_LOST, True, False, 3)
    assert (_ended(store, 3).outcome, bool(_ended(store, 3).verdict)) == ("driver_lost", True)
    assert RunDirectory(store).attempt_numbers == [1, 2, 3]
    assert begin(store, claim(OTHER_FLOW_RUN, resume=True, driver_restarts=0)).counted == 1, "another flow run's count"


@pytest.mark.parametrize(("forgiving", "left"), [(0, [1, 0, -1]), (60, [1, 0, 0, 0]), (150, [1, 0, -1])])
def test_an_attempt_is_forgiven_once_others_have_trained_on_and_committed_for_long_enough(
    store: LocalRunStore, forgiving: float, left: list[int]
) -> None:
    wanted = claim(driver_restarts=1, forgive_after_seconds=forgiving)
    for number, restarts_left in enumerate(left, 1):
        if restarts_left < 0:
            _refused(store, wanted, "2 attempts began, 1 + driver_restarts (1) are allowed")
            break
        begun = begin(store, wanted)
        assert begun.counted == 2 - restarts_left, "an attempt that later ones make up for no longer counts"
        Training(store, number).report(f"checkpoint-{number}")
        commit = CommitRecord.model_validate_json(store.read(layout.commit_name(number, 1)) or b"")
        store.replace(layout.commit_name(number, 1), encode(commit.model_copy(update={"trained": 100.0})))
        if number > 1:
            end_attempt(store, number, Outcome.DRIVER_LOST.value, "killed")


def test_a_driver_and_a_worker_group_start_with_as_many_requests_however_many_attempts_there_were(
    store: LocalRunStore,
) -> None:
    requests: list[str] = []
    counting = SteppedStore(store.path, requests.append)
    needed = []
    for number in range(1, 101):
        requests.clear()
        begun = begin(counting, claim(supervisor=f"resume-{number}"))  # the flow run was resumed each time
        Training(store, begun.attempt).upload(physical_name("half", begun.attempt))  # a worker dies in an upload
        assert remove_leftovers(counting, begun.attempt)
        needed.append(len(requests))
        Training(store, begun.attempt).report(name := physical_name("epoch", begun.attempt, report=number))
        commit = RunDirectory(store).newest_commit
        assert commit is not None
        assert name in commit.manifest
        store.replace(layout.commit_name(begun.attempt, 1), encode(commit.model_copy(update={"trained": 7200.0})))
        end_attempt(store, begun.attempt, Outcome.DRIVER_LOST.value)
    assert needed[99] <= needed[19] < 70


def test_attempts_in_a_row_without_a_checkpoint_end_the_run(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=100, max_attempts_without_progress=2)
    for number in range(6):  # a checkpoint ends the row
        begun = begin(store, wanted)
        if number % 2:
            Training(store, begun.attempt).report(f"checkpoint-{number}")
    begin(store, wanted)
    begin(store, wanted)
    words = ("2 attempts in a row ended without a new checkpoint", "max_attempts_without_progress (now 2)")
    error = _refused(store, wanted, *words, "The last of them ended as driver_lost")
    assert (error.outcome, error.final) == (Outcome.NO_PROGRESS, True)
    assert _ended(store, 8).outcome == "driver_lost"
    assert str(error).startswith(_ended(store, 8).verdict)


def test_checkpoints_of_a_cancelled_attempt_are_progress(store: LocalRunStore) -> None:
    wanted = claim(max_attempts_without_progress=2, driver_restarts=100)
    begin(store, wanted)
    Training(store, begin(store, wanted).attempt).report("a")
    end_attempt(store, 2, "cancelled")
    assert [begin(store, wanted).counted for _ in range(2)] == [2, 3]
    _refused(store, wanted, "2 attempts in a row")


@pytest.mark.parametrize("wanted", [{"driver_restarts": 1}, {"max_attempts_without_progress": 2}])
def test_a_persons_retry_after_a_verdict_starts_with_fresh_budgets(
    store: LocalRunStore, wanted: dict[str, int]
) -> None:
    for _ in range(2):
        assert [begin(store, claim(**wanted)).counted for _ in range(2)] == [1, 2]
        assert _refused(store, claim(**wanted)).final


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [
        *[(outcome, 1) for outcome in ("user_error", "storage_error", "cancelled", "timed_out", "from_the_future")],
        *[(outcome, 2) for outcome in ("driver_lost", "cluster_lost")],
    ],
)
def test_only_an_end_that_a_restart_follows_counts(store: LocalRunStore, outcome: str, counted: int) -> None:
    begin(store)
    end_attempt(store, 1, outcome)
    assert begin(store).counted == counted


def test_an_attempt_that_gave_way_before_it_did_anything_does_not_count(store: LocalRunStore) -> None:
    Training(store, begin(store).attempt).report("a")
    gave_way = AttemptRecord(attempt=2, owner=claim().request.owner, confirmed=False, base=(1, 1))
    store.create(layout.attempt_name(2), encode(gave_way))
    end_attempt(store, 2, "superseded")
    begun = begin(store, claim(driver_restarts=1))
    assert (begun.attempt, begun.counted) == (3, 2)


def test_a_heart_goes_on_after_errors_of_the_storage_and_ends_when_it_is_fenced_off(store: LocalRunStore) -> None:
    class Failing(LocalRunStore):
        fails = False

        def replace(self, name: str, data: bytes) -> None:
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
            super().replace(name, data)

    def beat() -> int:
        found = decode(Heartbeat, store.read(layout.HEARTBEAT))
        return found.beat if found is not None else 0

    begin(store)
    failing = Failing(store.path)
    fenced_off = threading.Event()
    writer = HeartbeatWriter(failing, 1, fenced_off.set, 0.02)
    wait_for(lambda: beat() >= 3, 5, "three beats")
    failing.fails = True
    assert not writer._stopped.wait(0.1)
    failing.fails, before = False, beat()
    wait_for(lambda: beat() > before, 5, "a beat after the errors")
    begin(store)
    assert fenced_off.wait(5)
    last = store.read(layout.HEARTBEAT)
    assert not writer._stopped.wait(0.1)
    assert store.read(layout.HEARTBEAT) == last, "it beats in its successor's place"
    writer.stop()
