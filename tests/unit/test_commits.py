"""Commits: what is written, what is refused, and which of them count."""

import copy
import json
import math

import pytest

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.records import AttemptRecord, encode
from prefect_elastic_train.runs import commits, layout
from prefect_elastic_train.runs.commits import FencedOffError, check_fence, restore_snapshot
from prefect_elastic_train.runs.run_directory import RunDirectory, newest_attempt_number
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore
from tests.unit.support import Training, begin, claim


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, store: RunStore, memory: Storage) -> RunStore:
    """A run directory that nobody has used yet, on a disk and in an object store."""
    return store if request.param == "disk" else memory.run("mnist")


@pytest.mark.parametrize("name", ["b", physical_name("b", 1)])
def test_a_checkpoint_that_is_not_there_is_refused_by_name_and_nothing_is_written(store: RunStore, name: str) -> None:
    training = Training(store, begin(store).attempt)
    training.report("a")
    before = store.read(layout.SNAPSHOT)
    with pytest.raises(ElasticTrainError, match=f"checkpoint {name} is not in {store.uri}"):
        training.commit(name)
    assert (RunDirectory(store).commit_ids, store.read(layout.SNAPSHOT)) == ([(1, 1)], before)


def test_a_checkpoint_of_a_session_without_the_part_of_a_rank_is_refused_and_never_whole(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_SEEN_SECONDS", 0.5)
    training = Training(store, begin(store).attempt)
    parts = {f"rank-{rank:05}-of-00002.npz": b"1" for rank in range(2)}
    training.upload("a", {"arrays.npz": b"123", **parts})
    training.commit("a")
    before = store.read(layout.SNAPSHOT)
    training.upload("b", {"arrays.npz": b"123", **dict([*parts.items()][:1])})
    lacking = "1 of 2 ranks did not store their part, first rank-00001-of-00002.npz"
    with pytest.raises(ElasticTrainError, match=f"checkpoint b in {store.uri} is incomplete, not committed: {lacking}"):
        training.commit("b")
    assert (RunDirectory(store).commit_ids, store.read(layout.SNAPSHOT)) == ([(1, 1)], before)
    run = RunDirectory(store)
    assert run.damage_of("b", store.file_sizes("b")) == lacking
    assert (run.resume_point.checkpoint, run.damage_of("a", store.file_sizes("a"))) == ("a", "")


def test_five_commits_of_an_attempt_are_kept_and_a_controller_that_starts_again_goes_on_numbering(
    store: RunStore,
) -> None:
    for attempt in (1, 2):
        assert begin(store).attempt == attempt
        for number in range(7):
            Training(store, attempt).report(f"checkpoint-{attempt}-{number}")
    assert RunDirectory(store).commit_ids == [(attempt, sequence) for attempt in (1, 2) for sequence in range(3, 8)]
    assert len(json.loads(store.read(layout.commit_name((2, 7))))["manifest"]) == 14


def test_a_manifest_says_what_was_committed_and_only_the_newest_is_listed_anew(store: RunStore) -> None:
    training = Training(store, begin(store).attempt)
    name = physical_name("a", 1)
    training.upload(name, {"model.pt": b"12345"})
    training.commit(name)
    store.replace(f"{name}/model.pt", b"")
    assert training.commit(name).manifest == {name: {"model.pt": 5}}, "as when Ray writes a validation's result"
    training.report("latest")  # of a loop that reports what it has put into the run directory itself
    training.upload("latest", {"model.pt": b"123"})
    assert training.commit("latest").manifest == {name: {"model.pt": 5}, "latest": {"model.pt": 3}}


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_metrics_that_json_has_no_word_for_are_committed_and_restored_as_they_are(store: RunStore, loss: float) -> None:
    Training(store, begin(store).attempt).report("a", {"loss": loss})
    point = RunDirectory(store).resume_point
    store.delete(layout.SNAPSHOT)
    restore_snapshot(store, point.commit)
    restored = json.loads(store.read(layout.SNAPSHOT))
    assert repr(restored["latest_checkpoint_result"]["metrics"]["loss"]) == repr(loss)


def test_the_fence_lets_the_newest_attempt_pass_and_nobody_else(store: RunStore) -> None:
    assert newest_attempt_number(store) == 0
    check_fence(store, 0)
    begin(store)
    check_fence(store, 1)
    begin(store)
    check_fence(store, 2)
    with pytest.raises(FencedOffError, match=r"attempt 1 of .* taken over by attempt 2; it stops here"):
        check_fence(store, 1)


def test_an_attempt_that_a_mount_shows_late_is_waited_for(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(store)
    monkeypatch.setattr(commits, "_SEEN_SECONDS", 0.5)
    reads = []

    def read(name: str) -> bytes | None:
        reads.append(name)
        return store.read(name) if len(reads) > 2 else None

    late = copy.copy(store)  # its listing is stale, and the record appears with the third read
    late.names = lambda folder: []  # type: ignore[method-assign]
    late.read = read  # type: ignore[method-assign]
    check_fence(late, 1)
    assert reads == [layout.attempt_name(1)] * 3
    late.read = lambda name: None  # type: ignore[method-assign]
    with pytest.raises(StorageFaultError, match="does not see attempt 1 of this run"):
        check_fence(late, 1)


def test_foreign_objects_are_no_attempts_and_no_commits_and_numbers_beyond_the_padding_are(store: RunStore) -> None:
    for name in ("0002.json.tmp", "x.json", "002.json", "0002.txt", "0001-000001.json", "9999.json", "10000.json"):
        store.create(f"{layout.ATTEMPTS}/{name}", b"{}")
    for name in ("0001-01.json", "0001.json", "0001-000001.json.bak", "9999-999999.json", "9999-1000000.json"):
        store.create(f"{layout.COMMITS}/{name}", b"{}")
    assert RunDirectory(store).attempt_numbers == [9999, 10000]
    assert RunDirectory(store).commit_ids == [(9999, 999_999), (9999, 1_000_000)]


def test_the_lineage_is_the_way_from_the_newest_attempt_back_over_the_bases(store: RunStore) -> None:
    attempts = [(None, 2), ((1, 1), 3), (None, 2), ((2, 2), 0), ((2, 2), 1)]  # their bases, and how many they committed
    for attempt, (base, commits_of_attempt) in enumerate(attempts, 1):
        record = AttemptRecord(attempt=attempt, owner=claim().request.owner, base=base)
        store.create(layout.attempt_name(attempt), encode(record))
        for sequence in range(commits_of_attempt):
            store.create(layout.commit_name((attempt, sequence + 1)), b"{}")
    shared = [(2, 2), (2, 1), (1, 1)]
    lineages = {5: [(5, 1), *shared], 4: shared, 3: [(3, 2), (3, 1)], 2: [(2, 3), *shared], 1: [(1, 2), (1, 1)]}
    assert {attempt: list(RunDirectory(store, attempt).lineage) for attempt in lineages} == lineages
