"""Every kind of damage to a run's state, and what Ray Train's own checkpoint manager makes of the run afterwards.

Each run has reported four checkpoints when it is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.events import CheckpointCommitted, encode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun
from prefect_elastic_train.runs.commits import all_commits, read_attempt
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.storage.store import RunStore
from tests.unit.ray_storage import Ray, raw_ray
from tests.unit.support import begin, claim, neighbour, on_disk_and_in_memory

EPOCHS = [physical_name(f"epoch-{number}", 1, 1, number) for number in range(1, 5)]
COMMIT = layout.commit_name(1, 4)

Do = Callable[[RunStore], object]


def _report(ray: Ray, names: list[str], *, loss: float = 0.5) -> None:
    """Report checkpoints, in which every file tells whose it is."""
    for name in names:
        ray.report(name, {f"rank-{rank}/model.pt": f"{name} of rank {rank}".encode() for rank in range(2)}, loss=loss)


def _resume(store: RunStore) -> tuple[Begun, Ray]:
    """Begin an attempt and start Ray's manager on it, up to where workers would start."""
    begun = begin(store)
    ray = Ray(store, begun.attempt).start()
    remove_interrupted_uploads(store, begun.attempt)
    return begun, ray


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Do:
    return lambda store: store.replace(name, change(store.read(name) or b""))


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _remove(name: str) -> Do:
    return lambda store: store.delete(name) if store.read(name) is not None else store.delete_folder(name)


def _replace_by_other_runs(name: str, checkpoints: list[str]) -> Do:
    def do(store: RunStore) -> None:
        other = neighbour(store, "other")
        _report(Ray(other, begin(other, claim(name="other")).attempt).start(), checkpoints, loss=0.25)
        store.replace(name, other.read(name) or b"")

    return do


def _on_all_commits(do: Callable[[str], Do]) -> Do:
    return lambda store: [do(layout.commit_name(*commit))(store) for commit in all_commits(store)]


def _all(*steps: Do) -> Do:
    return lambda store: [step(store) for step in steps]


TORN: dict[str, Callable[[bytes], bytes]] = {
    "cut": _half,
    "emptied": lambda data: b"",
    "replaced by garbage": lambda data: bytes(range(256)) * 4,
    "replaced by other JSON": lambda data: b'{"epoch": 4}',
}
ANEW = "Ray's snapshot was torn, missing or not the newest commit's, and was written anew from that"
LOST_RECORD = "run.json was torn or missing and was written anew"
PASSED_OVER = "commit 0001-000004 is torn and was passed over"
NO_CHECKPOINT = "commit 0001-000004 has no whole checkpoint left and was passed over"
FILE = f"{EPOCHS[1]}/rank-1/model.pt"
MISSING = "2 of 2 files are missing, first rank-0/model.pt"

#: What happens, the committed checkpoints that are whole afterwards, and what the next attempt says of it.
DAMAGES: dict[str, tuple[Do, list[str], list[str]]] = {
    **{f"snapshot {how}": (_rewrite(layout.SNAPSHOT, torn), EPOCHS, [ANEW]) for how, torn in TORN.items()},
    "snapshot removed": (_remove(layout.SNAPSHOT), EPOCHS, [ANEW]),
    "snapshot of another run with the same names": (_replace_by_other_runs(layout.SNAPSHOT, EPOCHS), EPOCHS, [ANEW]),
    **{f"newest commit {how}": (_rewrite(COMMIT, torn), EPOCHS[:3], [PASSED_OVER]) for how, torn in TORN.items()},
    "newest commit removed": (_remove(COMMIT), EPOCHS[:3], [ANEW]),
    "newest commit and snapshot removed": (_all(_remove(COMMIT), _remove(layout.SNAPSHOT)), EPOCHS[:3], [ANEW]),
    "newest commit of another run": (
        _replace_by_other_runs(COMMIT, ["a", "b", "c", "d"]),
        EPOCHS[:3],
        [*(f"checkpoint {name} was dropped: {MISSING}" for name in "abcd"), NO_CHECKPOINT],
    ),
    "oldest checkpoint removed": (
        _remove(EPOCHS[0]),
        EPOCHS[1:],
        [f"checkpoint epoch-1 was dropped: {MISSING}"],
    ),
    "newest checkpoint removed": (
        _remove(EPOCHS[3]),
        EPOCHS[:3],
        [f"checkpoint epoch-4 was dropped: {MISSING}"],
    ),
    "file of a checkpoint cut": (
        _rewrite(FILE, lambda data: b"w"),
        [EPOCHS[0], *EPOCHS[2:]],
        [f"checkpoint epoch-2 was dropped: rank-1/model.pt has 1 bytes instead of {len(EPOCHS[1]) + 10}"],
    ),
    "file of a checkpoint removed": (
        _remove(FILE),
        [EPOCHS[0], *EPOCHS[2:]],
        ["checkpoint epoch-2 was dropped: 1 of 2 files are missing, first rank-1/model.pt"],
    ),
    **{f"run record {how}": (_rewrite(layout.RUN, torn), EPOCHS, [LOST_RECORD]) for how, torn in TORN.items()},
    "run record removed": (_remove(layout.RUN), EPOCHS, [LOST_RECORD]),
    # What an attempt has committed speaks for it, so nothing needs doing.
    **{f"attempt record {how}": (_rewrite(layout.attempt_name(1), torn), EPOCHS, []) for how, torn in TORN.items()},
    "attempt record removed": (_remove(layout.attempt_name(1)), EPOCHS, []),
}


@pytest.fixture
def trained(store: RunStore) -> RunStore:
    """A run whose first attempt has reported four checkpoints."""
    _report(Ray(store, begin(store).attempt).start(), EPOCHS)
    return store


#: One way to tear an object is as good as another in an object store.
CASES = [("disk", what) for what in DAMAGES] + [("memory", what) for what in DAMAGES if not what.endswith(tuple(TORN))]


@pytest.mark.parametrize(("store", "what"), CASES, indirect=["store"])
def test_ray_is_handed_the_newest_whole_checkpoint_told_of_it_and_trains_on(trained: RunStore, what: str) -> None:
    damage, left, notes = DAMAGES[what]
    damage(trained)
    begun, ray = _resume(trained)
    assert ray.checkpoints == left
    assert ray.latest == begun.point.checkpoint == left[-1]
    with ray.manager.latest_checkpoint_result.checkpoint.as_directory() as folder:
        files = {path.parent.name: path.read_text() for path in Path(folder).glob("*/*")}
    assert files == {f"rank-{rank}": f"{left[-1]} of rank {rank}" for rank in range(2)}
    assert ray.manager.latest_checkpoint_result.metrics == {"loss": 0.5}
    found = [Path(result.checkpoint.path).name for result in raw_ray(trained)._checkpoint_results]
    assert found == left, "the file on disk does not fit"
    assert begun.notes == notes
    record = read_attempt(trained, begun.attempt)
    assert record is not None
    assert record.repairs == [note for note in notes if note not in (ANEW, LOST_RECORD)]

    reported = [physical_name(f"epoch-{number}", begun.attempt) for number in range(5, 7)]
    _report(ray, reported)
    third, ray = _resume(trained)
    assert (third.point.base, third.notes) == ((begun.attempt, 2), [])
    assert ray.checkpoints == [*left, *reported]
    assert sorted([layout.STATE_FOLDER, *reported, *left]) == [
        name for name in trained.folders() if trained.file_sizes(name)
    ]


@pytest.mark.parametrize("what", ["newest commit cut", "newest checkpoint removed", "snapshot removed"])
def test_an_attempt_that_dies_at_once_leaves_its_repair_to_the_next(trained: RunStore, what: str) -> None:
    damage, left, _ = DAMAGES[what]
    damage(trained)
    begin(trained)
    begun, ray = _resume(trained)
    assert ray.checkpoints == left
    assert begun.notes == [], "what was repaired already was told again"


def test_a_commit_torn_under_a_living_attempt_does_not_cost_its_checkpoint(store: RunStore) -> None:
    _report(Ray(store, begin(store).attempt).start(), EPOCHS[:1])
    begun, _ = _resume(store)
    for commit in ((1, 1), (begun.attempt, 1)):  # its base, then its own
        _rewrite(layout.commit_name(*commit), _half)(store)
        assert remove_interrupted_uploads(store, begun.attempt) == []
        assert store.file_sizes(EPOCHS[0])


@on_disk_and_in_memory
@pytest.mark.parametrize("has_mirror", [False, True])
@pytest.mark.parametrize("lose", [_remove, lambda name: _rewrite(name, _half)], ids=["removed", "torn"])
def test_a_run_without_any_commit_left_is_refused_with_the_way_out_and_left_as_it_is(
    trained: RunStore, lose: Callable[[str], Do], has_mirror: bool
) -> None:
    committed = CheckpointCommitted(attempt=1, checkpoint=EPOCHS[3], size_bytes=34, metrics={})
    trained.create(f"{layout.EVENTS}/0001-000.jsonl", encode_event(committed).encode())
    _on_all_commits(lose)(trained)
    if not has_mirror:
        trained.delete(layout.SNAPSHOT)
    before = {name: trained.file_sizes(name) for name in EPOCHS}
    snapshot = trained.read(layout.SNAPSHOT)
    with pytest.raises(AttemptFailedError, match="4 folders that may be checkpoints") as refused:
        begin(trained)
    assert refused.value.outcome is Outcome.INVALID
    assert "move the folders away to begin anew" in str(refused.value)
    assert {name: trained.file_sizes(name) for name in EPOCHS} == before
    assert trained.read(layout.SNAPSHOT) == snapshot
    for name in EPOCHS:
        trained.delete_folder(name)
    assert _resume(trained)[1].latest == ""
