"""`elastic-train runs`: what it tells of runs that the real code has written and what may have happened to them."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyarrow import fs
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Reported,
    StorageWaited,
    WaitingForCapacity,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
    encode_event,
)
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import Heartbeat, RunRecord, encode
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.report.accounts import add_up
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import begin_attempt, end_attempt, host_id, process_start
from prefect_elastic_train.runs.commits import (
    all_attempts,
    all_commits,
    check_fence,
    newest_attempt,
)
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.pruning import RunChangedError, carry_out, plan_run
from prefect_elastic_train.runs.reading import make_result
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.runs.seeding import Source, choose_source
from prefect_elastic_train.storage.opening import Storage, open_storage
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.s3 import MotoServer
from tests.unit.ray_storage import Ray
from tests.unit.support import (
    FLOW_RUN,
    Training,
    begin,
    claim,
    private_folder,
    python,
    tear,
)

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
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, "not one line"
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
    end_attempt(store, newest_attempt(store), outcome.value, message, **more)


def _make_older(store: LocalRunStore, seconds: float) -> None:
    """Set back all times that the records hold."""
    for path in Path(store.path, layout.STATE_FOLDER).rglob("*.json"):
        record = json.loads(path.read_bytes())
        for name in ("at", "started_at", "created_at"):
            if name in record:
                record[name] -= seconds
        path.write_text(json.dumps(record))


def _beat(store: LocalRunStore, age: float, attempt: int = 1, interval: float = 0.05) -> None:
    beat = Heartbeat(attempt=attempt, beat=7, interval_seconds=interval, at=time.time() - age)
    store.replace(layout.HEARTBEAT, encode(beat))


def _interrupt_upload(store: LocalRunStore, name: str = "d") -> str:
    """Begin to upload a checkpoint and return its folder."""
    folder = physical_name(name, newest_attempt(store))
    Ray(store, newest_attempt(store)).upload(folder, {"model.pt": b"hal"})
    return folder


def _own_process(**arguments: Any) -> Any:
    return {"host": host_id(), "pid": os.getpid(), "process_started_at": process_start(os.getpid()), **arguments}


def _everything(storage: Storage) -> dict[str, bytes]:
    root = Path(storage.uri)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _summaries(storage: Storage) -> dict[str, Any]:
    return {run["name"]: run for run in _json("list", storage.uri)["runs"]}


# list


def test_list_tells_of_each_run_where_it_stands(storage: Storage) -> None:
    _trained(storage, "alive", **_own_process())
    _end(_trained(storage, "done"))
    _end(_trained(storage, "broken"), Outcome.USER_ERROR, "ValueError: no\nmore of it")
    _end(_trained(storage, "lost"), Outcome.DRIVER_LOST, "killed")
    _end(_trained(storage, "stopped"), Outcome.CANCELLED)
    _trained(storage, "gone", **_own_process(pid=2**22 + 1))
    _beat(_trained(storage, "beating"), age=1, interval=5)
    _beat(_trained(storage, "silent"), age=3600)
    _beat(_trained(storage, "slow"), age=60)
    _beat(_trained(storage, "ahead"), age=-3600)
    runs = _summaries(storage)
    assert {name: (run["state"], run["outcome"], run["life"]) for name, run in runs.items()} == {
        "alive": ("training", "", "alive"),
        "done": ("completed", "completed", None),
        "broken": ("failed", "user_error", None),
        "lost": ("failed", "driver_lost", None),
        "stopped": ("cancelled", "cancelled", None),
        "gone": ("died", "", "dead"),
        "beating": ("training", "", "alive"),
        "silent": ("died", "", "dead"),
        "slow": ("unknown", "", "unknown"),
        "ahead": ("unknown", "", "unknown"),
    }
    assert runs["broken"]["detail"] == "ValueError: no"
    assert runs["gone"]["detail"] == f"process {2**22 + 1} on this machine is gone"
    assert "ahead of this machine's clock on elsewhere" in runs["ahead"]["detail"]
    text = _done("list", storage.uri)
    assert "failed: user_error" in text
    assert len(text.splitlines()) == 1 + len(runs)


def test_list_tells_how_far_a_run_has_come_and_what_it_holds(storage: Storage) -> None:
    store = _trained(storage, "mnist", "ab")
    commit = json.loads(store.read(layout.commit_name(1, 2)) or b"")
    [run] = _json("list", storage.uri)["runs"]
    assert run == {
        "name": "mnist",
        "uri": store.uri,
        "state": "unknown",
        "outcome": "",
        "life": "unknown",
        "detail": run["detail"],
        "attempts": 1,
        "reports": 2,
        "metrics": {"epoch": 1, "loss": 0.5},
        "checkpoints": 2,
        "size_bytes": 2 * CHECKPOINT_BYTES,
        "last_commit_at": commit["at"],
        "last_activity_at": commit["at"],
        "flow_run_id": FLOW_RUN,
        "flow_run_name": "eager-otter",
        "flow_name": "nightly",
    }
    row = _done("list", storage.uri).splitlines()[1].split("  ")
    cells = [cell.strip() for cell in row if cell.strip()]
    age = cells.pop(7)
    assert cells == ["mnist", "unknown", "1", "2", "epoch=1 loss=0.5", "2", "6 B", "eager-otter"]
    assert re.fullmatch(r"[\d.]+ s", age)


def test_a_metric_that_is_no_json_becomes_null(storage: Storage) -> None:
    store = _local(storage, "mnist")
    metrics: dict[str, Any] = {"loss": math.nan, "best": math.inf, "seen": {"x": [math.nan]}}
    Training(store, begin(store).attempt).report("a", metrics)
    _end(store)
    metrics = {"loss": None, "best": None, "seen": {"x": [None]}}
    assert _summaries(storage)["mnist"]["metrics"] == metrics
    assert _json("show", storage.uri, "mnist")["checkpoints"][0]["metrics"] == metrics
    assert "loss=nan" in _done("list", storage.uri)


def test_a_storage_without_runs_is_said_to_have_none(storage: Storage) -> None:
    Path(storage.uri, "notes").mkdir()
    Path(storage.uri, "notes", "todo.txt").write_text("eat")
    assert _done("list", storage.uri) == f"no runs in {storage.uri}\n"
    assert _json("list", storage.uri) == {"storage": storage.uri, "runs": []}
    assert _done("verify", storage.uri) == f"no runs in {storage.uri}\n"
    assert _done("prune", storage.uri, "--older-than", "0", "--yes") == f"nothing to delete in {storage.uri}\n"
    assert "is a folder without a run" in _refused("show", storage.uri, "notes")


def test_a_run_that_another_program_wrote_and_one_not_begun_are_told(storage: Storage) -> None:
    _raw_ray(storage, "raw")
    begun = _local(storage, "claimed")
    record = RunRecord(name="claimed", creator=claim().request.owner, fingerprint=claim().request.fingerprint)
    begun.create(layout.RUN, encode(record))
    runs = _summaries(storage)
    assert (runs["raw"]["state"], runs["raw"]["checkpoints"], runs["raw"]["metrics"]) == ("foreign", 2, {"acc": 2})
    assert (runs["claimed"]["state"], runs["claimed"]["flow_run_name"]) == ("not_begun", "eager-otter")
    assert "another program's" in _done("list", storage.uri)


def _raw_ray(storage: Storage, name: str) -> LocalRunStore:
    """Write a run as Ray Train does without us."""
    store = _local(storage, name)
    ray = Ray(store, 0)
    ray.storage.storage_filesystem = fs.LocalFileSystem()
    ray.start()
    ray.report("a", acc=1)
    ray.report("b", acc=2)
    return store


@pytest.mark.parametrize(
    "tear_it",
    [layout.RUN, layout.attempt_name(1), layout.ended_name(1), layout.SNAPSHOT, layout.commit_name(1, 3)],
)
def test_a_torn_record_hides_no_run(storage: Storage, tear_it: str) -> None:
    store = _trained(storage, "mnist", "ab")
    Ray(store, 1).start().report(physical_name("c", 1), {"model.pt": b"c"})
    _end(store)
    tear(store, tear_it)
    [run] = _json("list", storage.uri)["runs"]
    assert (run["attempts"], run["checkpoints"]) == (1, 3), "less than a resume finds"
    details = _json("show", storage.uri, "mnist") if tear_it != layout.ended_name(1) else None
    if tear_it == layout.attempt_name(1):
        assert details["attempts"][0]["torn"]
        assert run["state"] == "completed"


def test_listing_needs_few_requests_and_no_events(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    store.create(f"{layout.EVENTS}/0001-000.jsonl", b"")
    _end(store)
    asked: list[str] = []

    class Counting(LocalRunStore):
        def read(self, name: str) -> bytes | None:
            asked.append(name)
            return super().read(name)

        def names(self, folder: str) -> list[str]:
            asked.append(folder)
            return super().names(folder)

    from prefect_elastic_train.runs.inspecting import summarize

    assert summarize(Counting(store.path), "mnist") is not None
    assert len(asked) <= 6
    assert not any(layout.EVENTS in name for name in asked)


def test_hundreds_of_runs_are_listed_quickly(storage: Storage) -> None:
    _end(_trained(storage, "run-0", "ab"))
    files = _everything(storage)
    for number in range(1, 300):
        for path, data in files.items():
            copy = Path(storage.uri, path.replace("run-0", f"run-{number}", 1))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
    started_at = time.monotonic()
    assert len(_summaries(storage)) == 300
    assert time.monotonic() - started_at < 10


def test_a_run_that_may_not_be_read_does_not_hide_the_others(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(storage, "mine")
    secret = _trained(storage, "secret")
    allowed = LocalRunStore._list

    def names(self: LocalRunStore, folder: str) -> tuple[list[str], list[str]]:
        if self.path == secret.path:  # root, who may run this test, is refused nothing
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return allowed(self, folder)

    monkeypatch.setattr(LocalRunStore, "_list", names)
    result = _run("list", storage.uri, "--json")
    assert result.exit_code == 1
    states = {run["name"]: run["state"] for run in json.loads(result.stdout)["runs"]}
    assert states == {"mine": "unknown", "secret": "unreadable"}
    assert result.stderr.startswith("error: 1 of 2 runs cannot be read: ")
    assert len(result.stderr.splitlines()) == 1
    assert "Permission denied" in _refused("show", storage.uri, "secret")


@pytest.mark.parametrize("older", [layout.RUN, layout.attempt_name(1)])
def test_a_run_of_an_older_version_is_refused_in_one_line_and_hides_no_other(storage: Storage, older: str) -> None:
    _trained(storage, "new")
    store = _trained(storage, "old")
    store.replace(older, (store.read(older) or b"").replace(b'"schema_version": 2', b'"schema_version": 1'))
    before = _everything(storage)
    with pytest.raises(AttemptFailedError, match="written by an older version") as refused:
        begin(store)
    assert refused.value.outcome is Outcome.INVALID
    assert "go on with that version, or give another run_name" in _refused("show", storage.uri, "old")
    runs = json.loads(_run("list", storage.uri, "--json").stdout)["runs"]
    assert {run["name"]: run["state"] for run in runs}["new"] == "unknown"
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


# errors


def test_what_cannot_be_looked_at_is_one_line_that_says_why(storage: Storage) -> None:
    _trained(storage, "mnist")
    for command in ("list", "verify", "prune"):
        assert "there is no directory /nowhere" in _refused(command, "/nowhere")
    assert "there is no run 'mnits'" in _refused("show", storage.uri, "mnits")
    assert "is mnist meant?" in _refused("verify", storage.uri, "mnits")
    assert "there is no run '..'" in _refused("prune", storage.uri, "..", "--yes")
    assert "expected protocol://bucket/prefix" in _refused("list", "gs://")


# show


def test_show_tells_all_about_a_run(storage: Storage) -> None:
    store = _trained(storage, "mnist", "ab", config={"lr": 0.1})
    _end(store, Outcome.DRIVER_LOST, "killed\nby somebody")
    store.delete_folder("b")
    second = Ray(store, begin(store, claim(config={"lr": 0.1})).attempt).start()
    second.report("c", epoch=2, loss=0.3)
    result = {"run_name": "mnist", "metrics": {"loss": 0.3}, "checkpoint_uri": f"{store.uri}/c", "history": [{}]}
    _end(store, result=result)
    at = time.time() - 100
    events = [
        AttemptStarted(attempt=1, at=at, run_name="mnist", run_uri=store.uri),
        WorkerGroupStarted(attempt=1, at=at, world_size=2),
        CheckpointCommitted(attempt=1, at=at + 10, index=1, checkpoint="a", size_bytes=3, metrics={}),
        WorkerFailed(attempt=1, at=at + 20, errors={"0": "x"}, retried=True, reports_lost=2),
        WorkerGroupStarted(attempt=1, at=at + 20, world_size=1),
        WorkerGroupResized(attempt=1, at=at + 30, old_size=1, new_size=2),
        WorkersPreempted(attempt=1, at=at + 30, errors={}, retried=True),
        StorageWaited(attempt=1, at=at + 30, who="controller", seconds=4.5),
        AttemptEnded(attempt=2, at=at + 40, outcome=Outcome.COMPLETED),
    ]
    store.create(f"{layout.EVENTS}/0001-000.jsonl", b"\n".join(encode_event(event).encode() for event in events))
    details = _json("show", storage.uri, "mnist")
    assert details["summary"] == _summaries(storage)["mnist"]
    assert details["creator"]["flow_run_name"] == "eager-otter"
    assert (details["fingerprint"]["loop"], list(details["fingerprint"]["config"])) == ("loop", ["lr"])
    assert details["versions"].keys() == {"ray", "prefect-elastic-train", "python"}
    assert [(one["attempt"], one["outcome"], one["base"]) for one in details["attempts"]] == [
        (1, "driver_lost", ""),
        (2, "completed", "0001-000002"),
    ]
    assert details["attempts"][1]["dropped"] == ["b"]
    assert details["attempts"][1]["repairs"] == ["checkpoint b was dropped: its folder is missing"]
    accounts = {**details["accounts"], "world_sizes": [world["size"] for world in details["accounts"]["world_sizes"]]}
    assert accounts == {
        "worker_failures": 1,
        "preemptions": 1,
        "resizes": 1,
        "steps_lost": 2,
        "goodput": 0.25,
        "time": {
            "wall_seconds": 40,
            "productive_seconds": 10,
            "startup_seconds": 0,
            "waiting_for_capacity_seconds": 0,
            "restart_seconds": 20,  # neither of the later groups has reported
            "resize_seconds": 0,
            "checkpoint_stall_seconds": 0,
            "lost_seconds": 10,
            "stopped_seconds": 0,
        },
        "storage_wait_seconds": 4.5,
        "world_sizes": [2, 1],
    }
    assert details["commit"] == "0002-000001"
    shown = [(one["name"], one["report_index"], one["latest"], one["best"]) for one in details["checkpoints"]]
    assert shown == [("a", 0, False, False), ("c", 2, True, True)]
    assert details["checkpoints"][0]["committed_at"] == pytest.approx(at + 10)
    assert details["result"] == {key: value for key, value in result.items() if key != "history"}
    text = _done("show", storage.uri, "mnist")
    for words in ("2 → 1", "1 worker failures, 1 preemptions, 1 resizes, 2 reports done again", "25.0%", "4.5 s"):
        assert words in text
    assert "checkpoint b was dropped: its folder is missing" in text


@pytest.mark.parametrize("outcome", [None, Outcome.DRIVER_LOST, Outcome.CANCELLED])
def test_what_a_driver_trained_before_it_died_without_a_word_is_lost(storage: Storage, outcome: Outcome | None) -> None:
    store = _trained(storage, "mnist", **_own_process(pid=2**22 + 1))
    if outcome is not None:
        _end(store, outcome)
    at = time.time() - 1000
    events = [
        AttemptStarted(attempt=1, at=at, run_name="mnist", run_uri=store.uri),
        WorkerGroupStarted(attempt=1, at=at, world_size=1),
        *(Reported(attempt=1, at=at + 10 * number, index=number, metrics={}, world_size=1) for number in range(1, 10)),
        CheckpointCommitted(attempt=1, at=at + 100, index=10, checkpoint="a", size_bytes=3, metrics={}),
        Reported(attempt=1, at=at + 400, index=11, metrics={}, world_size=1),
    ]
    store.create(f"{layout.EVENTS}/0001-000.jsonl", b"\n".join(encode_event(event).encode() for event in events))
    time_spent = _json("show", storage.uri, "mnist")["accounts"]["time"]
    assert (time_spent["productive_seconds"], time_spent["lost_seconds"]) == (100, 300)


def test_show_tells_the_lineage_and_the_best_checkpoint(storage: Storage) -> None:
    store = _local(storage, "tuned")
    begun = begin(store, claim(name="tuned", resume_from="mnist@best"))
    ray = Ray(store, begun.attempt, num_to_keep=2, checkpoint_score_attribute="acc").start()
    for name, accuracy in {"a": 0.9, "b": 0.1, "c": 0.5}.items():
        ray.report(name, acc=accuracy)
    _end(store)
    details = _json("show", storage.uri, "tuned")
    assert details["resume_from"] == "mnist@best"
    shown = {one["name"]: (one["latest"], one["best"]) for one in details["checkpoints"]}
    assert shown == {"a": (False, True), "c": (True, False)}


def test_show_tells_what_a_living_training_waits_for(storage: Storage) -> None:
    store = _trained(storage, "mnist", **_own_process())
    waiting = WaitingForCapacity(possible_workers=1, min_workers=4, resources_per_worker={"GPU": 1}, missing="3 GPU")
    events = [WorkerGroupStarted(world_size=4), waiting]
    store.create(f"{layout.EVENTS}/0001-000.jsonl", b"\n".join(encode_event(event).encode() for event in events))
    assert _json("show", storage.uri, "mnist")["waiting"] == "1 of at least 4 workers fit: 3 GPU"


def test_show_watches_the_heartbeat_where_nothing_else_tells(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _beat(store, age=60)
    assert _json("show", storage.uri, "mnist")["summary"]["state"] == "unknown"
    _beat(store, age=-3600, interval=1)
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(_json, "show", storage.uri, "mnist")
        time.sleep(0.5)
        _beat(store, age=-3601, interval=1)
        assert shown.result()["summary"]["state"] == "training"


def test_what_steers_a_terminal_is_not_printed(storage: Storage) -> None:
    _end(_trained(storage, "mnist"), Outcome.USER_ERROR, "\x1b[2J[bold]gone[/bold]")
    text = _done("show", storage.uri, "mnist")
    assert "\x1b[2J" not in text
    assert "[bold]gone[/bold]" in text


# verify


def test_a_whole_run_is_told_to_be_whole_and_nothing_is_written(storage: Storage) -> None:
    _trained(storage, "mnist")
    _raw_ray(storage, "raw")
    before = _everything(storage)
    text = _done("verify", storage.uri)
    assert "mnist: whole\n" in text
    assert "raw: whole\n" in text
    assert "  checkpoint c: ok (2 files, 3 B, latest)\n" in text
    assert "  a resume starts from checkpoint c of commit 0001-000003\n" in text
    assert "  older commits that are still whole: 0001-000002, 0001-000001\n" in text
    assert "a resume is refused without resume=True, which adopts what Ray Train has written" in text
    assert _everything(storage) == before


Damage = Callable[[LocalRunStore], object]


@pytest.mark.parametrize(
    ("damage", "checkpoint", "problem", "repair"),
    [
        (lambda store: store.delete_folder("c"), "b", "its folder is missing", "checkpoint c was dropped"),
        (
            lambda store: store.delete("c/model.pt"),
            "b",
            "1 of 2 files are missing, first model.pt",
            "1 of 2 files are missing",
        ),
        (
            lambda store: tear(store, "c/rank-0/optim.pt"),
            "b",
            "rank-0/optim.pt has 1 bytes instead of 2",
            "has 1 bytes",
        ),
        (
            lambda store: (tear(store, layout.commit_name(1, 3)), tear(store, layout.SNAPSHOT)),
            "b",
            "",
            "is torn and was passed over",
        ),
    ],
    ids=["folder missing", "file missing", "file cut", "newest commit and mirror torn"],
)
def test_damage_is_told_with_what_a_resume_would_do_about_it_and_it_does_that(
    storage: Storage, damage: Damage, checkpoint: str, problem: str, repair: str
) -> None:
    store = _trained(storage, "mnist")
    _trained(storage, "other")
    damage(store)
    before = _everything(storage)
    result = _run("verify", storage.uri, "--json")
    assert result.exit_code == 1
    found, other = json.loads(result.stdout)["runs"]
    assert other["whole"]
    assert not found["whole"]
    assert [one["problems"] for one in found["checkpoints"] if not one["ok"]] == ([[problem]] if problem else [])
    assert repair in " ".join(found["repairs"])
    assert found["resume_checkpoint"] == checkpoint
    assert _everything(storage) == before
    text = _run("verify", storage.uri, "mnist").stdout
    assert text.startswith("mnist: DAMAGED\n")
    assert f"a resume starts from checkpoint {checkpoint}" in text
    begun = begin(store)
    assert (begun.point.checkpoint, begun.point.repairs) == (found["resume_checkpoint"], found["repairs"])


def test_a_run_without_any_commit_left_is_damaged_and_refused(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    for commit in all_commits(store):
        store.delete(layout.commit_name(*commit))
    result = _run("verify", storage.uri)
    assert result.exit_code == 1
    assert "a resume is refused: no commit of" in result.stdout
    with pytest.raises(AttemptFailedError):
        begin(store)


@pytest.mark.parametrize(
    ("tear_it", "told"),
    [
        (layout.RUN, "run.json is torn or missing"),
        (layout.attempt_name(1), "the record of attempt 1 is torn"),
        (layout.ended_name(1), "the record of the end of attempt 1 is torn"),
        (layout.HEARTBEAT, "heartbeat.json is torn"),
        (layout.SNAPSHOT, "Ray's snapshot: torn; a resume writes it anew"),
        (layout.commit_name(1, 2), "commit 0001-000002: torn"),
    ],
)
def test_what_a_resume_does_without_is_told_and_is_no_damage(storage: Storage, tear_it: str, told: str) -> None:
    store = _trained(storage, "mnist")
    _beat(store, age=60)
    _end(store)
    tear(store, tear_it)
    text = _done("verify", storage.uri)
    assert text.startswith("mnist: whole\n")
    assert told in text


def test_ray_s_snapshot_of_an_older_commit_is_told(storage: Storage) -> None:
    store = _trained(storage, "mnist", "ab")
    older = store.read(layout.SNAPSHOT) or b""
    Ray(store, 1).start().report("c")
    store.replace(layout.SNAPSHOT, older)
    assert "Ray's snapshot: differs" in _done("verify", storage.uri)
    store.delete(layout.SNAPSHOT)
    assert "Ray's snapshot: missing" in _done("verify", storage.uri)


def test_what_an_attempt_has_given_up_is_told_and_is_no_new_damage(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    store.delete("c/model.pt")
    begin(store)
    [found] = json.loads(_run("verify", storage.uri, "--json").stdout)["runs"]
    assert found["whole"]
    assert found["checkpoints"][-1]["problems"] == ["it was damaged, and attempt 2 gave it up"]
    assert (found["resume_checkpoint"], found["leftovers"][0]["kind"]) == ("b", "dropped")
    run = _summaries(storage)["mnist"]
    assert (run["checkpoints"], run["metrics"]["epoch"], run["size_bytes"]) == (2, 1, 2 * CHECKPOINT_BYTES)
    for name in "ab":
        store.delete_folder(name)
    assert begin(store).point.checkpoint == ""
    assert _summaries(storage)["mnist"]["checkpoints"] == 0


@pytest.mark.parametrize("choice", ["latest", "best"])
def test_all_who_ask_for_the_newest_checkpoint_find_the_one_before_a_damaged_one(storage: Storage, choice: str) -> None:
    store = _trained(storage, "mnist", "abcd")
    tear(store, "d/model.pt")
    wanted = claim(name="tuned", resume_from=f"mnist@{choice}").request
    source = choose_source(storage, wanted, storage.run("tuned"))
    assert source.checkpoint == "mnist@c"
    assert "of run 'mnist': checkpoint d was dropped: model.pt has" in source.notes[0]
    # Resumed, by a loop that has nothing left to do.
    begun = begin(store, claim(name="mnist"))
    assert Ray(store, begun.attempt).start().latest == begun.point.checkpoint == "c"
    assert list(remove_interrupted_uploads(store, begun.attempt)) == ["d"]
    result = make_result(store, "mnist", add_up(read_history(store)))
    _end(store, result=result.model_dump(mode="json"))
    assert (result.checkpoint_uri, result.metrics["epoch"]) == (f"{store.uri}/c", 2)
    assert [best.uri for best in result.best_checkpoints] == [f"{store.uri}/{name}" for name in "abc"]
    assert choose_source(storage, wanted, storage.run("tuned")) == Source("mnist@c")
    shown = _json("show", storage.uri, "mnist")
    assert [one["name"] for one in shown["checkpoints"] if one[choice]] == ["c"]
    assert shown["summary"]["metrics"] == shown["result"]["metrics"] == result.metrics
    assert shown["summary"]["checkpoints"] == len(shown["result"]["best_checkpoints"]) == 3
    [found] = _json("verify", storage.uri)["runs"]
    assert found["whole"]
    assert (found["commit"], found["resume_commit"], found["resume_checkpoint"]) == ("0001-000004", "0001-000004", "c")
    assert [(one["name"], one["ok"]) for one in found["checkpoints"] if one["latest"]] == [("c", True)]
    assert [one["name"] for one in found["checkpoints"] if not one["ok"]] == ["d"]
    with pytest.raises(AttemptFailedError, match=r"checkpoint 'd' of run 'mnist' is damaged: .* attempt 2 gave it up"):
        choose_source(storage, claim(name="tuned", resume_from="mnist@d").request, storage.run("tuned"))


def test_what_is_left_over_is_told_by_its_kind(storage: Storage) -> None:
    store = _local(storage, "mnist")
    ray = Ray(store, begin(store).attempt, num_to_keep=1).start()
    for name in "abc":
        ray.report(name)
    ray.upload("a", {"model.pt": b"again"})  # as if its deletion had failed
    nested = _interrupt_upload(store, "epochs/4")
    upload = _interrupt_upload(store)
    store.create("plots/loss.svg", b"<svg/>")
    [found] = _json("verify", storage.uri)["runs"]
    kinds = {one["folder"]: (one["kind"], one["size_bytes"]) for one in found["leftovers"]}
    assert kinds == {upload: ("upload", 3), nested: ("upload", 3), "a": ("condemned", 5), "plots": ("unnamed", 6)}
    assert found["whole"]


def test_a_run_that_goes_on_meanwhile_is_looked_at_anew(storage: Storage) -> None:
    store = _local(storage, "mnist")
    ray = Ray(store, begin(store).attempt, num_to_keep=1).start()
    ray.report("a")

    class Moving(LocalRunStore):
        def file_sizes(self, folder: str) -> dict[str, int] | None:
            if folder == "a" and len(all_commits(store)) == 1:
                ray.report("b")
            return super().file_sizes(folder)

    from prefect_elastic_train.runs.checking import verify

    found = verify(Moving(store.path), "mnist")
    assert found is not None
    assert (found.whole, found.resume_checkpoint) == (True, "b")


# prune


def test_prune_shows_what_goes_asks_and_deletes_that(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    folder = _interrupt_upload(store)
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    before = _everything(storage)
    declined = _run("prune", storage.uri, answer="n\n")
    assert declined.exit_code == 1
    assert "attempt 1 began its upload, and no commit names it" in declined.stdout
    assert "3 B in all" in declined.stdout
    assert "Delete this for good?" in declined.stdout
    assert "Delete this for good?" not in _done("prune", storage.uri, "--dry-run")
    assert _everything(storage) == before
    assert f"deleted mnist {folder}\n3 B deleted\n" in _done("prune", storage.uri, answer="y\n")
    kept = {name: data for name, data in before.items() if not name.startswith(f"mnist/{folder}/")}
    assert _everything(storage) == kept
    assert f"nothing to delete in {storage.uri}" in _done("prune", storage.uri, "--yes")
    assert begin(store).point.checkpoint == "c"


def test_prune_deletes_interrupted_uploads_condemned_and_given_up_checkpoints_only(storage: Storage) -> None:
    store = _local(storage, "mnist")
    training = Training(store, begin(store).attempt, keep=2)
    for name in ("a", "b", "c"):
        training.report(name)  # nobody deletes what is kept no longer: `a` is condemned
    tear(store, "c/model.pt")
    assert begin(store).point.dropped == ["c"]
    _interrupt_upload(store, "sub/d")
    store.create("sub/notes.txt", b"of a person")
    Path(store.path, "plots").mkdir()
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    _done("prune", storage.uri, "--yes")
    assert store.folders() == [layout.STATE_FOLDER, "b", "plots", "sub"]
    assert store.file_sizes("sub") == {"notes.txt": 11}
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
    for name in "ab":
        Ray(store, 1).upload(name, {"model.pt": name.encode(), "rank-0/optim.pt": b"12"})
    tear(store, "c/model.pt")
    assert not RunDirectory(store).leftovers


def test_prune_refuses_a_run_whose_commits_are_lost(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _interrupt_upload(store)
    _end(store, Outcome.USER_ERROR)
    _make_older(store, 3600)
    for commit in all_commits(store):
        store.delete(layout.commit_name(*commit))
    before = _everything(storage)
    assert "left alone: mnist: no commit of" in _done("prune", storage.uri, "--yes")
    assert _everything(storage) == before


def test_prune_leaves_alone_what_lives_and_what_may(storage: Storage) -> None:
    runs = {
        "alive": _trained(storage, "alive", **_own_process()),
        "beating": _trained(storage, "beating"),
        "unknown": _trained(storage, "unknown"),
        "ending": _trained(storage, "ending"),
        "raw": _raw_ray(storage, "raw"),
    }
    for name, store in runs.items():
        if name != "raw":
            _interrupt_upload(store)
            _make_older(store, LONG_AGO)
    _beat(runs["beating"], age=1, interval=5)
    _beat(runs["unknown"], age=60)
    _end(runs["ending"])
    before = _everything(storage)
    text = _done("prune", storage.uri, "--older-than", "0", "--yes")
    assert "left alone: alive: it is being trained: process" in text
    assert "left alone: beating: it is being trained: last heartbeat 1 s ago on elsewhere" in text
    assert "left alone: unknown: nothing tells whether its driver lives" in text
    assert "left alone: ending: it was active within 60 s" in text
    assert "left alone: raw: another program wrote it" in text
    assert _everything(storage) == before


def test_a_heart_that_beats_by_a_clock_far_behind_is_seen_before_anything_goes(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _make_older(store, LONG_AGO)
    _beat(store, age=LONG_AGO, interval=1)
    assert _summaries(storage)["mnist"]["state"] == "died"
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(_done, "prune", storage.uri, "--older-than", "1", "--yes")
        time.sleep(1)
        _beat(store, age=LONG_AGO - 1, interval=1)
        assert "left alone: mnist: it is being trained: its heart beats on elsewhere" in text.result()
    assert store.file_sizes("c")


def test_what_a_driver_without_an_end_left_over_is_left_to_whoever_resumes_it(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    folder = _interrupt_upload(store)
    _make_older(store, 7200)
    _beat(store, age=3600)
    before = _everything(storage)
    assert "left alone: mnist: attempt 1 has no end: resume the run, which removes" in _done(
        "prune", storage.uri, "--yes"
    )
    assert _everything(storage) == before
    assert remove_interrupted_uploads(store, begin(store).attempt) == {folder: "upload interrupted"}


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_goes_once_an_attempt_has_begun_since_the_plan(storage: Storage, whole: bool) -> None:
    store = _trained(storage, "mnist")
    folder = _interrupt_upload(store)
    _end(store, Outcome.USER_ERROR)
    _make_older(store, LONG_AGO)
    planned = plan_run(store, "mnist", older_than_seconds=DAY if whole else None)
    assert [deletion.folder for deletion in planned.deletions] == ["" if whole else folder]
    begin(store)
    before = _everything(storage)
    with pytest.raises(RunChangedError, match="attempt 2 of run mnist has begun meanwhile"):
        list(carry_out(store, planned))
    assert _everything(storage) == before


def test_nothing_goes_once_a_driver_thought_dead_has_committed(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    ray = Ray(store, 1).start()
    _make_older(store, LONG_AGO)
    _beat(store, age=LONG_AGO)
    planned = plan_run(store, "mnist", older_than_seconds=DAY)
    ray.report("e")
    with pytest.raises(RunChangedError, match="has committed a checkpoint meanwhile"):
        list(carry_out(store, planned))
    assert all_attempts(store) == [1]
    check_fence(store, 1)


def test_a_commit_between_the_last_look_and_the_fence_keeps_the_run(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    ray = Ray(store, 1).start()
    _make_older(store, LONG_AGO)
    _beat(store, age=LONG_AGO)

    class Late(LocalRunStore):
        def create(self, name: str, data: bytes) -> bool:
            if name == layout.attempt_name(2):
                ray.report("e")
            return super().create(name, data)

    with pytest.raises(RunChangedError, match="run mnist has gone on meanwhile"):
        list(carry_out(Late(store.path), plan_run(store, "mnist", older_than_seconds=DAY)))
    assert all_attempts(store) == [1]
    assert RunDirectory(store).resume_point.checkpoint == "e"


def test_older_than_deletes_whole_runs_that_are_over_and_old(storage: Storage) -> None:
    for name, outcome in {
        "done": Outcome.COMPLETED,
        "broken": Outcome.USER_ERROR,
        "stopped": Outcome.CANCELLED,
    }.items():
        store = _trained(storage, name)
        _end(store, outcome)
        _make_older(store, LONG_AGO)
    died = _trained(storage, "died")
    _make_older(died, LONG_AGO)
    _beat(died, age=LONG_AGO)
    recent = _trained(storage, "recent")
    _end(recent)
    _make_older(recent, 3 * DAY)
    assert "nothing to delete" in _done("prune", storage.uri, "--yes")
    shown = _done("prune", storage.uri, "--older-than", "7", "--dry-run")
    assert "completed, last activity 30.0 days ago" in shown
    assert len(_summaries(storage)) == 5
    _done("prune", storage.uri, "done", "--older-than", "7", "--yes")
    assert sorted(os.listdir(storage.uri)) == ["broken", "died", "recent", "stopped"]
    _done("prune", storage.uri, "--older-than", "7", "--yes")
    assert os.listdir(storage.uri) == ["recent"]


def test_a_run_is_kept_for_one_that_is_about_to_start_from_it(storage: Storage) -> None:
    _end(_trained(storage, "source"))
    _make_older(_local(storage, "source"), LONG_AGO)
    record = RunRecord(
        name="tuned", creator=claim().request.owner, fingerprint=claim().request.fingerprint, resume_from="source@best"
    )
    _local(storage, "tuned").create(layout.RUN, encode(record))
    text = _done("prune", storage.uri, "source", "--older-than", "7", "--yes")
    assert "left alone: source: run tuned is about to start from its checkpoint" in text
    _make_older(_local(storage, "tuned"), LONG_AGO)
    _done("prune", storage.uri, "--older-than", "7", "--yes")
    assert os.listdir(storage.uri) == []


def test_a_driver_that_begins_while_a_run_is_deleted_is_told_and_deletes_nothing_new(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _end(store, Outcome.DRIVER_LOST)
    _make_older(store, LONG_AGO)
    refused: list[str] = []

    class Interrupted(LocalRunStore):
        def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
            if name == "b":
                with pytest.raises(AttemptFailedError) as error:
                    begin_attempt(store, claim())
                refused.append(str(error.value))
            return super().delete_folder(name, check)

    list(carry_out(Interrupted(store.path), plan_run(store, "mnist", older_than_seconds=DAY)))
    assert "belongs to flow run 'elastic-train runs prune'" in refused[0]
    assert os.listdir(storage.uri) == []
    assert begin(store).point.checkpoint == ""


def test_a_deletion_that_was_cut_short_is_finished_by_the_next(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _end(store)
    _make_older(store, LONG_AGO)
    code = (
        "import os\n"
        "from prefect_elastic_train.runs.pruning import carry_out, plan_run\n"
        "from prefect_elastic_train.storage.store import LocalRunStore\n"
        "class Dying(LocalRunStore):\n"
        "    def delete_folder(self, name, check=None):\n"
        "        if name == 'b': os._exit(0)\n"
        "        return super().delete_folder(name, check)\n"
        "store = Dying(sys.argv[1])\n"
        "list(carry_out(store, plan_run(store, 'mnist', older_than_seconds=86400.0)))\n"
    )
    python(code, store.path)
    assert store.folders() == [layout.STATE_FOLDER, "b", "c"]
    assert _summaries(storage)["mnist"]["state"] == "deleting"
    assert "its deletion was cut short" in _done("prune", storage.uri, "--dry-run")
    _done("prune", storage.uri, "--yes")
    assert os.listdir(storage.uri) == []


def test_a_run_that_is_being_deleted_is_left_to_whoever_does_that(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _end(store)
    _make_older(store, LONG_AGO)
    texts: list[str] = []

    class Slow(LocalRunStore):
        def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
            if name == "b":
                texts.append(_done("prune", storage.uri, "--yes"))
            return super().delete_folder(name, check)

    list(carry_out(Slow(store.path), plan_run(store, "mnist", older_than_seconds=DAY)))
    assert "left alone: mnist: it is being deleted: process" in texts[0]


def test_another_flow_run_that_takes_over_stops_a_deletion(storage: Storage) -> None:
    store = _trained(storage, "mnist")
    _end(store)
    _make_older(store, LONG_AGO)

    class Beaten(LocalRunStore):
        def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
            if name == "b":
                begun = store.read(layout.attempt_name(2)) or b""
                store.create(layout.attempt_name(3), begun.replace(b'"attempt": 2', b'"attempt": 3'))
            return super().delete_folder(name, check)

    with pytest.raises(RunChangedError, match="attempt 3 of run mnist has begun while it was deleted"):
        list(carry_out(Beaten(store.path), plan_run(store, "mnist", older_than_seconds=DAY)))
    assert store.folders() == [layout.STATE_FOLDER, "b", "c"]


# an object store


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


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
    ended = json.loads(store.read(layout.ended_name(1)))
    store.replace(layout.ended_name(1), json.dumps({**ended, "at": time.time() - LONG_AGO}).encode())
    for name in (layout.attempt_name(1), *(layout.commit_name(*commit) for commit in all_commits(store))):
        record = json.loads(store.read(name))
        times = {key: record[key] - LONG_AGO for key in ("at", "started_at") if key in record}
        store.replace(name, json.dumps({**record, **times}).encode())
    assert _summaries(bucket)["mnist"]["size_bytes"] == 2 * CHECKPOINT_BYTES
    assert _json("show", bucket.uri, "mnist")["checkpoints"][1]["uri"] == f"{bucket.uri}/mnist/b"
    assert f"left over: {folder} (3 B)" in _done("verify", bucket.uri)
    assert f"deleted mnist {folder}" in _done("prune", bucket.uri, "--yes")
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket="cli-runs")
    assert store.folders() == [layout.STATE_FOLDER, "a", "b"]
    _done("prune", bucket.uri, "--older-than", "7", "--yes")
    assert bucket.run_names() == []
    assert "Contents" not in server.client().list_objects_v2(Bucket="cli-runs")


def test_a_bucket_that_is_not_there_is_one_line_that_says_what_to_do(bucket: Storage) -> None:
    assert "create the bucket" in _refused("list", "s3://no-such-bucket/runs")
