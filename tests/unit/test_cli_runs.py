"""`elastic-train runs` on run directories that the real code wrote, undamaged and damaged."""

import errno
import io
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import prefect_elastic_train
from prefect_elastic_train.cli import COMMANDS, app
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import OLDEST_SCHEMA_VERSION, SCHEMA_VERSION, Heartbeat, RunRecord, encode
from prefect_elastic_train.core.settings import LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.loop.ledger import Ledger
from prefect_elastic_train.loop.order import SampleOrder
from prefect_elastic_train.loop.rank_files import rank_file
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.report.accounts import add_up
from prefect_elastic_train.runs import heartbeat, layout, pruning
from prefect_elastic_train.runs.attempts import begin_attempt, end_attempt
from prefect_elastic_train.runs.commits import check_fence, remove_leftovers
from prefect_elastic_train.runs.heartbeat import this_process
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.inspecting import make_result
from prefect_elastic_train.runs.pruning import RunChangedError, delete_planned, plan_run
from prefect_elastic_train.runs.run_directory import RunDirectory, newest_attempt_number
from prefect_elastic_train.runs.seeding import choose_source
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from tests.support.s3 import MotoServer
from tests.unit.ray_storage import Ray
from tests.unit.support import FLOW_RUN, Training, begin, claim, happening_before, private_folder, python, tear

DAY = 86400.0
LONG_AGO = 30 * DAY


@pytest.fixture
def storage() -> Iterator[Storage]:
    """A directory that holds no run yet."""
    with private_folder() as folder:
        yield Storage(LocalStorageSettings(path=folder))


def _run(command: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, f"runs {command}", input=answer)


def _done(command: str, answer: str | None = None) -> str:
    result = _run(command, answer)
    assert result.exit_code == 0, result.output
    return result.stdout


def _refused(command: str) -> str:
    result = _run(command)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    return result.stderr


def _json(command: str) -> Any:
    return json.loads(_done(f"{command} --json"), parse_constant=pytest.fail)


def _trained(storage: Storage, name: str = "mnist", checkpoints: str = "abc", **owner: Any) -> LocalRunStore:
    """Train a run by a driver on another machine, which goes on without a heartbeat."""
    store = storage.run(name)
    ray = Ray(store, begin(store, claim(name=name, **owner)).attempt).start()
    for number, checkpoint in enumerate(checkpoints):
        ray.report(checkpoint, epoch=number, loss=1.0 / (number + 1))
    return store


def _died(storage: Storage) -> LocalRunStore:
    """A run whose driver has not been heard of for long."""
    store = _trained(storage)
    _make_older(store, LONG_AGO)
    _beat(store, age=LONG_AGO)
    return store


def _end(store: LocalRunStore, outcome: Outcome = Outcome.COMPLETED, message: str = "", **more: Any) -> None:
    end_attempt(store, newest_attempt_number(store), outcome.value, message, **more)


def _over(storage: Storage, name: str = "mnist") -> LocalRunStore:
    """A run that was lost long ago."""
    store = _trained(storage, name)
    _end(store, Outcome.DRIVER_LOST)
    _make_older(store, LONG_AGO)
    return store


def _make_older(store: RunStore, seconds: float) -> None:
    """Set back all times that the records hold."""
    for name in store.file_sizes(layout.STATE_FOLDER) or {}:
        record = json.loads(store.read(f"{layout.STATE_FOLDER}/{name}"))
        older = {field: record[field] - seconds for field in ("at", "started_at", "created_at") if field in record}
        store.replace(f"{layout.STATE_FOLDER}/{name}", json.dumps({**record, **older}).encode())


def _beat(store: LocalRunStore, age: float) -> None:
    store.replace(layout.HEARTBEAT, encode(Heartbeat(attempt=1, at=time.time() - age)))


def _interrupt_upload(store: Any, name: str = "d") -> str:
    """Begin to upload a checkpoint and return its folder."""
    folder = physical_name(name, newest_attempt_number(store))
    Ray(store, newest_attempt_number(store)).upload(folder, {"model.pt": b"hal"})
    return folder


def _everything(storage: Storage) -> dict[str, bytes]:
    root = Path(storage.uri)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _summaries(storage: Storage) -> dict[str, Any]:
    return {run["name"]: run for run in _json(f"list {storage.uri}")["runs"]}


def test_the_list_of_commands_shows_the_help_of_each() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"{prefect_elastic_train.__version__}\n"
    shown = CliRunner().invoke(app, ["--help"]).output
    for command, text in COMMANDS.items():
        assert command in shown
        assert text.rstrip(".") in " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())


@pytest.mark.parametrize(
    ("command", "heavy"),
    [("--help", "pydantic prefect_elastic_train.cli.runs"), ("runs list", "ray prefect pyarrow fsspec")],
)
def test_a_command_imports_only_what_it_needs(storage: Storage, command: str, heavy: str) -> None:
    _end(_trained(storage))
    done = python(
        "from prefect_elastic_train.cli import app\n"
        "try: app(sys.argv[2:])\n"
        "finally: print(sorted(set(sys.argv[1].split()) & set(sys.modules)))",
        *[heavy, *command.split(), *([storage.uri] if command == "runs list" else [])],
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_list_shows_the_state_of_each_run_and_prune_skips_what_may_be_trained(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 60)
    monkeypatch.setattr(pruning, "is_alive", lambda *_: False)  # it would be watched for so long
    _make_older(_trained(storage, "alive", **this_process()), LONG_AGO)
    _trained(storage, "gone", **this_process() | {"pid": 2**22 + 1})
    ends = {"done": Outcome.COMPLETED, "broken": Outcome.USER_ERROR, "stopped": Outcome.CANCELLED}
    for name, outcome in ends.items():
        _end(_trained(storage, name), outcome, "ValueError: no\nmore of it")
    for name, age in {"beating": 1, "silent": 3600, "slow": 300, "ahead": -3600}.items():
        _beat(_trained(storage, name), age)
    _make_older(storage.run("silent"), 3600)
    storage.run("raw").create(layout.SNAPSHOT, b"of Ray Train alone")
    record = RunRecord(name="claimed", id="1", creator=claim().request.owner, fingerprint=claim().request.fingerprint)
    storage.run("claimed").create(layout.RUN, encode(record))
    _make_older(storage.run("claimed"), DAY / 2)
    runs = _summaries(storage)
    assert {name: f"{run['state']}, {run['outcome'] or run['life']}" for name, run in runs.items()} == {
        "alive": "training, alive",
        "gone": "died, dead",
        "done": "completed, completed",
        "broken": "failed, user_error",
        "stopped": "cancelled, cancelled",
        "beating": "training, alive",
        "silent": "died, dead",
        "slow": "unknown, unknown",
        "ahead": "unknown, unknown",
        "claimed": "not_begun, None",
    }
    details = ["ValueError: no", f"process {2**22 + 1} on this machine exited", "last active -3600 s ago on elsewhere"]
    assert [runs[name]["detail"] for name in ("broken", "gone", "ahead")] == details
    text = _done(f"list {storage.uri}")
    assert "failed: user_error" in text
    assert len(text.splitlines()) == 1 + len(runs)
    before = _everything(storage)
    text = _done(f"prune {storage.uri} --older-than 0 --yes")
    trained, active = "it is being trained, or may be:", "it was active just now, or was claimed within a day"
    reasons = {"alive": f"{trained} process", "beating": f"{trained} last active", "slow": trained}
    for name, reason in {**reasons, "done": active, "claimed": active}.items():
        assert f"skipped: {name}: {reason}" in text
    kept = {name: data for name, data in before.items() if not name.startswith("silent/")}
    assert _everything(storage) == kept


def test_list_shows_progress_and_checkpoints(storage: Storage) -> None:
    store = _trained(storage, checkpoints="ab")
    at = json.loads(store.read(layout.commit_name((1, 2))))["at"]
    expected = {
        "uri": store.uri,
        "metrics": {"epoch": 1, "loss": 0.5},
        "last_commit_at": at,
        "last_activity_at": at,
        "flow_run_id": FLOW_RUN,
        "flow_name": "nightly",
    }
    assert _summaries(storage)["mnist"].items() >= expected.items()
    cells = re.split("  +", _done(f"list {storage.uri}").splitlines()[1].strip())
    assert re.fullmatch(r"[\d.]+ s", cells.pop(7))
    assert cells == ["mnist", "unknown", "1", "2", "epoch=1, loss=0.5", "2", "6 Bytes", "eager-otter"]


def test_what_is_no_json_and_what_steers_a_terminal_is_not_printed(storage: Storage) -> None:
    store = storage.run("mnist")
    metrics = {"loss": math.nan, "best": math.inf, "seen": {"x": [math.nan]}}
    Training(store, begin(store).attempt).report("a", metrics)
    _end(store, Outcome.USER_ERROR, "\x1b[2J[bold]gone[/bold]", result={"metrics": metrics})
    metrics = {"loss": None, "best": None, "seen": {"x": [None]}}
    assert _summaries(storage)["mnist"]["metrics"] == metrics
    shown = _json(f"show {storage.uri} mnist")
    assert shown["commit"]["snapshot"]["checkpoint_results"][0]["metrics"] == metrics
    assert "loss=nan" in _done(f"list {storage.uri}")
    text = _done(f"show {storage.uri} mnist")
    assert "\x1b[2J" not in text
    assert "[bold]gone[/bold]" in text


def test_what_cannot_be_looked_at_is_one_line_that_says_why(storage: Storage) -> None:
    storage.run("notes").create("todo.txt", b"eat")
    assert _json(f"list {storage.uri}") == {"storage": storage.uri, "runs": []}
    assert _done(f"list {storage.uri}") == _done(f"verify {storage.uri}") == f"no runs in {storage.uri}\n"
    assert _done(f"prune {storage.uri} --older-than 0 --yes") == f"nothing to delete in {storage.uri}\n"
    assert "is a folder without a run" in _refused(f"show {storage.uri} notes")
    for command in ("list", "verify", "prune"):
        assert "there is no directory /nowhere" in _refused(f"{command} /nowhere")
    for command, name in (("show", "mnits"), ("verify", "mnits"), ("prune", "..")):
        assert f"there is no run '{name}' in" in _refused(f"{command} {storage.uri} {name}")


def test_a_run_that_may_not_be_read_or_is_of_another_version_stays_and_does_not_hide_the_others(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trained(storage, "mine")
    secret, old, new = (_trained(storage, name) for name in ("secret", "old", "new"))
    for store, schema in ((old, OLDEST_SCHEMA_VERSION - 1), (new, SCHEMA_VERSION + 1)):
        record = json.loads(store.read(layout.attempt_name(1))) | {"schema_version": schema}
        store.replace(layout.attempt_name(1), json.dumps(record).encode())
    before = _everything(storage)
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).startswith(secret.path):  # root, who may run this test, is refused nothing
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = _run(f"list {storage.uri} --json")
    states = {run["name"]: run["state"] for run in json.loads(result.stdout)["runs"]}
    assert states == {"mine": "unknown", "secret": "unreadable", "old": "unreadable", "new": "unreadable"}
    assert (result.exit_code, "error: 3 of 4 runs cannot be read: " in result.stderr) == (1, True)
    assert "Permission denied" in _refused(f"show {storage.uri} secret")
    assert "continue with that version, or use another run_name" in _refused(f"show {storage.uri} old")
    pruned = _done(f"prune {storage.uri} mine old new --older-than 0.00001 --yes")
    for store, name in ((old, "old"), (new, "new")):
        assert f"skipped: {name}: the run was written by another version" in pruned
        with pytest.raises(AttemptFailedError, match="written by another version") as refused:
            begin(store)
        assert refused.value.outcome is Outcome.INVALID
    monkeypatch.undo()
    assert _everything(storage) == before


def test_show_prints_the_attempts_faults_and_checkpoints_of_a_run(storage: Storage) -> None:
    store = _trained(storage, checkpoints="ab")
    _end(store, Outcome.DRIVER_LOST, "killed\nby somebody")
    store.delete_folder("b")
    Ray(store, begin(store).attempt).start().report("c", epoch=2, loss=0.3)
    result = {"run_name": "mnist", "history": [{}]}
    _end(store, result=result)
    events = [
        ev.AttemptStarted(run_name="mnist", run_uri=store.uri),
        ev.WorkerGroupStarted(world_size=2),
        ev.WorkerFailed(causes=[Cause([0], "x")], retried=True, reports_lost=2),
        ev.WorkerGroupStarted(world_size=1),
    ]
    store.create(f"{layout.EVENTS}/0001-000.jsonl", "\n".join(map(ev.encode_event, events)).encode())
    details = _json(f"show {storage.uri} mnist")
    assert details["summary"] == _summaries(storage)["mnist"]
    first, last = details["attempts"]
    assert (first["ended"]["outcome"], first["record"]["base"]) == ("driver_lost", None)
    assert (last["ended"]["result"], last["record"]["base"], last["record"]["dropped"]) == (result, [1, 2], ["b"])
    assert (details["commit"]["attempt"], list(details["commit"]["manifest"])) == (2, ["a", "c"])
    assert details["accounts"]["worker_failures"] == 1
    text = _done(f"show {storage.uri} mnist")
    assert "2 → 1" in text
    assert "worker failures: 1, preemptions: 0, resizes: 0, reports done again: 2" in text
    assert "checkpoint b was dropped: 2 of 2 files are missing" in text
    assert re.search(r"c +2 +epoch=2, loss=0.3 +3 Bytes +latest, best", text)


def test_verify_shows_damage_and_what_a_resume_does_about_it(storage: Storage) -> None:
    store = _trained(storage, checkpoints="abcd")
    _interrupt_upload(_trained(storage, "other"), "epochs/4")
    storage.run("raw").create(layout.SNAPSHOT, b"of Ray Train alone")
    store.delete_folder("c")
    tear(store, layout.commit_name((1, 4)))
    before = _everything(storage)
    result = _run(f"verify {storage.uri} --json")
    found, other = json.loads(result.stdout)["runs"]
    assert (result.exit_code, other["whole"], found["whole"], found["checkpoint"]) == (1, True, False, "b")
    repairs = " ".join(found["repairs"])
    assert "checkpoint c was dropped: 2 of 2 files are missing, first model.pt" in repairs
    assert "commit 0001-000004 is torn and was skipped" in repairs
    text = _run(f"verify {storage.uri}").stdout
    assert text.startswith("mnist: DAMAGED\n  a resume starts from checkpoint b")
    assert text.endswith("other: whole\n  a resume starts from checkpoint c of commit 0001-000003\n")
    assert _everything(storage) == before
    point = begin(store).point
    assert (point.checkpoint, point.repairs) == (found["checkpoint"], found["repairs"])


def test_a_run_without_any_commit_left_is_damaged_and_not_pruned(storage: Storage) -> None:
    store = _over(storage)
    _interrupt_upload(store)
    for commit in RunDirectory(store).commit_ids:
        store.delete(layout.commit_name(commit))
    assert "a resume is refused: no commit of" in _run(f"verify {storage.uri}").stdout
    before = _everything(storage)
    assert "skipped: mnist: no commit of" in _done(f"prune {storage.uri} --yes")
    assert _everything(storage) == before


def test_all_who_ask_for_the_newest_checkpoint_find_the_one_before_a_damaged_one(storage: Storage) -> None:
    store = _trained(storage, "mnist", "abcd")
    tear(store, "d/model.pt")
    assert make_result(store, add_up(read_history(store))).checkpoint_uri == f"{store.uri}/c"
    wanted = [claim(name="tuned", resume_from=f"mnist@{choice}").request for choice in ("latest", "best", "d")]
    for request in wanted[:2]:
        source = choose_source(storage, request)
        assert source.folder == "c"
        assert "of run 'mnist': checkpoint d was dropped: model.pt has" in source.notes[0]
    # Resumed, by a loop that has nothing left to do.
    begun = begin(store, claim(name="mnist"))
    assert Ray(store, begun.attempt).start().latest == begun.point.checkpoint == "c"
    result = make_result(store, add_up(read_history(store)))
    _end(store, result=result.model_dump(mode="json"))
    assert (result.checkpoint_uri, result.metrics["epoch"]) == (f"{store.uri}/c", 2)
    assert [best.uri for best in result.best_checkpoints] == [f"{store.uri}/{name}" for name in "abc"]
    source = choose_source(storage, wanted[0])
    assert (source.folder, source.notes) == ("c", [])
    shown = _json(f"show {storage.uri} mnist")
    assert shown["commit"]["snapshot"]["latest_checkpoint_result"]["checkpoint_dir_name"] == "c"
    assert (shown["summary"]["metrics"], shown["summary"]["checkpoints"]) == (result.metrics, 3)
    [found] = _json(f"verify {storage.uri}")["runs"]
    assert (found["whole"], found["commit"], found["checkpoint"]) == (True, "0001-000004", "c")
    with pytest.raises(AttemptFailedError, match="run 'mnist' has no checkpoint 'd', it has a, b, c"):
        choose_source(storage, wanted[2])


def test_prune_shows_what_goes_asks_and_deletes_that_only(storage: Storage) -> None:
    store = storage.run("mnist")
    training = Training(store, begin(store).attempt, keep=2)
    first, second, third = (physical_name(name, 1) for name in "abc")
    for name in (first, second, third):
        training.report(name)  # nobody deletes what is kept no longer: the first
    tear(store, f"{third}/model.pt")
    assert begin(store).point.dropped == [third]
    upload = _interrupt_upload(store, "sub/d")
    store.create("sub/notes.txt", b"of a person")
    Path(store.path, "plots").mkdir()
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    before = _everything(storage)
    declined = _run(f"prune {storage.uri}", answer="n\n")
    assert (declined.exit_code, "no commit needs it" in declined.stdout) == (1, True)
    assert "Delete this for good?" in declined.stdout
    assert "Delete this for good?" not in _done(f"prune {storage.uri} --dry-run")
    assert _everything(storage) == before
    deleted = _done(f"prune {storage.uri}", answer="y\n")
    gone = tuple(f"mnist/{folder}/" for folder in (first, third, upload))
    assert all(f"deleted {folder.replace('/', ' ', 1).rstrip('/')}\n" in deleted for folder in gone)
    assert _everything(storage) == {name: data for name, data in before.items() if not name.startswith(gone)}
    assert store.folders() == [layout.STATE_FOLDER, second, "plots", "sub"]
    assert f"nothing to delete in {storage.uri}" in _done(f"prune {storage.uri} --yes")
    begun = begin(store)
    assert (begun.point.checkpoint, begun.point.repairs) == (second, [])


def test_nothing_is_pruned_that_a_repair_may_fall_back_to(storage: Storage) -> None:
    store = storage.run("mnist")
    ray = Ray(store, begin(store).attempt, num_to_keep=2).start()
    for name in "abcd":
        ray.report(name)
    for name in "ab":  # their deletion failed, so that older commits are whole yet
        ray.upload(name, {"model.pt": name.encode(), "rank-0/optim.pt": b"12"})
    tear(store, "d/model.pt")
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    assert RunDirectory(store).resume_point.checkpoint == "c"
    said = _done(f"prune {storage.uri} --yes")
    assert "skipped: mnist: a resume repairs it first: checkpoint d was dropped" in said
    assert "nothing to delete" in said
    tear(store, "c/model.pt")  # and then the resume point goes, too
    assert begin(store).point.checkpoint == "b"


def test_a_heart_that_beats_by_a_clock_far_behind_is_seen_before_anything_goes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.5)
    store = _died(storage)
    assert _summaries(storage)["mnist"]["state"] == "died"
    later = threading.Timer(0.4, lambda: _beat(store, age=LONG_AGO - 1))
    later.start()
    planned = plan_run(RunDirectory(store), DAY)
    later.join()
    assert (planned.skipped, planned.deletions) == ("it is being trained: its heartbeat changes", [])


def test_nothing_goes_once_an_attempt_has_begun_since_the_plan(storage: Storage) -> None:
    store = _over(storage)
    folder = _interrupt_upload(store)
    plans = [plan_run(RunDirectory(store), older_than) for older_than in (None, DAY)]
    assert [[deletion.folder for deletion in planned.deletions] for planned in plans] == [[folder], [""]]
    begin(store)
    before = _everything(storage)
    for planned in plans:
        with pytest.raises(RunChangedError, match="run mnist has changed meanwhile"):
            list(delete_planned(store, planned))
    assert _everything(storage) == before


@pytest.mark.parametrize("moment", ["before the plan is checked", f"create {layout.attempt_name(2)}"])
def test_nothing_goes_once_a_driver_thought_dead_has_committed(storage: Storage, moment: str) -> None:
    store = _died(storage)
    upload = _interrupt_upload(store)
    ray = Ray(store, 1).start()
    kept = plan_run(RunDirectory(store)).skipped
    assert kept.startswith("its newest attempt has no end: resume the run, which removes")
    planned = plan_run(RunDirectory(store), DAY)
    changing = happening_before(store, moment, lambda: ray.report("e"))
    changing.before("before the plan is checked")
    with pytest.raises(RunChangedError, match="run mnist has changed meanwhile"):
        list(delete_planned(changing, planned))
    check_fence(store, 1)
    assert RunDirectory(store).resume_point.checkpoint == "e"
    assert remove_leftovers(store, 1) == [upload]


def test_older_than_deletes_whole_runs_that_are_over_and_old(storage: Storage) -> None:
    _over(storage, "done")
    _died(storage)
    recent = _trained(storage, "recent")
    _end(recent)
    _make_older(recent, 3 * DAY)
    assert "nothing to delete" in _done(f"prune {storage.uri} --yes")
    assert "failed, last activity 30.0 days ago" in _done(f"prune {storage.uri} --older-than 7 --dry-run")
    assert len(_summaries(storage)) == 3
    _done(f"prune {storage.uri} done --older-than 7 --yes")
    assert sorted(os.listdir(storage.uri)) == ["mnist", "recent"]
    _done(f"prune {storage.uri} --older-than 7 --yes")
    assert os.listdir(storage.uri) == ["recent"]


def test_a_driver_that_begins_while_a_run_is_deleted_is_told_and_another_pruner_leaves_it_alone(
    storage: Storage,
) -> None:
    store = _over(storage)

    def interfere() -> None:
        with pytest.raises(AttemptFailedError, match="belongs to flow run 'elastic-train runs prune'"):
            begin_attempt(store, claim())
        assert "skipped: mnist: it is being deleted: process" in _done(f"prune {storage.uri} --yes")

    list(delete_planned(happening_before(store, "delete b", interfere), plan_run(RunDirectory(store), DAY)))
    assert os.listdir(storage.uri) == []
    assert begin(store).point.checkpoint == ""


def test_a_deletion_that_another_flow_run_stops_by_taking_over_is_finished_by_the_next(storage: Storage) -> None:
    store = _over(storage)

    def take_over() -> None:
        begun = store.read(layout.attempt_name(2))
        store.create(layout.attempt_name(3), begun.replace(b'"attempt":2', b'"attempt":3'))

    with pytest.raises(RunChangedError, match="run mnist was started again while it was deleted"):
        list(delete_planned(happening_before(store, "delete b", take_over), plan_run(RunDirectory(store), DAY)))
    assert store.folders() == [layout.STATE_FOLDER, "b", "c"]
    pruner = json.loads(store.read(layout.attempt_name(3)))
    pruner["owner"]["pid"] = 2**22 + 1  # a pruner that was killed
    store.replace(layout.attempt_name(3), json.dumps(pruner).encode())
    assert _summaries(storage)["mnist"]["state"] == "deleting"
    assert "its deletion was interrupted" in _done(f"prune {storage.uri} --dry-run")
    _done(f"prune {storage.uri} --yes")
    assert os.listdir(storage.uri) == []


def test_an_object_store_is_looked_at_checked_and_pruned_alike(
    server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "SECRET_ACCESS_KEY": "secret"}
    for name, value in {"ENDPOINT_URL": server.endpoint_url, "DEFAULT_REGION": "us-east-1", **keys}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = Storage(S3StorageSettings(bucket_path=f"{server.create_bucket('cli-runs')}/runs"))
    store: Any = bucket.run("mnist")
    ray = Ray(store, begin(store).attempt).start()
    for name in "ab":
        ray.report(name, loss=0.5)
    folder = _interrupt_upload(store)
    server.client().create_multipart_upload(Bucket="cli-runs", Key=f"runs/mnist/{folder}/large.pt")
    end_attempt(store, 1, Outcome.USER_ERROR.value)
    _make_older(store, LONG_AGO)
    assert re.search(rf"{re.escape(folder)} +3 Bytes", _done(f"prune {bucket.uri} --dry-run"))
    assert f"deleted mnist {folder}" in _done(f"prune {bucket.uri} --yes")
    assert server.incomplete_uploads("cli-runs") == []
    assert store.folders() == [layout.STATE_FOLDER, "a", "b"]
    _done(f"prune {bucket.uri} --older-than 7 --yes")
    assert bucket.run_names() == server.keys("cli-runs") == []
    assert "create the bucket" in _refused("list s3://no-such-bucket/runs")


def _train_session(store: RunStore, spoilt: int = -1) -> None:
    """Save checkpoints of two ranks that have seen all samples, bar one of a step."""
    training = Training(store, begin(store).attempt, keep=1)
    order = SampleOrder(50, global_batch=8, seed=1)
    ledgers = [Ledger(), Ledger()]
    for step in range(20):
        for rank, ledger in enumerate(ledgers):
            seen = order.share(step, rank, 2)
            ledger.add(seen[1:] if (step, rank) == (spoilt, 0) else seen, step)
        if step in (11, 19):
            about = {"step": step + 1, "began_at": 0, "world_size": 2, "order": asdict(order)}
            files = {SESSION_FILE: json.dumps(about).encode()}
            for rank, ledger in enumerate(ledgers):
                content = io.BytesIO()
                np.savez(content, **ledger.flush(step + 1))
                files[str(rank_file("", rank, 2))] = content.getvalue()
            training.upload(f"step-{step}", files)
            training.commit(f"step-{step}")


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (-1, "steps 0 to 19 saw 148 samples: exactly the expected ones, by index"),
        (15, "saw 147 samples, and NOT exactly the expected ones: steps 15"),
        (3, "saw 147 samples, and NOT exactly the expected ones: steps before the oldest checkpoint that is kept"),
    ],
)
def test_verify_shows_if_each_step_saw_exactly_its_samples(storage: Storage, spoilt: int, message: str) -> None:
    _train_session(storage.run("mnist"), spoilt)
    result = _run(f"verify {storage.uri} --samples")
    assert (result.exit_code, message in result.stdout) == (int(spoilt >= 0), True), result.stdout
    [found] = json.loads(_run(f"verify {storage.uri} --samples --json").stdout)["runs"]
    assert (found["samples"]["exact"], found["samples"]["checked"]) == (spoilt < 0, 8)


def test_samples_that_are_not_known_are_a_problem_only_of_a_run_that_is_named(storage: Storage) -> None:
    _trained(storage, "other")
    result = _run(f"verify {storage.uri} --samples")
    assert (result.exit_code, "not known: checkpoint a has no digests of samples" in result.stdout) == (0, True)
    assert _run(f"verify {storage.uri} other --samples").exit_code == 1
    store = storage.run("mnist")
    _train_session(store)
    tear(store, str(rank_file("step-19", 1, 2)))
    result = _run(f"verify {storage.uri} mnist --samples")
    problem = "rank-00001-of-00002.npz of checkpoint step-19 is missing or damaged"
    assert (result.exit_code, problem in result.stdout) == (1, True)


def _save(store: RunStore, *saved: dict[str, Any]) -> None:
    """Save checkpoints with these arrays, or without a readable file."""
    training = Training(store, begin(store, claim(name=store.uri.rpartition("/")[2])).attempt, keep=2)
    for number, arrays in enumerate(saved):
        content = io.BytesIO()
        np.savez(content, **arrays)
        training.upload(f"step-{number}", {"arrays.npz" if arrays else "other.bin": content.getvalue()})
        training.commit(f"step-{number}")


def test_verify_prints_the_same_hash_for_the_same_newest_weights(storage: Storage) -> None:
    weights = np.arange(3.0)
    _save(storage.run("one"), {"weights": weights * 2}, {"weights": weights})
    _save(storage.run("same"), {"weights": weights, "count": np.array([7])})
    _save(storage.run("other"), {"weights": np.nextafter(weights, 9)})
    _save(storage.run("unreadable"), {})
    _save(storage.run("new"))
    found = {run["name"]: run["weights"] for run in json.loads(_done(f"verify {storage.uri} --weights --json"))["runs"]}
    assert found["one"] == found["same"] != found["other"]
    assert (found["one"]["arrays"], found["unreadable"], found["new"]) == (1, None, None)
    assert found["one"]["sha256"] in _done(f"verify {storage.uri} one --weights")
    assert "weights: no array could be read" in _done(f"verify {storage.uri} unreadable --weights")
