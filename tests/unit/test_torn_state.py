"""Every kind of damage to a run's state, and what Ray Train's own checkpoint manager makes of the run afterwards.

Each run has reported four checkpoints when it is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefect_elastic_train.core.checkpoint_names import loop_name, physical_name
from prefect_elastic_train.core.events import CheckpointCommitted, encode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, CommitRecord, decode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun
from prefect_elastic_train.runs.commits import all_commits
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.storage.store import RunStore
from tests.unit.ray_storage import Ray, raw_ray
from tests.unit.support import begin, claim, neighbour, on_disk_and_in_memory

EPOCHS = [physical_name(f"epoch-{number}", 1, 1, number) for number in range(1, 5)]
OTHER_NAMES = ["a", "b", "c", "d"]
COMMIT = layout.commit_name(1, 4)
GARBAGE = bytes(range(256)) * 4

Do = Callable[[RunStore], None]
Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Damage:
    """Something that happens to a run directory between two attempts.

    Attributes:
        what: What happens, as the name of the case.
        do: Makes it happen.
        left: The committed checkpoints that are whole afterwards.
        repairs: What the next attempt does about its lineage; it is told and recorded with the attempt.
        note: What it does about Ray's own file or the run's record; it is told.
    """

    what: str
    do: Do
    left: tuple[str, ...] = tuple(EPOCHS)
    repairs: tuple[str, ...] = ()
    note: str = ""


def _report(ray: Ray, names: list[str], *, ranks: int = 2, loss: float = 0.5, more: str = "") -> None:
    """Report checkpoints, in which every file tells whose it is."""
    for name in names:
        files = {f"rank-{rank}/model.pt": f"{name} of rank {rank}{more}".encode() for rank in range(ranks)}
        ray.report(name, files, loss=loss)


def _resume(store: RunStore) -> tuple[Begun, Ray]:
    """Begin an attempt and start Ray's manager on it, up to where workers would start."""
    begun = begin(store)
    ray = Ray(store, begun.attempt).start()
    remove_interrupted_uploads(store, begun.attempt)
    return begun, ray


def _other_run(store: RunStore, names: list[str], more: str = "") -> RunStore:
    """Train another run, which reports as often as this one."""
    other = neighbour(store, "other")
    _report(Ray(other, begin(other, claim(name="other")).attempt).start(), names, loss=0.25, more=more)
    return other


def _raw_ray_knows(store: RunStore) -> list[str]:
    """Give the checkpoints that Ray Train finds in the run directory without us."""
    return [Path(result.checkpoint.path).name for result in raw_ray(store)._checkpoint_results]


def _rewrite(name: str, change: Change) -> Do:
    def do(store: RunStore) -> None:
        store.replace(name, change(store.read(name) or b""))

    return do


def _remove(name: str) -> Do:
    def do(store: RunStore) -> None:
        if store.read(name) is not None:
            store.delete(name)
        else:
            assert store.delete_folder(name)

    return do


def _replace_by_other_runs(name: str, checkpoints: list[str]) -> Do:
    def do(store: RunStore) -> None:
        store.replace(name, _other_run(store, checkpoints).read(name) or b"")

    return do


def _both(first: Do, second: Do) -> Do:
    def do(store: RunStore) -> None:
        first(store)
        second(store)

    return do


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


TORN: dict[str, Change] = {
    "emptied": lambda data: b"",
    "cut": _half,
    "replaced by garbage": lambda data: GARBAGE,
    "replaced by other JSON": lambda data: b'{"epoch": 4}',
}

SNAPSHOT_WRITTEN_ANEW = "Ray's snapshot was torn and was written anew from the newest commit"
SNAPSHOT_DIFFERED = "Ray's snapshot differed from the newest commit and was written anew from it"
SNAPSHOT_MISSED = "Ray's snapshot was missing and was written anew from the newest commit"
COMMIT_TORN = "commit 0001-000004 is torn and was passed over"
WRITTEN_ANEW = "was written anew from Ray's snapshot; the files of epoch-4 could not be checked"
COMMIT_REGAINED = f"commit 0001-000004 was torn and {WRITTEN_ANEW}"
FOREIGN_REGAINED = f"commit 0001-000004 was another run's and {WRITTEN_ANEW}"

SNAPSHOTS = [
    *[
        Damage(f"snapshot {how}", _rewrite(layout.SNAPSHOT, torn), note=SNAPSHOT_WRITTEN_ANEW)
        for how, torn in TORN.items()
    ],
    *[
        Damage(
            f"snapshot replaced by another run's with {which} checkpoint names",
            _replace_by_other_runs(layout.SNAPSHOT, names),
            note=SNAPSHOT_DIFFERED,
        )
        for which, names in {"other": OTHER_NAMES, "the same": EPOCHS}.items()
    ],
    Damage("snapshot removed", _remove(layout.SNAPSHOT), note=SNAPSHOT_MISSED),
]

COMMITS = [
    *[Damage(f"newest commit {how}", _rewrite(COMMIT, torn), repairs=(COMMIT_REGAINED,)) for how, torn in TORN.items()],
    Damage(
        "newest commit replaced by another run's with other checkpoint names",
        _replace_by_other_runs(COMMIT, OTHER_NAMES),
        repairs=(FOREIGN_REGAINED,),
    ),
    Damage("newest commit removed", _remove(COMMIT), tuple(EPOCHS[:3]), note=SNAPSHOT_DIFFERED),
]

BOTH = [
    Damage(
        f"snapshot and newest commit {how}",
        _both(_rewrite(layout.SNAPSHOT, torn), _rewrite(COMMIT, torn)),
        tuple(EPOCHS[:3]),
        (COMMIT_TORN,),
    )
    for how, torn in TORN.items()
] + [
    Damage(
        "snapshot removed and newest commit replaced by another run's with other checkpoint names",
        _both(_remove(layout.SNAPSHOT), _replace_by_other_runs(COMMIT, OTHER_NAMES)),
        tuple(EPOCHS[:3]),
        ("commit 0001-000004 is another run's and was passed over",),
    ),
    Damage(
        "snapshot and newest commit removed",
        _both(_remove(layout.SNAPSHOT), _remove(COMMIT)),
        tuple(EPOCHS[:3]),
        note=SNAPSHOT_MISSED,
    ),
]


def _checkpoint_damages(which: str, name: str) -> list[Damage]:
    left = tuple(epoch for epoch in EPOCHS if epoch != name)
    dropped = f"checkpoint {loop_name(name)} was dropped: "
    file = f"{name}/rank-1/model.pt"
    size = len(f"{name} of rank 1")
    return [
        Damage(f"{which} checkpoint removed", _remove(name), left, (f"{dropped}its folder is missing",)),
        Damage(
            f"file of {which} checkpoint cut",
            _rewrite(file, _half),
            left,
            (f"{dropped}rank-1/model.pt has {size // 2} bytes instead of {size}",),
        ),
        Damage(
            f"file of {which} checkpoint removed",
            _remove(file),
            left,
            (f"{dropped}1 of 2 files are missing, first rank-1/model.pt",),
        ),
    ]


CHECKPOINTS = [
    damage
    for which, name in {"oldest": EPOCHS[0], "middle": EPOCHS[1], "newest": EPOCHS[3]}.items()
    for damage in _checkpoint_damages(which, name)
]

RECORDS = [
    *[
        Damage(
            f"run record {how}", _rewrite(layout.RUN, torn), note="run.json was torn or missing and was written anew"
        )
        for how, torn in TORN.items()
    ],
    Damage("run record removed", _remove(layout.RUN), note="run.json was torn or missing and was written anew"),
    # What an attempt has committed speaks for it, so nothing needs doing.
    *[Damage(f"attempt record {how}", _rewrite(layout.attempt_name(1), torn)) for how, torn in TORN.items()],
    Damage("attempt record removed", _remove(layout.attempt_name(1))),
]

DAMAGES = [*SNAPSHOTS, *COMMITS, *BOTH, *CHECKPOINTS, *RECORDS]
EVERY_DAMAGE = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.what)

#: One way to tear an object is as good as another in an object store.
SOME_DAMAGE = [damage for damage in DAMAGES if not damage.what.endswith(tuple(list(TORN)[1:]))]
EVERY_DAMAGE_AND_SOME_IN_A_STORE = pytest.mark.parametrize(
    ("store", "damage"),
    [
        pytest.param(store, damage, id=f"{store}, {damage.what}")
        for store, damages in {"disk": DAMAGES, "memory": SOME_DAMAGE}.items()
        for damage in damages
    ],
    indirect=["store"],
)


@pytest.fixture
def trained(store: RunStore) -> RunStore:
    """A run whose first attempt has reported four checkpoints."""
    _report(Ray(store, begin(store).attempt).start(), EPOCHS)
    return store


@EVERY_DAMAGE_AND_SOME_IN_A_STORE
def test_ray_is_handed_the_newest_whole_checkpoint_and_the_repair_is_told(trained: RunStore, damage: Damage) -> None:
    damage.do(trained)
    begun, ray = _resume(trained)
    assert ray.checkpoints == list(damage.left)
    assert ray.latest == begun.point.checkpoint == damage.left[-1]
    with ray.manager.latest_checkpoint_result.checkpoint.as_directory() as folder:
        files = {path.parent.name: path.read_text() for path in Path(folder).glob("*/*")}
    assert files == {f"rank-{rank}": f"{damage.left[-1]} of rank {rank}" for rank in range(2)}
    assert ray.manager.latest_checkpoint_result.metrics == {"loss": 0.5}
    assert _raw_ray_knows(trained) == list(damage.left), "the file on disk does not fit"
    assert begun.notes == [*damage.repairs, *([damage.note] if damage.note else [])]
    record = decode(AttemptRecord, trained.read(layout.attempt_name(begun.attempt)))
    assert record is not None
    assert record.repairs == list(damage.repairs)


@EVERY_DAMAGE
def test_training_goes_on_after_the_damage_and_the_next_attempt_resumes_there(
    trained: RunStore, damage: Damage
) -> None:
    damage.do(trained)
    second, ray = _resume(trained)
    reported = [physical_name(f"epoch-{number}", second.attempt) for number in range(5, 8)]
    _report(ray, reported)
    third, ray = _resume(trained)
    assert third.point.base == (second.attempt, 3)
    assert ray.checkpoints == [*damage.left, *reported]
    assert ray.latest == reported[-1]
    assert third.notes == []
    assert sorted(reported + list(damage.left)) == [name for name in trained.folders() if name != layout.STATE_FOLDER]


@EVERY_DAMAGE
def test_an_attempt_that_dies_at_once_leaves_its_repair_to_the_next(trained: RunStore, damage: Damage) -> None:
    damage.do(trained)
    begin(trained)
    begun, ray = _resume(trained)
    assert ray.checkpoints == list(damage.left)
    assert ray.latest == damage.left[-1]
    assert begun.notes == [], "what was repaired already was told again"


@pytest.mark.parametrize(("lose", "newest"), [(lambda store: None, 4), (_remove(layout.SNAPSHOT), 3)])
@pytest.mark.parametrize("more", ["", " and more"], ids=["of the same sizes", "of other sizes"])
def test_another_runs_commit_that_names_the_same_checkpoints_is_passed_over(
    trained: RunStore, more: str, lose: Do, newest: int
) -> None:
    trained.replace(COMMIT, _other_run(trained, EPOCHS, more).read(COMMIT) or b"")
    lose(trained)
    begun, ray = _resume(trained)
    whole = [name for name in EPOCHS[:newest] if trained.file_sizes(name)]
    assert whole == EPOCHS[:newest], f"whole checkpoints were removed, and {begun.notes} was told"
    assert ray.manager.latest_checkpoint_result.metrics == {"loss": 0.5}, "Ray knows what the other run reported"
    assert ray.latest == begun.point.checkpoint == EPOCHS[newest - 1]


@pytest.mark.parametrize("torn", TORN.values(), ids=TORN)
def test_the_only_commit_is_given_back_by_rays_snapshot(store: RunStore, torn: Change) -> None:
    _report(Ray(store, begin(store).attempt).start(), EPOCHS[:1])
    whole = decode(CommitRecord, store.read(layout.commit_name(1, 1)))
    _rewrite(layout.commit_name(1, 1), torn)(store)
    begun, ray = _resume(store)
    assert ray.latest == begun.point.checkpoint == EPOCHS[0]
    assert store.file_sizes(EPOCHS[0]) == {f"rank-{rank}/model.pt": 10 + len(EPOCHS[0]) for rank in range(2)}
    again = decode(CommitRecord, store.read(layout.commit_name(1, 1)))
    assert whole is not None
    assert again is not None
    assert again.model_dump(exclude={"at"}) == whole.model_dump(exclude={"at"})


def test_the_only_commit_torn_without_proof_is_refused_and_its_checkpoint_stays(store: RunStore) -> None:
    _report(Ray(store, begin(store).attempt).start(), EPOCHS[:1])
    for name in (layout.commit_name(1, 1), layout.SNAPSHOT):
        _rewrite(name, _half)(store)
    with pytest.raises(AttemptFailedError, match=r"1 folders that may be checkpoints \(epoch-1\."):
        begin(store)
    assert store.file_sizes(EPOCHS[0])


def test_a_commit_torn_under_a_living_attempt_does_not_cost_the_newest_checkpoint(store: RunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    _report(ray, EPOCHS[:2])
    _rewrite(layout.commit_name(1, 2), _half)(store)
    half = physical_name("epoch-3", 1)
    ray.upload(half, {"rank-0/model.pt": b"half"})
    assert remove_interrupted_uploads(store, 1) == {half: "upload interrupted"}
    _rewrite(layout.SNAPSHOT, _half)(store)
    assert remove_interrupted_uploads(store, 1) == {}, "nothing tells what it needs"
    assert store.file_sizes(EPOCHS[1])


def test_a_base_torn_under_a_living_attempt_does_not_cost_its_checkpoint(store: RunStore) -> None:
    _report(Ray(store, begin(store).attempt).start(), EPOCHS[:1])
    begun, _ = _resume(store)
    _rewrite(layout.commit_name(1, 1), _half)(store)
    assert remove_interrupted_uploads(store, begun.attempt) == {}
    assert store.file_sizes(EPOCHS[0])


def test_rays_snapshot_of_an_earlier_commit_is_no_proof_of_a_torn_one(store: RunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    _report(ray, EPOCHS[:1])
    earlier = store.read(layout.SNAPSHOT) or b""
    _report(ray, EPOCHS[1:2])
    # A holder that was stopped wrote its last mirror late.
    store.replace(layout.SNAPSHOT, earlier)
    _rewrite(layout.commit_name(1, 2), _half)(store)
    begun, ray = _resume(store)
    assert (ray.latest, begun.notes) == (EPOCHS[0], ["commit 0001-000002 is torn and was passed over"])


def test_another_attempts_upload_is_no_proof_of_a_torn_commit(store: RunStore) -> None:
    _report(Ray(store, begin(store).attempt).start(), EPOCHS[:2])
    third, ray = _resume(store)
    _report(ray, [physical_name("epoch-3", third.attempt)])
    mirror = store.read(layout.SNAPSHOT) or b""
    fourth, ray = _resume(store)
    _report(ray, [physical_name("epoch-4", fourth.attempt)])
    for attempt in (third.attempt, fourth.attempt):
        _rewrite(layout.commit_name(attempt, 1), _half)(store)
    store.replace(layout.SNAPSHOT, mirror)
    assert _resume(store)[1].latest == EPOCHS[1]


def _on_all_commits(do: Callable[[str], Do]) -> Do:
    def on_all(store: RunStore) -> None:
        for commit in all_commits(store):
            do(layout.commit_name(*commit))(store)

    return on_all


NO_COMMIT_LEFT = pytest.mark.parametrize(
    "lose",
    [
        _both(_on_all_commits(_remove), _remove(layout.SNAPSHOT)),
        _on_all_commits(_remove),
        _both(_on_all_commits(lambda name: _rewrite(name, _half)), _remove(layout.SNAPSHOT)),
        _on_all_commits(lambda name: _rewrite(name, _half)),
    ],
    ids=["commits and snapshot removed", "commits removed", "commits torn, snapshot removed", "commits torn"],
)


@on_disk_and_in_memory
@NO_COMMIT_LEFT
def test_a_run_without_any_commit_left_is_refused_with_the_way_out_and_left_as_it_is(
    trained: RunStore, lose: Do
) -> None:
    committed = CheckpointCommitted(attempt=1, checkpoint=EPOCHS[3], size_bytes=34, metrics={})
    trained.create(f"{layout.EVENTS}/0001-000.jsonl", encode_event(committed).encode())
    lose(trained)
    before = {name: trained.file_sizes(name) for name in EPOCHS}
    snapshot = trained.read(layout.SNAPSHOT)
    with pytest.raises(AttemptFailedError, match="4 folders that may be checkpoints") as refused:
        begin(trained)
    assert refused.value.outcome is Outcome.INVALID
    assert "move the folders away to begin anew" in str(refused.value)
    assert ("give resume=True to trust Ray's snapshot" in str(refused.value)) == (snapshot is not None)
    assert {name: trained.file_sizes(name) for name in EPOCHS} == before
    assert trained.read(layout.SNAPSHOT) == snapshot
    for name in EPOCHS:
        trained.delete_folder(name)
    _, ray = _resume(trained)
    assert ray.latest == ""
    _report(ray, EPOCHS[:1], ranks=1)
    assert trained.file_sizes(EPOCHS[0]) == {"rank-0/model.pt": len(f"{EPOCHS[0]} of rank 0")}
