"""Start of attempts: take-over, refusals, budgets, and liveness."""

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, EndedRecord, Heartbeat, RunRecord, encode
from prefect_elastic_train.runs import attempts, heartbeat, layout
from prefect_elastic_train.runs.attempts import begin_attempt, check_run_is_free, end_attempt
from prefect_elastic_train.runs.commits import remove_leftovers
from prefect_elastic_train.runs.heartbeat import host_id, is_alive, process_start, start_heartbeat
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import wait_for
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN, SteppedStore, Training, begin, claim, happening_before, tear

OTHERS_RESUME = claim(OTHER_FLOW_RUN, resume=True)
removed_or_torn = pytest.mark.parametrize("lose", [LocalRunStore.delete, tear], ids=["removed", "torn"])
MANY_TRIES = {"driver_restarts": 100, "max_attempts_without_progress": 100}


def _refused(store: LocalRunStore, wanted: Any, *words: str) -> AttemptFailedError:
    """Have an attempt refused for good, with those words."""
    with pytest.raises(AttemptFailedError) as refused:
        begin_attempt(store, wanted)
    for word in words:
        assert word in str(refused.value)
    return refused.value


def _counts(store: LocalRunStore, wanted: Any, *attempts: str, trained: float = 0.0) -> list[int]:
    """Begin attempts that each do what is said: commit, end with an outcome, or nothing; return what each counted."""
    counts = []
    for attempt in attempts:
        begun = begin(store, wanted)
        counts.append(begun.counted)
        for act in attempt.split():
            if act == "commits":
                training = Training(store, begun.attempt)
                training.log.trained_seconds = lambda: trained
                training.report(f"checkpoint-{begun.attempt}")
            else:
                end_attempt(store, begun.attempt, act)
    return counts


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


def _beat(store: LocalRunStore) -> None:
    store.replace(layout.HEARTBEAT, encode(Heartbeat(attempt=1)))


def test_the_first_attempt_is_number_one_and_starts_from_the_beginning(store: LocalRunStore) -> None:
    assert check_run_is_free(RunDirectory(store), claim().request) is None
    assert (store.names(""), store.folders()) == ([], []), "a look has written something"
    begun = begin(store)
    assert (begun.attempt, begun.counted, begun.point.base, begun.notes) == (1, 1, None, [])
    run = RunDirectory(store)
    assert (run.record.name, run.record.creator, run.owner) == ("mnist", *[claim().request.owner] * 2)
    assert run.record.versions["ray"] == version("ray")


def test_the_same_flow_run_takes_over_and_resumes(store: LocalRunStore) -> None:
    training = Training(store, begin(store).attempt)
    training.report("a")
    training.report("b")
    begun = begin(store)
    assert (begun.attempt, begun.point.base, begun.point.checkpoint, begun.notes) == (2, (1, 2), "b", [])
    assert begun.point.commit.snapshot == training.snapshot
    run = RunDirectory(store)
    record = run.attempt_record(2)
    assert (record.base, record.confirmed, record.run_id) == ((1, 2), True, run.record.id)
    assert run.attempt(1).ended.message == "taken over by attempt 2"


def test_a_finished_run_gives_its_result_and_begins_nothing(store: LocalRunStore) -> None:
    begin(store)
    assert check_run_is_free(RunDirectory(store), claim().request) is None
    end_attempt(store, 1, "completed", result={"goodput": 0.5})
    end_attempt(store, 1, "driver_lost", "the first record of an end stays")
    for finished in (check_run_is_free(RunDirectory(store), claim().request), begin_attempt(store, claim())):
        assert (finished.attempt, finished.result) == (1, {"goodput": 0.5})
    assert RunDirectory(store).attempt_numbers == [1]


@pytest.mark.parametrize("state", ["training", "completed", "claimed"])
def test_a_run_of_another_flow_run_is_refused_with_its_owner_and_what_to_do(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    request = claim().request
    if state == "claimed":
        record = RunRecord(name="mnist", id="1", creator=request.owner, fingerprint=request.fingerprint)
        store.create(layout.RUN, encode(record))
    else:
        _counts(store, claim(), "completed" if state == "completed" else "")
    before = RunDirectory(store).attempt_numbers
    words = ("'mnist'", store.uri, "'eager-otter'", "'nightly'", FLOW_RUN, "run_name", "resume=True")
    assert _refused(store, claim(OTHER_FLOW_RUN), *words).outcome is Outcome.INVALID
    assert RunDirectory(store).attempt_numbers == before
    _beat(store)  # and stands still
    if state == "completed":
        monkeypatch.setattr(attempts, "is_alive", pytest.fail)
    assert begin(store, OTHERS_RESUME).counted == 1


@pytest.mark.parametrize("torn", [False, True])
def test_resume_is_refused_while_the_heart_of_the_run_beats(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.3)
    # Of a torn record nobody knows whose process it was, so that of the run's creator says nothing.
    begin(store, claim(host=host_id() if torn else "gpu-7/boot", pid=4711))
    if torn:
        tear(store, layout.attempt_name(1))
    stop = start_heartbeat(store, 1, pytest.fail)
    wait_for(lambda: store.read(layout.HEARTBEAT), 5, "the first beat")
    words = ("is being trained right now", "'eager-otter'", FLOW_RUN, "cancel", *([] if torn else ["gpu-7, pid 4711"]))
    _refused(store, OTHERS_RESUME, *words)
    stop()
    assert RunDirectory(store).attempt_numbers == [1]


def test_a_heart_counts_as_still_after_its_third_missed_beat(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    now, beats_at = [0.0], [25.0, 45.0]
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 10.0)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if beats_at and now[0] >= beats_at[0]:
            beats_at.pop(0)
            _beat(store)

    monkeypatch.setattr(heartbeat.time, "sleep", sleep)
    assert is_alive(store, None), "it beat after two and a half intervals"
    beats_at[:] = [now[0] + 35.0]
    assert not is_alive(store, None)
    assert beats_at.pop(), "it was watched beyond the third"
    before = now[0]
    assert not is_alive(SteppedStore(store.path, lambda _: sleep(40)), None)
    assert now[0] - before < 150, "slow reads were repeated as often as fast ones"


def test_on_its_own_machine_a_driver_is_alive_while_its_process_is(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, _claim_of(old_driver))
    boot_time = psutil._psplatform.boot_time  # the kernel's answer moves when the clock is set
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time() + 3600)
    with pytest.raises(AttemptFailedError, match=f"is being trained right now by .* pid {old_driver.pid}"):
        check_run_is_free(RunDirectory(store), OTHERS_RESUME.request)  # before it starts or joins a cluster
    owner = _claim_of(old_driver).request.owner
    assert is_alive(store, owner), "another flow run's driver was ended"
    assert not is_alive(store, owner.model_copy(update={"process_started_at": 1.0})), "another process of the same id"
    old_driver.kill()
    wait_for(lambda: psutil.Process(old_driver.pid).status() == psutil.STATUS_ZOMBIE, 5, "its death")
    assert not is_alive(store, owner)


def test_the_old_driver_of_the_same_flow_run_is_ended_unless_its_attempt_has(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes]
) -> None:
    _counts(store, _claim_of(old_driver, **MANY_TRIES), "driver_lost", "")
    assert old_driver.poll() is None
    note = f"the driver of attempt 2 (pid {old_driver.pid}) was still alive and was killed"
    assert begin(store, claim(**MANY_TRIES)).notes == [note]
    assert not psutil.pid_exists(old_driver.pid)


def test_a_process_gives_way_to_another_one_of_its_flow_run_that_has_taken_over(store: LocalRunStore) -> None:
    old, new = (claim(supervisor=supervisor, **MANY_TRIES) for supervisor in ("old", "new"))
    for wanted in (old, old, new):
        begin(store, wanted)
    assert _refused(store, old, "another process of the same flow run").outcome is Outcome.SUPERSEDED
    assert begin(store, new).attempt == 4


@pytest.mark.parametrize("is_taken_over", [False, True], ids=["it trains", "it had the run before"])
def test_a_second_training_in_one_execution_of_a_flow_run_is_refused_and_a_later_execution_takes_over(
    store: LocalRunStore, old_driver: subprocess.Popen[bytes], is_taken_over: bool
) -> None:
    first, second = _claim_of(old_driver, supervisor="one", execution=1), claim(supervisor="two", execution=1)
    begin(store, first)
    if is_taken_over:  # between two of its drivers
        old_driver.kill()
        old_driver.wait()
        begin(store, second)
    refused = _refused(store, first if is_taken_over else second, "another training of the same flow run", "run_name")
    assert (refused.outcome, old_driver.poll() is None) == (Outcome.INVALID, not is_taken_over)
    assert begin(store, claim(supervisor="three", execution=2, **MANY_TRIES)).attempt == 2 + is_taken_over
    assert not psutil.pid_exists(old_driver.pid), "its driver was ended"


def test_a_run_that_two_flow_runs_create_at_once_is_one_of_theirs(store: LocalRunStore) -> None:
    late = happening_before(store, f"create {layout.RUN}", lambda: begin(store))
    _refused(late, claim(OTHER_FLOW_RUN), f"belongs to flow run 'eager-otter' of flow 'nightly' (id {FLOW_RUN})")
    assert RunDirectory(store).attempt_numbers == [1]


@pytest.mark.parametrize("is_finished", [False, True])
def test_another_configuration_is_refused_with_the_differences(store: LocalRunStore, is_finished: bool) -> None:
    _counts(store, claim(config={"lr": 0.1}), "completed" if is_finished else "")
    # Who names the run means it, unless the run has nothing left to do.
    wanted = claim(config={"lr": 0.2, "wd": 0}, named=is_finished)
    words = ("train_loop_config['lr'] changed; train_loop_config['wd'] was added", "run_name='mnist'")
    assert "0.2" not in str(_refused(store, wanted, *words))


@pytest.mark.parametrize(("flow_run", "how"), [(FLOW_RUN, "named"), (OTHER_FLOW_RUN, "resume")])
def test_a_run_named_by_its_user_goes_on_with_another_config_and_says_so(
    store: LocalRunStore, flow_run: str, how: str
) -> None:
    before, wanted = ({"config": {"lr": rate}, how: True} for rate in (0.1, 0.2))
    begin(store, claim(**before))
    note = "the run has another configuration than before: train_loop_config['lr'] changed"
    assert begin(store, claim(flow_run, **wanted)).notes == [note]
    # Its result is that of the newest configuration, unless it is to be trained further.
    end_attempt(store, 2, "completed")
    assert isinstance(begin_attempt(store, claim(flow_run, **wanted)), EndedRecord)
    if how == "named":
        _refused(store, claim(**before), "train_loop_config['lr'] changed")
    else:
        assert begin(store, claim(flow_run, **before)).attempt == 3


def test_a_value_that_cannot_be_compared_is_named_once_in_each_process_and_refuses_nothing(
    store: LocalRunStore,
) -> None:
    notes = [
        begin(store, claim(config={"model": object(), "lr": 0.1}, supervisor=supervisor, **MANY_TRIES)).notes
        for supervisor in ("1", "1", "2")  # a task retry passes the same object
    ]
    assert notes[:2] == [[], []]
    [note] = notes[2]
    assert note.startswith("train_loop_config['model'] (builtins:object) cannot be compared")


def test_a_run_that_had_begun_is_not_begun_again_where_its_storage_is_missing(tmp_path: Path) -> None:
    mount = tmp_path / "mnt" / "shared"
    there = LocalRunStore(str(mount / "runs" / "mnist"))
    begin(there)
    begun = claim(begun=True, **MANY_TRIES)
    begin(there, begun)
    mount.rename(tmp_path / "unmounted")
    error = _refused(there, begun, there.uri, "not mounted", "retry the flow run", "another run_name")
    assert (error.outcome, mount.exists()) == (Outcome.STORAGE_ERROR, False)
    (tmp_path / "unmounted").rename(mount)
    assert begin(there, begun).attempt == 3


def test_a_flow_run_whose_first_execution_died_before_an_attempt_began_begins_one(store: LocalRunStore) -> None:
    [note] = begin(store, claim(resumed=True)).notes
    assert note.startswith("the flow run ran before, and there was no run 'mnist' in ")


def test_what_the_user_has_mistaken_is_said(store: LocalRunStore) -> None:
    note = "resume=True, but there was no run 'mnist' in this storage: a new run starts"
    assert begin(store, claim(resume=True)).notes == [note]
    _refused(store, claim(resume_from="base"), "did not start from 'base'")


@removed_or_torn
def test_a_run_that_lost_its_record_keeps_its_creator_whoever_asks_for_it(store: LocalRunStore, lose: Any) -> None:
    begin(store, claim(config={"lr": 0.1}))
    before = RunDirectory(store).record
    lose(store, layout.RUN)
    _refused(store, claim(OTHER_FLOW_RUN, config={"lr": 0.2}), "'eager-otter'")
    assert begin(store, claim(config={"lr": 0.1})).notes == ["run.json was torn or missing and was rewritten"]
    after = RunDirectory(store).record
    assert (after.creator, after.id) == (before.creator, before.id)


@removed_or_torn
def test_a_torn_attempt_record_keeps_its_number_commits_and_owner(store: LocalRunStore, lose: Any) -> None:
    _counts(store, claim(flow_run_name="calm-heron"), "commits")
    lose(store, layout.attempt_name(1))
    _refused(store, claim(OTHER_FLOW_RUN), "'calm-heron'")
    begun = begin(store)
    assert (begun.attempt, begun.point.checkpoint, begun.notes) == (2, "checkpoint-1", [])


def test_a_run_whose_owner_cannot_be_read_any_more_is_taken_over_only_with_resume(store: LocalRunStore) -> None:
    _counts(store, claim(), "commits")
    for name in (layout.attempt_name(1), layout.RUN):
        store.replace(name, b"")
    for wanted in (claim(), claim(OTHER_FLOW_RUN)):
        _refused(store, wanted, "a flow run whose name cannot be read any more")
    assert begin(store, claim(resume=True)).point.checkpoint == "checkpoint-1"


def test_restarts_are_counted_over_all_resumes_of_the_flow_run(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=2)
    assert _counts(store, wanted, "commits", "commits", "commits") == [1, 2, 3]
    error = _refused(store, wanted, "3 attempts began, 1 + driver_restarts (2) are allowed")
    assert (error.outcome, error.final, error.retryable, error.attempt) == (Outcome.DRIVER_LOST, True, False, 3)
    run = RunDirectory(store)
    assert (run.newest_attempt.outcome, bool(run.newest_attempt.ended.exhausted_budget)) == ("driver_lost", True)
    assert run.attempt_numbers == [1, 2, 3]
    assert begin(store, claim(OTHER_FLOW_RUN, resume=True, driver_restarts=0)).counted == 1, "another flow run's count"


@pytest.mark.parametrize(("forgiving", "counts"), [(0, [1, 2]), (60, [1, 2, 2, 2]), (150, [1, 2])])
def test_an_attempt_is_forgiven_once_others_have_trained_on_and_committed_for_long_enough(
    store: LocalRunStore, forgiving: float, counts: list[int]
) -> None:
    wanted = claim(driver_restarts=1, forgive_after_seconds=forgiving)
    assert _counts(store, wanted, *["commits driver_lost"] * len(counts), trained=100.0) == counts
    if len(counts) == 2:
        _refused(store, wanted, "2 attempts began, 1 + driver_restarts (1) are allowed")


def test_a_driver_and_a_worker_group_start_with_as_many_requests_however_many_attempts_there_were(
    store: LocalRunStore,
) -> None:
    requests: list[str] = []
    counting = SteppedStore(store.path, requests.append)
    needed = []
    for number in range(1, 101):
        requests.clear()
        begun = begin(counting, claim(supervisor=f"resume-{number}"))  # the flow run was resumed each time
        training = Training(store, begun.attempt)
        training.upload(physical_name("half", begun.attempt))  # a worker dies in an upload
        assert remove_leftovers(counting, begun.attempt)
        needed.append(len(requests))
        training.log.trained_seconds = lambda: 7200.0
        training.report(name := physical_name("epoch", begun.attempt, report=number))
        assert name in RunDirectory(store).newest_commit.manifest
        end_attempt(store, begun.attempt, "driver_lost")
    assert needed[99] <= needed[19] < 70


def test_attempts_in_a_row_without_a_checkpoint_end_the_run(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=100)
    _counts(store, wanted, *["", "commits"] * 3, "", "")  # a checkpoint ends the row
    words = ("2 attempts in a row ended without a new checkpoint", "max_attempts_without_progress (now 2)")
    error = _refused(store, wanted, *words, "The last of them ended as driver_lost")
    assert (error.outcome, error.final) == (Outcome.NO_PROGRESS, True)
    last = RunDirectory(store).attempt(8).ended
    assert last.outcome == "driver_lost"
    assert str(error).startswith(last.exhausted_budget)


def test_checkpoints_of_a_cancelled_attempt_are_progress(store: LocalRunStore) -> None:
    wanted = claim(driver_restarts=100)
    assert _counts(store, wanted, "", "commits cancelled", "", "") == [1, 2, 2, 3]
    _refused(store, wanted, "2 attempts in a row")


@pytest.mark.parametrize("wanted", [{"driver_restarts": 1}, {"max_attempts_without_progress": 2}])
def test_a_persons_retry_after_a_verdict_starts_with_fresh_budgets(
    store: LocalRunStore, wanted: dict[str, int]
) -> None:
    for _ in range(2):
        assert _counts(store, claim(**wanted), "", "") == [1, 2]
        assert _refused(store, claim(**wanted)).final


@pytest.mark.parametrize("outcome", ["from_the_future", *[each.value for each in Outcome][1:]])
def test_only_an_end_that_a_restart_follows_counts(store: LocalRunStore, outcome: str) -> None:
    is_followed = outcome in ("driver_lost", "cluster_lost", "superseded")
    assert _counts(store, claim(), outcome, "") == [1, 1 + is_followed]


def test_an_attempt_that_gave_way_before_it_did_anything_does_not_count(store: LocalRunStore) -> None:
    _counts(store, claim(), "commits")
    gave_way = AttemptRecord(attempt=2, owner=claim().request.owner, confirmed=False, base=(1, 1))
    store.create(layout.attempt_name(2), encode(gave_way))
    end_attempt(store, 2, "superseded")
    begun = begin(store, claim(driver_restarts=1))
    assert (begun.attempt, begun.counted) == (3, 2)


def test_a_heart_goes_on_after_errors_of_the_storage_and_ends_when_it_is_fenced_off(store: LocalRunStore) -> None:
    is_failing = [False]

    def fail(operation: str) -> None:
        if is_failing[0] and operation.startswith("replace"):
            raise OSError(errno.EIO, "Input/output error")

    def beat() -> bytes | None:
        return store.read(layout.HEARTBEAT)

    begin(store)
    fenced_off = threading.Event()
    stop = start_heartbeat(SteppedStore(store.path, fail), 1, fenced_off.set)
    for moment in ("the first beat", "the second beat"):
        wait_for(lambda before=beat(): beat() != before, 5, moment)
    is_failing[0] = True
    time.sleep(0.1)
    before = beat()
    is_failing[0] = False
    wait_for(lambda: beat() != before, 5, "a beat after the errors")
    begin(store)
    assert fenced_off.wait(5)
    last = beat()
    time.sleep(0.1)
    assert beat() == last, "it beats in its successor's place"
    stop()


def test_a_record_of_another_schema_is_refused_and_not_taken_for_torn_though_its_fields_differ(
    store: LocalRunStore,
) -> None:
    begin(store)
    later = b'{"schema_version": 99, "title": "mnist"}'
    store.replace(layout.RUN, later)
    _refused(store, claim(), "written by another version", "schema 99")
    assert store.read(layout.RUN) == later
