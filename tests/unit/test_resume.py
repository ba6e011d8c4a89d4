"""Where an attempt resumes when the run directory is damaged, foreign, or was left in the middle of something."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.events import CheckpointCommitted, encode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import adopt_snapshot, remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import RunFilesystem
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import TEMPORARY_PREFIX, LocalRunStore, RunStore
from tests.unit.ray_storage import Ray, raw_ray
from tests.unit.support import OTHER_FLOW_RUN, Training, begin, claim, empty_snapshot, tear, with_result

on_a_disk = pytest.mark.parametrize("store", ["disk"], indirect=True)  # for what only a disk does


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, store: RunStore, memory: Storage) -> RunStore:
    """A run directory that nobody has used yet, on a disk and in an object store."""
    return store if request.param == "disk" else memory.run("mnist")


def _ray_resumes(store: RunStore) -> str:
    """Return the checkpoint that Ray's own checkpoint manager finds in the run directory, empty for none."""
    result = raw_ray(store).latest_checkpoint_result
    return Path(result.checkpoint.path).name if result else ""


def _ray_wrote(store: RunStore, *names: str) -> None:
    """Make a run directory as raw Ray Train leaves it."""
    snapshot = empty_snapshot()
    for name in names:
        snapshot = with_result(snapshot, name, {"loss": 0.5})
        store.replace(f"{name}/model.pt", b"weights of " + name.encode())
    store.replace(layout.SNAPSHOT, json.dumps(snapshot).encode())


@pytest.fixture
def training(store: RunStore) -> Training:
    """A first attempt with three committed checkpoints: a, b, c."""
    training = Training(store, begin(store).attempt)
    for name in "abc":
        training.report(name, {"name": name})
    return training


def test_an_undamaged_run_resumes_at_its_newest_commit_without_repairs(store: RunStore, training: Training) -> None:
    store.create("c/notes.txt", b"an additional file is no damage")
    point = RunDirectory(store).resume_point
    assert (point.base, point.checkpoint, point.repairs) == ((1, 3), "c", [])
    assert point.commit.snapshot == training.snapshot
    assert begin(store).notes == []
    assert _ray_resumes(store) == "c"


def _tear_inner_snapshot(store: RunStore, name: str) -> None:
    record = json.loads(store.read(name) or b"")
    record["snapshot"]["checkpoint_report_indices"] = []
    store.replace(name, json.dumps(record).encode())


@pytest.mark.parametrize("damage", [tear, _tear_inner_snapshot])
def test_a_torn_commit_is_passed_over_and_told(store: RunStore, training: Training, damage: Any) -> None:
    folder = physical_name("d", 1)
    training.report(folder)
    damage(store, layout.commit_name((1, 4)))
    store.delete(layout.SNAPSHOT)
    assert remove_leftovers(store, 1) == [], "something was removed while nothing tells what is needed"
    begun = begin(store)
    assert (begun.point.base, begun.point.checkpoint) == ((1, 3), "c")
    assert begun.notes == ["commit 0001-000004 is torn and was skipped"]
    assert remove_leftovers(store, begun.attempt) == [folder]
    assert _ray_resumes(store) == "c"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda store: store.delete("c/model.pt"), "1 of 1 files are missing, first model.pt"),
        (lambda store: store.replace("c/model.pt", b""), "model.pt has 0 bytes instead of 12"),
    ],
)
def test_a_damaged_checkpoint_is_dropped_and_the_one_before_is_used(
    store: RunStore, training: Training, damage: Any, why: str
) -> None:
    damage(store)
    begun = begin(store)
    assert (begun.point.base, begun.point.checkpoint) == ((1, 3), "b")
    assert begun.notes == [f"checkpoint c was dropped: {why}"]
    assert _ray_resumes(store) == "b"
    record = RunDirectory(store).attempt_record(2)
    assert (record.repairs, record.dropped, record.base) == (begun.notes, ["c"], (1, 3))
    # The next ones know that it was given up, and go on from what was repaired; its name may be written again.
    Training(store, begun.attempt).report("c")
    again = begin(store)
    assert (again.point.base, again.notes) == ((2, 1), [])
    assert checkpoint_names(again.point.commit.snapshot) == ["a", "b", "c"]


def test_the_only_whole_checkpoint_is_not_given_up_because_its_commit_is_torn(store: RunStore) -> None:
    training = Training(store, begin(store).attempt, keep=1)
    for name in (first := physical_name("a", 1), physical_name("b", 1)):
        training.report(name)
    store.delete_folder(first)  # as Ray does
    tear(store, layout.commit_name((1, 2)))
    with pytest.raises(AttemptFailedError, match=r"no commit of .* with an intact checkpoint"):
        begin(store)


def test_nothing_whole_left_starts_from_the_beginning_and_says_so(store: RunStore, training: Training) -> None:
    for name in "abc":
        store.delete_folder(name)
    begun = begin(store)
    assert (begun.point.base, begun.point.checkpoint) == (None, "")
    assert store.read(layout.SNAPSHOT) is None
    assert _ray_resumes(store) == ""
    dropped = [note.split(":")[0] for note in begun.notes if "dropped" in note]
    assert dropped == [f"checkpoint {name} was dropped" for name in "abc"], "each is told once"


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (lambda store: store.delete(layout.SNAPSHOT), 0),
        (lambda store: _ray_wrote(store, "a", "b"), 0),  # as after a crash between a commit and Ray's file
        (lambda store: _ray_wrote(store, "a", "b", "c", "foreign"), 1),
        (lambda store: tear(store, layout.SNAPSHOT), 1),
    ],
)
def test_rays_file_is_restored_and_work_of_another_program_is_told(
    store: RunStore, training: Training, change: Any, notes: int
) -> None:
    change(store)
    begun = begin(store)
    assert begun.notes == ["Ray's snapshot was torn, or written by another program, and was not used"] * notes
    assert RunDirectory(store).mirror == training.snapshot
    assert _ray_resumes(store) == begun.point.checkpoint == "c"


def test_folders_of_the_user_do_not_block_a_run_that_has_not_committed_yet(store: RunStore) -> None:
    first = begin(store)
    upload = physical_name("epoch-1", first.attempt)
    Training(store, first.attempt).upload(upload)
    store.create("tensorboard/events", b"1")
    second = begin(store)
    assert second.point.checkpoint == ""
    assert remove_leftovers(store, second.attempt) == [upload]
    assert store.file_sizes("tensorboard") == {"events": 1}


def _event(store: RunStore) -> None:
    committed = CheckpointCommitted(attempt=1, checkpoint="a", size_bytes=1, metrics={})
    store.create(f"{layout.EVENTS}/0001-000.jsonl", encode_event(committed).encode())


def _base(store: RunStore) -> None:
    store.create(layout.attempt_name(2), encode(AttemptRecord(attempt=2, owner=claim().request.owner, base=(1, 1))))


@pytest.mark.parametrize(
    "trace",
    [
        lambda store: store.create(layout.commit_name((1, 1)), b""),
        _base,
        _event,
        lambda store: _ray_wrote(store, "folder"),
        lambda store: store.create("checkpoint_2026-01-01_00-00-00.000000/model.pt", b"1"),
    ],
)
def test_a_trace_of_lost_commits_is_enough_to_begin_nothing_anew(store: RunStore, trace: Any) -> None:
    begin(store)
    store.create("folder/file", b"1")
    trace(store)
    with pytest.raises(AttemptFailedError, match="no commit of"):
        begin(store, claim(max_attempts_without_progress=100))
    assert store.file_sizes("folder")


@pytest.mark.parametrize("has_mirror", [False, True])
@pytest.mark.parametrize("lose", [lambda store, name: store.delete(name), tear])
def test_a_run_without_any_commit_left_is_refused_with_the_way_out_and_left_as_it_is(
    store: RunStore, training: Training, lose: Any, has_mirror: bool
) -> None:
    for commit in RunDirectory(store).commit_ids:
        lose(store, layout.commit_name(commit))
    _event(store)
    if not has_mirror:
        store.delete(layout.SNAPSHOT)
    before = store.file_sizes("")
    words = r"3 folders that may be checkpoints \(a, b, c\).*move the folders away to start .*resume=True to use"
    with pytest.raises(AttemptFailedError, match=words) as refused:
        begin(store, seed=pytest.fail)
    assert refused.value.outcome is Outcome.INVALID
    assert store.file_sizes("") == before
    for name in "abc":
        store.delete_folder(name)
    begun = begin(store)
    assert begun.point.checkpoint == ""
    upload = physical_name("d", begun.attempt)
    store.create(f"{upload}/model.pt", b"as far as it came")
    again = begin(store, claim(max_attempts_without_progress=100))
    assert remove_leftovers(store, again.attempt) == [upload]


# listings that are behind


def _behind(store: RunStore, folder: str) -> RunStore:
    """Return the same store as a client sees it whose listing of one folder stays as it is now."""
    behind, listed = copy.copy(store), store.names(folder)
    behind.names = lambda name: listed if name == folder else store.names(name)  # type: ignore[method-assign]
    return behind


def test_what_an_overtaken_attempt_has_committed_is_used_when_nothing_else_is_whole(store: RunStore) -> None:
    first, second = (physical_name("epoch", 1, report=report) for report in (1, 2))
    attempt = begin(store).attempt
    training = Training(_behind(store, layout.ATTEMPTS), attempt, keep=1)
    training.report(first)
    assert begin(store).point.checkpoint == first
    training.report(second)  # does not see that it was overtaken
    store.delete_folder(first)  # as Ray does with keep=1
    assert remove_leftovers(store, 2) == [], "the only whole checkpoint was removed"
    third = begin(store)
    assert (third.point.base, third.point.checkpoint) == ((1, 2), second)
    assert third.notes[-1] == ("commit 0001-000002 of an overtaken attempt is the newest intact one and is used")
    assert remove_leftovers(store, third.attempt) == []
    Training(store, third.attempt, keep=1).report(physical_name("epoch", 3, report=1))
    fourth = begin(store)
    assert (fourth.point.base, fourth.notes) == ((3, 1), [])


def test_a_run_is_not_begun_again_because_the_listing_of_its_commits_is_behind(store: RunStore) -> None:
    training = Training(store, begin(store).attempt, keep=1)
    training.report(first := physical_name("epoch", 1, report=1))
    behind = _behind(store, layout.COMMITS)
    training.report(second := physical_name("epoch", 1, report=2))
    store.delete_folder(first)
    with pytest.raises(AttemptFailedError, match=rf"no commit of .* with an intact checkpoint .*\({second}\)"):
        begin(behind)
    with pytest.raises(AttemptFailedError, match=rf"\({second}\)"):
        remove_leftovers(behind, 1)
    assert store.file_sizes(second)


@pytest.mark.parametrize("commits_too", [True, False])
def test_whole_checkpoints_are_found_by_their_names_where_the_listing_of_the_run_is_behind(
    store: RunStore, commits_too: bool
) -> None:
    training = Training(store, begin(store).attempt, keep=1)
    behind = _behind(store, layout.COMMITS) if commits_too else copy.copy(store)
    sizes, folders = store.file_sizes(""), store.folders()
    behind.file_sizes = lambda name: store.file_sizes(name) if name else sizes  # type: ignore[method-assign]
    behind.folders = lambda: folders  # type: ignore[method-assign]
    training.report(newest := physical_name("epoch", 1, report=1))
    if commits_too:
        with pytest.raises(AttemptFailedError, match=rf"no commit of .* with an intact checkpoint .*\({newest}\)"):
            begin(behind)
    else:
        begun = begin(behind)
        assert (begun.point.checkpoint, begun.point.repairs) == (newest, [])
    assert store.file_sizes(newest)


def test_ray_starts_from_the_commit_that_its_attempt_has_recorded_though_no_listing_shows_it(store: RunStore) -> None:
    behind = _behind(store, layout.COMMITS)
    training = Training(store, begin(store).attempt)
    training.report(physical_name("epoch", 1, report=1))
    begun = begin(store)
    handed = RunFilesystem(behind, begun.attempt).open_input_file(f"{store.path}/{layout.SNAPSHOT}")
    assert json.loads(handed.read()) == begun.point.commit.snapshot


# runs of raw Ray Train


def test_a_raw_run_of_ray_is_adopted_when_asked_for(store: RunStore) -> None:
    _ray_wrote(store, "checkpoint_1", "checkpoint_2", "checkpoint_3")
    store.delete("checkpoint_3/model.pt")
    with pytest.raises(AttemptFailedError, match=r"another program wrote with Ray Train; .* resume=True"):
        begin(store)
    adopt_snapshot(store)  # by a driver that died then
    begun = begin(store, claim(resume=True))
    assert (begun.point.base, begun.point.checkpoint) == ((0, 0), "checkpoint_2")
    assert begun.notes[:2] == [
        "the run was written by Ray Train alone; 2 of its checkpoints were adopted",
        "checkpoint checkpoint_3 was dropped: its folder is missing or empty",
    ]
    assert _ray_resumes(store) == "checkpoint_2"
    Training(store, begun.attempt).report("checkpoint_4")
    assert begin(store).point.base == (1, 1)


def test_a_run_without_its_records_goes_on_with_numbers_that_no_folder_has(store: RunStore) -> None:
    _ray_wrote(store, physical_name("last", 7, 1, 1), physical_name("last", 7, 1, 2))
    assert begin(store, claim(resume=True)).attempt == 8


@pytest.mark.parametrize(
    "damage", [lambda store: tear(store, layout.SNAPSHOT), lambda store: store.delete_folder("checkpoint_1")]
)
def test_a_raw_run_that_cannot_be_adopted_is_refused_and_left_as_it_is(store: RunStore, damage: Any) -> None:
    _ray_wrote(store, "checkpoint_1")
    damage(store)
    with pytest.raises(AttemptFailedError, match="is torn or names no checkpoint that still exists"):
        begin(store, claim(resume=True))
    assert store.read(layout.SNAPSHOT) is not None
    assert RunDirectory(store).attempt_numbers == []


# leftovers


def test_uploads_that_no_commit_names_are_removed_and_nothing_else(store: RunStore, training: Training) -> None:
    interrupted = [physical_name(name, 1, report=4) for name in ("a", "epochs/4")]
    for name in interrupted:
        training.upload(name)
    store.create("unnamed/file", b"")
    store.create("epochs/notes.txt", b"of a person")
    attempt = begin(store).attempt
    later = physical_name("a", attempt + 1)
    store.create(f"{later}/file", b"")
    assert remove_leftovers(store, attempt) == interrupted
    folders = [name for name in store.folders() if store.file_sizes(name)]
    assert folders == [layout.STATE_FOLDER, "a", later, "b", "c", "epochs", "unnamed"]
    assert store.file_sizes("epochs") == {"notes.txt": 11}
    assert remove_leftovers(store, attempt) == []


@on_a_disk
@pytest.mark.parametrize("file", ["", f"{TEMPORARY_PREFIX}x"])
def test_of_an_upload_that_was_killed_at_its_start_no_folder_is_left(store: RunStore, file: str) -> None:
    begin(store)
    name = physical_name("a", 1)
    folder = Path(store.uri, name)
    folder.mkdir()
    if file:
        (folder / file).write_text("half")
    assert remove_leftovers(store, 1) == [name]
    assert not folder.exists()


# a copy, in the order that docs/operations.md gives


@pytest.mark.parametrize("meanwhile", range(4))
def test_a_copy_of_a_run_that_trains_resumes_at_its_newest_whole_checkpoint(tmp_path: Path, meanwhile: int) -> None:
    run, copy = tmp_path / "runs" / "mnist", tmp_path / "backup" / "mnist"
    store = LocalRunStore(str(run))
    ray = Ray(store, begin(store).attempt, num_to_keep=3).start()
    for number in range(1, 5):
        ray.report(f"checkpoint_{number}", epoch=number)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".*"))
    for number in range(5, 5 + meanwhile):
        ray.report(f"checkpoint_{number}", epoch=number)
    shutil.copytree(run / ".elastic_train", copy / ".elastic_train")
    begun = begin(LocalRunStore(str(copy)), claim(OTHER_FLOW_RUN, resume=True))
    assert begun.point.checkpoint == "checkpoint_4"
    assert (copy / begun.point.checkpoint / "model.pt").read_text() == begun.point.checkpoint
    assert bool(begun.notes) == bool(meanwhile), "what is not there is told"
