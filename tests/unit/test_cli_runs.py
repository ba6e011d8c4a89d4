"""`elastic-train runs` on run directories that the real code wrote, undamaged and damaged."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
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
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import Heartbeat, RunRecord, encode
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.loop.ledger import Ledger
from prefect_elastic_train.loop.order import SampleOrder
from prefect_elastic_train.loop.rank_files import rank_file
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.report.accounts import add_up
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import begin_attempt, end_attempt
from prefect_elastic_train.runs.commits import check_fence
from prefect_elastic_train.runs.heartbeat import this_process
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.inspecting import make_result
from prefect_elastic_train.runs.pruning import RunChangedError, delete_planned, plan_run
from prefect_elastic_train.runs.repair import remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory, newest_attempt_number
from prefect_elastic_train.runs.seeding import choose_source
from prefect_elastic_train.storage.opening import Storage, open_storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from tests.support.s3 import MotoServer
from tests.unit.ray_storage import Ray
from tests.unit.support import FLOW_RUN, Training, begin, claim, happening_before, private_folder, python, tear

DAY = 86400.0
LONG_AGO = 30 * DAY
CHECKPOINT_BYTES = 3
"""Of each checkpoint that Ray reports here under a name of one letter."""


@pytest.fixture
def storage() -> Iterator[Storage]:
    """A directory that holds no run yet."""
    with private_folder() as folder:
        yield open_storage(LocalStorageSettings(path=folder))


def _run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["runs", *arguments], input=answer)


def _done(*arguments: str, answer: str | None = None) -> str:
    result = _run(*arguments, answer=answer)
    assert result.exit_code == 0, result.output
    return result.stdout


def _refused(*arguments: str) -> str:
    result = _run(*arguments)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    return result.stderr


def _json(*arguments: str) -> Any:
    return json.loads(_done(*arguments, "--json"), parse_constant=pytest.fail)


def _local(storage: Storage, name: str) -> LocalRunStore:
    return LocalRunStore(f"{storage.uri}/{name}")


def _trained(
    storage: Storage, name: str, checkpoints: str = "abc", flow_run: str = FLOW_RUN, **arguments: Any
) -> LocalRunStore:
    """Train a run by a driver on another machine, which goes on without a heartbeat."""
    store = _local(storage, name)
    ray = Ray(store, begin(store, claim(flow_run, name=name, **arguments)).attempt).start()
    for number, checkpoint in enumerate(checkpoints):
        ray.report(checkpoint, epoch=number, loss=1.0 / (number + 1))
    return store


def _end(store: LocalRunStore, outcome: Outcome = Outcome.COMPLETED, message: str = "", **more: Any) -> None:
    end_attempt(store, newest_attempt_number(store), outcome.value, message, **more)


def _over(storage: Storage, name: str = "mnist", outcome: Outcome = Outcome.USER_ERROR) -> LocalRunStore:
    """A run that ended long ago."""
    store = _trained(storage, name)
    _end(store, outcome)
    _make_older(store, LONG_AGO)
    return store


def _make_older(store: RunStore, seconds: float) -> None:
    """Set back all times that the records hold."""
    for name in store.file_sizes(layout.STATE_FOLDER) or {}:
        record = json.loads(store.read(f"{layout.STATE_FOLDER}/{name}") or b"")
        older = {field: record[field] - seconds for field in ("at", "started_at", "created_at") if field in record}
        store.replace(f"{layout.STATE_FOLDER}/{name}", json.dumps({**record, **older}).encode())


def _beat(store: LocalRunStore, age: float, interval: float = 0.05) -> None:
    beat = Heartbeat(attempt=1, beat=7, interval_seconds=interval, at=time.time() - age)
    store.replace(layout.HEARTBEAT, encode(beat))


def _claim_only(storage: Storage) -> None:
    """Create a run that no attempt has begun."""
    record = RunRecord(name="claimed", creator=claim().request.owner, fingerprint=claim().request.fingerprint)
    _local(storage, "claimed").create(layout.RUN, encode(record))


def _interrupt_upload(store: Any, name: str = "d") -> str:
    """Begin to upload a checkpoint and return its folder."""
    folder = physical_name(name, newest_attempt_number(store))
    Ray(store, newest_attempt_number(store)).upload(folder, {"model.pt": b"hal"})
    return folder


def _tell(store: LocalRunStore, *events: ev.Event) -> None:
    lines = b"\n".join(ev.encode_event(event).encode() for event in events)
    store.create(f"{layout.EVENTS}/0001-000.jsonl", lines)


def _own_process(**arguments: Any) -> Any:
    return {**this_process(), **arguments}


def _everything(storage: Storage) -> dict[str, bytes]:
    root = Path(storage.uri)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _summaries(storage: Storage) -> dict[str, Any]:
    return {run["name"]: run for run in _json("list", storage.uri)["runs"]}


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"{prefect_elastic_train.__version__}\n"


def test_the_list_of_commands_says_of_each_what_it_says_of_itself_and_loads_none() -> None:
    for command, (_, words) in COMMANDS.items():
        assert words.rstrip(".") in " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    done = python(
        "from prefect_elastic_train.cli import app\n"
        "try: app(['--help'])\n"
        "finally: print(sorted({'pydantic', 'prefect_elastic_train.cli.runs'} & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in COMMANDS)


def test_list_tells_of_each_run_where_it_stands(storage: Storage) -> None:
    _trained(storage, "alive", **_own_process())
    _end(_trained(storage, "done"))
    _end(_trained(storage, "broken"), Outcome.USER_ERROR, "ValueError: no\nmore of it")
    _end(_trained(storage, "stopped"), Outcome.CANCELLED)
    _trained(storage, "gone", **_own_process(pid=2**22 + 1))
    _beat(_trained(storage, "beating"), age=1, interval=60)
    _beat(_trained(storage, "silent"), age=3600)
    _make_older(_local(storage, "silent"), 3600)
    _beat(_trained(storage, "slow"), age=60)
    _beat(_trained(storage, "ahead"), age=-3600)
    _local(storage, "raw").create(layout.SNAPSHOT, b"of Ray Train alone")
    _claim_only(storage)
    runs = _summaries(storage)
    assert {name: (run["state"], run["outcome"], run["life"]) for name, run in runs.items()} == {
        "alive": ("training", "", "alive"),
        "done": ("completed", "completed", None),
        "broken": ("failed", "user_error", None),
        "stopped": ("cancelled", "cancelled", None),
        "gone": ("died", "", "dead"),
        "beating": ("training", "", "alive"),
        "silent": ("died", "", "dead"),
        "slow": ("unknown", "", "unknown"),
        "ahead": ("unknown", "", "unknown"),
        "claimed": ("not_begun", "", None),
    }
    assert runs["claimed"]["flow_run_name"] == "eager-otter"
    assert runs["broken"]["detail"] == "ValueError: no"
    assert runs["gone"]["detail"] == f"process {2**22 + 1} on this machine exited"
    assert runs["ahead"]["detail"] == "last active -3600 s ago on elsewhere"
    text = _done("list", storage.uri)
    assert "failed: user_error" in text
    assert len(text.splitlines()) == 1 + len(runs)


def test_list_tells_how_far_a_run_has_come_and_what_it_holds(storage: Storage) -> None:
    store = _trained(storage, "mnist", "ab")
    at = json.loads(store.read(layout.commit_name(1, 2)) or b"")["at"]
    run = _summaries(storage)["mnist"]
    assert (run["uri"], run["attempts"], run["reports"], run["metrics"]) == (store.uri, 1, 2, {"epoch": 1, "loss": 0.5})
    assert (run["checkpoints"], run["size_bytes"]) == (2, 2 * CHECKPOINT_BYTES)
    assert run["last_commit_at"] == run["last_activity_at"] == at
    assert (run["flow_run_id"], run["flow_run_name"], run["flow_name"]) == (FLOW_RUN, "eager-otter", "nightly")
    row = _done("list", storage.uri).splitlines()[1].split("  ")
    cells = [cell.strip() for cell in row if cell.strip()]
    assert re.fullmatch(r"[\d.]+ s", cells.pop(7))
    assert cells == ["mnist", "unknown", "1", "2", "epoch=1 loss=0.5", "2", "6 Bytes", "eager-otter"]


def test_what_is_no_json_and_what_steers_a_terminal_is_not_printed(storage: Storage) -> None:
    store = _local(storage, "mnist")
    metrics: dict[str, Any] = {"loss": math.nan, "best": math.inf, "seen": {"x": [math.nan]}}
    Training(store, begin(store).attempt).report("a", metrics)
    _end(store, Outcome.USER_ERROR, "\x1b[2J[bold]gone[/bold]", result={"metrics": metrics})
    metrics = {"loss": None, "best": None, "seen": {"x": [None]}}
    assert _summaries(storage)["mnist"]["metrics"] == metrics
    shown = _json("show", storage.uri, "mnist")
    assert shown["commit"]["snapshot"]["checkpoint_results"][0]["metrics"] == metrics
    assert "loss=nan" in _done("list", storage.uri)
    text = _done("show", storage.uri, "mnist")
    assert "\x1b[2J" not in text
    assert "[bold]gone[/bold]" in text


def test_what_cannot_be_looked_at_is_one_line_that_says_why(storage: Storage) -> None:
    Path(storage.uri, "notes").mkdir()
    Path(storage.uri, "notes", "todo.txt").write_text("eat")
    assert _json("list", storage.uri) == {"storage": storage.uri, "runs": []}
    assert _done("list", storage.uri) == _done("verify", storage.uri) == f"no runs in {storage.uri}\n"
    assert _done("prune", storage.uri, "--older-than", "0", "--yes") == f"nothing to delete in {storage.uri}\n"
    assert "is a folder without a run" in _refused("show", storage.uri, "notes")
    _trained(storage, "mnist")
    for command in ("list", "verify", "prune"):
        assert "there is no directory /nowhere" in _refused(command, "/nowhere")
    for command, name in (("show", "mnits"), ("verify", "mnits"), ("prune", "..")):
        assert f"there is no run '{name}' in" in _refused(command, storage.uri, name)


def test_a_run_that_may_not_be_read_or_is_of_an_older_version_does_not_hide_the_others(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trained(storage, "mine")
    secret, old = _trained(storage, "secret"), _trained(storage, "old")
    record = (old.read(layout.attempt_name(1)) or b"").replace(b'"schema_version": 2', b'"schema_version": 1')
    old.replace(layout.attempt_name(1), record)
    allowed = LocalRunStore._list

    def names(self: LocalRunStore, folder: str) -> tuple[list[str], list[str]]:
        if self.path == secret.path:  # root, who may run this test, is refused nothing
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return allowed(self, folder)

    monkeypatch.setattr(LocalRunStore, "_list", names)
    before = _everything(storage)
    result = _run("list", storage.uri, "--json")
    assert result.exit_code == 1
    states = {run["name"]: run["state"] for run in json.loads(result.stdout)["runs"]}
    assert states == {"mine": "unknown", "secret": "unreadable", "old": "unreadable"}
    assert result.stderr.startswith("error: 2 of 3 runs cannot be read: ")
    assert "Permission denied" in _refused("show", storage.uri, "secret")
    assert "continue with that version, or use another run_name" in _refused("show", storage.uri, "old")
    assert "skipped: old: the run was written by an older version" in _done("prune", storage.uri, "mine", "old")
    with pytest.raises(AttemptFailedError, match="written by an older version") as refused:
        begin(old)
    assert refused.value.outcome is Outcome.INVALID
    assert _everything(storage) == before


def test_looking_at_a_directory_imports_neither_ray_nor_prefect(storage: Storage) -> None:
    _end(_trained(storage, "mnist"))
    done = python(
        "from prefect_elastic_train.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print(sorted({'ray', 'prefect', 'pyarrow', 'fsspec'} & set(sys.modules)))",
        *["runs", "list", storage.uri],
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "mnist" in done.stdout


def test_show_tells_all_about_a_run(storage: Storage) -> None:
    store = _trained(storage, "mnist", "ab", config={"lr": 0.1})
    _end(store, Outcome.DRIVER_LOST, "killed\nby somebody")
    store.delete_folder("b")
    second = Ray(store, begin(store, claim(config={"lr": 0.1})).attempt).start()
    second.report("c", epoch=2, loss=0.3)
    result = {"run_name": "mnist", "metrics": {"loss": 0.3}, "checkpoint_uri": f"{store.uri}/c", "history": [{}]}
    _end(store, result=result)
    at = time.time() - 100
    _tell(
        store,
        ev.AttemptStarted(attempt=1, at=at, run_name="mnist", run_uri=store.uri),
        ev.WorkerGroupStarted(attempt=1, at=at, world_size=2),
        ev.CheckpointCommitted(attempt=1, at=at + 10, index=1, checkpoint="a", size_bytes=3, metrics={}),
        ev.WorkerFailed(attempt=1, at=at + 20, errors={"0": "x"}, retried=True, reports_lost=2),
        ev.WorkerGroupStarted(attempt=1, at=at + 20, world_size=1),
        ev.WorkerGroupResized(attempt=1, at=at + 30, old_size=1, new_size=2),
        ev.WorkersPreempted(attempt=1, at=at + 30, errors={}, retried=True),
        ev.StorageWaited(attempt=1, at=at + 30, who="controller", seconds=4.5),
    )
    details = _json("show", storage.uri, "mnist")
    assert details["summary"] == _summaries(storage)["mnist"]
    assert details["run"]["creator"]["flow_run_name"] == "eager-otter"
    assert list(details["run"]["fingerprint"]["config"]) == ["lr"]
    first, last = details["attempts"]
    assert (first["number"], first["ended"]["outcome"], first["record"]["base"]) == (1, "driver_lost", None)
    assert (last["ended"]["outcome"], last["record"]["base"], last["record"]["dropped"]) == ("completed", [1, 2], ["b"])
    accounts = details["accounts"]
    counted = ("worker_failures", "preemptions", "resizes", "reports_lost", "storage_wait_seconds")
    assert [accounts[name] for name in counted] == [1, 1, 1, 2, 4.5]
    assert [world["size"] for world in accounts["world_sizes"]] == [2, 1]
    assert details["goodput"] == pytest.approx(10 / accounts["time"]["wall_seconds"], rel=0.01)
    assert (details["commit"]["attempt"], list(details["commit"]["manifest"])) == (2, ["a", "c"])
    assert last["ended"]["result"] == result
    text = _done("show", storage.uri, "mnist")
    for words in ("2 → 1", "worker failures: 1, preemptions: 1, resizes: 1, reports done again: 2", "4.5 s"):
        assert words in text
    assert "checkpoint b was dropped: 2 of 2 files are missing" in text
    assert re.search(r"c +2 +epoch=2 loss=0.3 +3 Bytes +latest, best", text)


def test_a_whole_run_is_told_to_be_whole_and_nothing_is_written(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _local(storage, "raw").create(layout.SNAPSHOT, b"of Ray Train alone")
    _interrupt_upload(store, "epochs/4")
    store.create("plots/loss.svg", b"<svg/>")
    before = _everything(storage)
    text = _done("verify", storage.uri)
    assert "mnist: whole\n" in text
    assert "  a resume starts from checkpoint c of commit 0001-000003\n" in text
    assert "plots" not in text
    assert "raw" not in text, "another program's"
    assert _everything(storage) == before


Damage = Callable[[LocalRunStore], object]


@pytest.mark.parametrize(
    ("damage", "repair"),
    [
        (lambda store: store.delete_folder("c"), "checkpoint c was dropped: 2 of 2 files are missing, first model.pt"),
        (lambda store: tear(store, layout.commit_name(1, 3)), "commit 0001-000003 is torn and was skipped"),
    ],
)
def test_damage_is_told_with_what_a_resume_would_do_about_it_and_it_does_that(
    storage: Storage, damage: Damage, repair: str
) -> None:
    store = _trained(storage, "mnist")
    _trained(storage, "other")
    damage(store)
    before = _everything(storage)
    result = _run("verify", storage.uri, "--json")
    assert result.exit_code == 1
    found, other = json.loads(result.stdout)["runs"]
    assert (other["whole"], found["whole"], found["checkpoint"]) == (True, False, "b")
    assert repair in " ".join(found["repairs"])
    text = _run("verify", storage.uri, "mnist").stdout
    assert text.startswith("mnist: DAMAGED\n  a resume starts from checkpoint b")
    assert _everything(storage) == before
    begun = begin(store)
    assert (begun.point.checkpoint, begun.point.repairs) == (found["checkpoint"], found["repairs"])


def test_a_run_without_any_commit_left_is_damaged_and_refused_and_not_pruned(storage: Storage) -> None:
    store = _over(storage)
    _interrupt_upload(store)
    for commit in RunDirectory(store).commit_ids:
        store.delete(layout.commit_name(*commit))
    result = _run("verify", storage.uri)
    assert result.exit_code == 1
    assert "a resume is refused: no commit of" in result.stdout
    before = _everything(storage)
    assert "skipped: mnist: no commit of" in _done("prune", storage.uri, "--yes")
    assert _everything(storage) == before


@pytest.mark.parametrize("choice", ["latest", "best"])
def test_all_who_ask_for_the_newest_checkpoint_find_the_one_before_a_damaged_one(storage: Storage, choice: str) -> None:
    store = _trained(storage, "mnist", "abcd")
    tear(store, "d/model.pt")
    assert make_result(store, add_up(read_history(store))).checkpoint_uri == f"{store.uri}/c"
    wanted = claim(name="tuned", resume_from=f"mnist@{choice}").request
    source = choose_source(storage, wanted)
    assert source.folder == "c"
    assert "of run 'mnist': checkpoint d was dropped: model.pt has" in source.notes[0]
    # Resumed, by a loop that has nothing left to do.
    begun = begin(store, claim(name="mnist"))
    assert Ray(store, begun.attempt).start().latest == begun.point.checkpoint == "c"
    assert remove_leftovers(store, begun.attempt) == ["d"]
    result = make_result(store, add_up(read_history(store)))
    _end(store, result=result.model_dump(mode="json"))
    assert (result.checkpoint_uri, result.metrics["epoch"]) == (f"{store.uri}/c", 2)
    assert [best.uri for best in result.best_checkpoints] == [f"{store.uri}/{name}" for name in "abc"]
    source = choose_source(storage, wanted)
    assert (source.folder, source.notes) == ("c", [])
    shown = _json("show", storage.uri, "mnist")
    assert shown["commit"]["snapshot"]["latest_checkpoint_result"]["checkpoint_dir_name"] == "c"
    assert (shown["summary"]["metrics"], shown["summary"]["checkpoints"]) == (result.metrics, 3)
    [found] = _json("verify", storage.uri)["runs"]
    assert (found["whole"], found["commit"], found["checkpoint"]) == (True, "0001-000004", "c")
    with pytest.raises(AttemptFailedError, match="run 'mnist' has no checkpoint 'd', it has a, b, c"):
        choose_source(storage, claim(name="tuned", resume_from="mnist@d").request)


def test_prune_shows_what_goes_asks_and_deletes_that_only(storage: Storage) -> None:
    store = _local(storage, "mnist")
    training = Training(store, begin(store).attempt, keep=2)
    for name in ("a", "b", "c"):
        training.report(name)  # nobody deletes what is kept no longer: `a`
    tear(store, "c/model.pt")
    assert begin(store).point.dropped == ["c"]
    upload = _interrupt_upload(store, "sub/d")
    store.create("sub/notes.txt", b"of a person")
    Path(store.path, "plots").mkdir()
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    before = _everything(storage)
    declined = _run("prune", storage.uri, answer="n\n")
    assert declined.exit_code == 1
    assert "no commit needs it" in declined.stdout
    assert "Delete this for good?" in declined.stdout
    assert "Delete this for good?" not in _done("prune", storage.uri, "--dry-run")
    assert _everything(storage) == before
    deleted = _done("prune", storage.uri, answer="y\n")
    for folder in ("a", "c", upload):
        assert f"deleted mnist {folder}\n" in deleted
    gone = tuple(f"mnist/{folder}/" for folder in ("a", "c", upload))
    assert _everything(storage) == {name: data for name, data in before.items() if not name.startswith(gone)}
    assert store.folders() == [layout.STATE_FOLDER, "b", "plots", "sub"]
    assert f"nothing to delete in {storage.uri}" in _done("prune", storage.uri, "--yes")
    begun = begin(store)
    assert (begun.point.checkpoint, begun.point.repairs) == ("b", [])


def test_nothing_is_pruned_that_a_repair_may_fall_back_to(storage: Storage) -> None:
    store = _local(storage, "mnist")
    ray = Ray(store, begin(store).attempt, num_to_keep=2).start()
    for name in "abcd":
        ray.report(name)
    for name in "ab":  # their deletion failed, so that older commits are whole yet
        ray.upload(name, {"model.pt": name.encode(), "rank-0/optim.pt": b"12"})
    tear(store, "d/model.pt")
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    assert RunDirectory(store).resume_point.checkpoint == "c"
    assert "nothing to delete" in _done("prune", storage.uri, "--yes")
    tear(store, "c/model.pt")  # and then the resume point goes, too
    assert begin(store).point.checkpoint == "b"


def test_what_only_ray_s_mirror_names_is_not_pruned_while_a_commit_is_broken(storage: Storage) -> None:
    store = _trained(storage, "mnist", "ab")
    mirror = store.read(layout.SNAPSHOT) or b""
    Ray(store, 1, num_to_keep=1).start().report("c")
    store.delete(layout.commit_name(1, 2))  # which named `b` first
    store.replace(layout.SNAPSHOT, mirror)
    folder = physical_name("b", 1)
    for name in ("a", folder):
        Ray(store, 1).upload(name, {"model.pt": name.encode(), "rank-0/optim.pt": b"12"})
    store.replace(layout.SNAPSHOT, mirror.replace(b'"b"', f'"{folder}"'.encode()))
    tear(store, "c/model.pt")
    assert not RunDirectory(store).leftovers
    store.delete(layout.SNAPSHOT)
    assert list(RunDirectory(store).leftovers) == [folder]


def test_prune_leaves_alone_what_lives_and_what_may(storage: Storage) -> None:
    runs = {
        "alive": _trained(storage, "alive", **_own_process()),
        "beating": _trained(storage, "beating"),
        "unknown": _trained(storage, "unknown"),
        "ending": _trained(storage, "ending"),
    }
    for store in runs.values():
        _interrupt_upload(store)
        _make_older(store, LONG_AGO)
    _beat(runs["beating"], age=1, interval=60)
    _beat(runs["unknown"], age=60)
    _end(runs["ending"])
    _claim_only(storage)
    _make_older(_local(storage, "claimed"), DAY / 2)
    before = _everything(storage)
    text = _done("prune", storage.uri, "--older-than", "0", "--yes")
    trained, active = "it is being trained, or may be:", "it was active just now, or was claimed within a day"
    reasons = {"alive": f"{trained} process", "beating": f"{trained} last active 1 s ago", "unknown": trained}
    for name, reason in {**reasons, "ending": active, "claimed": active}.items():
        assert f"skipped: {name}: {reason}" in text
    assert _everything(storage) == before


def test_a_heart_that_beats_by_a_clock_far_behind_is_seen_before_anything_goes(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _make_older(store, LONG_AGO)
    _beat(store, age=LONG_AGO, interval=0.5)
    assert _summaries(storage)["mnist"]["state"] == "died"
    later = threading.Timer(0.4, lambda: _beat(store, age=LONG_AGO - 1, interval=0.5))
    later.start()
    planned = plan_run(RunDirectory(store), DAY)
    later.join()
    assert (planned.skipped, planned.deletions) == ("it is being trained: its heartbeat changes", [])


@pytest.mark.parametrize("older_than", [None, DAY])
def test_nothing_goes_once_an_attempt_has_begun_since_the_plan(storage: Storage, older_than: float | None) -> None:
    store = _over(storage)
    folder = _interrupt_upload(store)
    planned = plan_run(RunDirectory(store), older_than)
    assert [deletion.folder for deletion in planned.deletions] == ["" if older_than else folder]
    begin(store)
    before = _everything(storage)
    with pytest.raises(RunChangedError, match="run mnist has changed meanwhile"):
        list(delete_planned(store, planned))
    assert _everything(storage) == before


@pytest.mark.parametrize("is_late", [False, True])
def test_nothing_goes_once_a_driver_thought_dead_has_committed(storage: Storage, is_late: bool) -> None:
    store = _trained(storage, "mnist")
    upload = _interrupt_upload(store)
    ray = Ray(store, 1).start()
    _make_older(store, LONG_AGO)
    _beat(store, age=LONG_AGO)
    kept = plan_run(RunDirectory(store)).skipped
    assert kept.startswith("its newest attempt has no end: resume the run, which removes")
    planned = plan_run(RunDirectory(store), DAY)
    late = happening_before(
        store, f"create {layout.attempt_name(2)}", lambda: ray.report("e")
    )  # between the last look and the fence
    if not is_late:
        ray.report("e")
    with pytest.raises(RunChangedError, match="run mnist has changed meanwhile"):
        list(delete_planned(late if is_late else store, planned))
    check_fence(store, 1)
    assert RunDirectory(store).resume_point.checkpoint == "e"
    assert remove_leftovers(store, 1) == [upload]


def test_older_than_deletes_whole_runs_that_are_over_and_old(storage: Storage) -> None:
    for name, outcome in {"done": Outcome.COMPLETED, "broken": Outcome.USER_ERROR}.items():
        _over(storage, name, outcome)
    died = _trained(storage, "died")
    _make_older(died, LONG_AGO)
    _beat(died, age=LONG_AGO)
    recent = _trained(storage, "recent")
    _end(recent)
    _make_older(recent, 3 * DAY)
    assert "nothing to delete" in _done("prune", storage.uri, "--yes")
    shown = _done("prune", storage.uri, "--older-than", "7", "--dry-run")
    assert "completed, last activity 30.0 days ago" in shown
    assert len(_summaries(storage)) == 4
    _done("prune", storage.uri, "done", "--older-than", "7", "--yes")
    assert sorted(os.listdir(storage.uri)) == ["broken", "died", "recent"]
    _done("prune", storage.uri, "--older-than", "7", "--yes")
    assert os.listdir(storage.uri) == ["recent"]


def test_a_driver_that_begins_while_a_run_is_deleted_is_told_and_another_pruner_leaves_it_alone(
    storage: Storage,
) -> None:
    store = _over(storage, outcome=Outcome.DRIVER_LOST)

    def interfere() -> None:
        with pytest.raises(AttemptFailedError, match="belongs to flow run 'elastic-train runs prune'"):
            begin_attempt(store, claim())
        assert "skipped: mnist: it is being deleted: process" in _done("prune", storage.uri, "--yes")

    list(delete_planned(happening_before(store, "delete b", interfere), plan_run(RunDirectory(store), DAY)))
    assert os.listdir(storage.uri) == []
    assert begin(store).point.checkpoint == ""


def test_a_deletion_that_another_flow_run_stops_by_taking_over_is_finished_by_the_next(storage: Storage) -> None:
    store = _over(storage)

    def take_over() -> None:
        begun = store.read(layout.attempt_name(2)) or b""
        store.create(layout.attempt_name(3), begun.replace(b'"attempt": 2', b'"attempt": 3'))

    with pytest.raises(RunChangedError, match="run mnist was started again while it was deleted"):
        list(delete_planned(happening_before(store, "delete b", take_over), plan_run(RunDirectory(store), DAY)))
    assert store.folders() == [layout.STATE_FOLDER, "b", "c"]
    pruner = json.loads(store.read(layout.attempt_name(3)) or b"")
    pruner["owner"]["pid"] = 2**22 + 1  # a pruner that was killed
    store.replace(layout.attempt_name(3), json.dumps(pruner).encode())
    assert _summaries(storage)["mnist"]["state"] == "deleting"
    assert "its deletion was interrupted" in _done("prune", storage.uri, "--dry-run")
    _done("prune", storage.uri, "--yes")
    assert os.listdir(storage.uri) == []


@pytest.fixture
def bucket(server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A bucket that the ambient credentials open."""
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return open_storage(S3StorageSettings(bucket_path=f"{server.create_bucket('cli-runs')}/runs"))


def test_an_object_store_is_looked_at_checked_and_pruned_alike(bucket: Storage, server: MotoServer) -> None:
    store: Any = bucket.run("mnist")
    ray = Ray(store, begin(store).attempt).start()
    for name in "ab":
        ray.report(name, loss=0.5)
    folder = _interrupt_upload(store)
    message = {"Bucket": "cli-runs", "Key": f"runs/mnist/{folder}/large.pt"}
    server.client().create_multipart_upload(**message)
    end_attempt(store, 1, Outcome.USER_ERROR.value)
    _make_older(store, LONG_AGO)
    assert _summaries(bucket)["mnist"]["size_bytes"] == 2 * CHECKPOINT_BYTES
    assert re.search(rf"{re.escape(folder)} +3 Bytes", _done("prune", bucket.uri, "--dry-run"))
    assert f"deleted mnist {folder}" in _done("prune", bucket.uri, "--yes")
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket="cli-runs")
    assert store.folders() == [layout.STATE_FOLDER, "a", "b"]
    _done("prune", bucket.uri, "--older-than", "7", "--yes")
    assert bucket.run_names() == []
    assert "Contents" not in server.client().list_objects_v2(Bucket="cli-runs")
    assert "create the bucket" in _refused("list", "s3://no-such-bucket/runs")


def _of_session(step: int, since: int, spoilt: int, instead: list[int]) -> dict[str, bytes]:
    """The files of a checkpoint of two ranks that have seen all samples, bar one of a step or with others instead."""
    order = SampleOrder(50, global_batch=8, seed=1)
    about = {"step": step, "began_at": 0, "world_size": 2, "order": asdict(order)}
    files = {SESSION_FILE: json.dumps(about).encode()}
    for rank, begins in ((0, 0), (1, since)):  # rank 0 has what all had seen until the newest start
        ledger, content = Ledger(begins), io.BytesIO()
        for number in range(begins, step):
            seen = order.share(number, rank, 2) if number >= since else order.indices(number)
            is_spoilt = (number, rank) == (spoilt, 0)
            ledger.add(np.append(seen[1:], np.array(instead, dtype=seen.dtype)) if is_spoilt else seen, number)
            if number == since - 1:
                ledger.flush(since)
        np.savez(content, **ledger.flush(step))
        files[str(rank_file("", rank, 2))] = content.getvalue()
    return files


@pytest.mark.parametrize(
    ("spoilt", "instead", "says"),
    [
        (-1, [], "steps 0 to 19 saw 148 samples: exactly the expected ones, by index"),
        (15, [], "saw 147 samples, and NOT exactly the expected ones: steps 15"),
        (15, [49], "saw 148 samples, and NOT exactly the expected ones: steps 15"),
        (3, [], "saw 147 samples, and NOT exactly the expected ones: steps before the oldest checkpoint that is kept"),
    ],
)
def test_whether_each_step_saw_exactly_its_samples_is_told(
    storage: Storage, spoilt: int, instead: list[int], says: str
) -> None:
    store = _local(storage, "mnist")
    training = Training(store, begin(store).attempt, keep=1)
    for name, files in (("a", _of_session(12, 0, spoilt, instead)), ("b", _of_session(20, 12, spoilt, instead))):
        training.upload(name, files)
        training.commit(name)
    result = _run("verify", storage.uri, "--samples")
    assert (result.exit_code, says in result.stdout) == (int(spoilt >= 0), True), result.stdout
    [found] = json.loads(_run("verify", storage.uri, "--samples", "--json").stdout)["runs"]
    assert (found["samples"]["exact"], found["samples"]["checked"]) == (spoilt < 0, 8)
    _trained(storage, "other")
    result = _run("verify", storage.uri, "--samples")
    assert result.exit_code == int(spoilt >= 0), "of a loop without a session nothing is known"
    assert _run("verify", storage.uri, "other", "--samples").exit_code == 1, "which is told who asks for it"
    assert "not known: checkpoint a has no digests of them" in result.stdout
    (rank,) = Path(store.path).glob("b*/rank-00001-of-00002.npz")
    rank.write_bytes(rank.read_bytes()[:-20])
    result = _run("verify", storage.uri, "mnist", "--samples")
    assert (result.exit_code, "rank-00001-of-00002.npz of checkpoint b is missing or damaged" in result.stdout) == (
        1,
        True,
    )
