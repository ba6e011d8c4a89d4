"""`resume_from`: which checkpoint a new run starts from, on every storage, and what is told of it."""

import math
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.checkpoint_names import loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, Owner, RunRecord, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.settings import CheckpointSettings
from prefect_elastic_train.orchestration.task import make_training
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, begin_attempt, end_attempt
from prefect_elastic_train.runs.fingerprints import fingerprint
from prefect_elastic_train.runs.run_directory import PRUNER, RunDirectory
from prefect_elastic_train.runs.seeding import Source, choose_source, copy_source, record_completed_run
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.ray_storage import Ray
from tests.unit.support import Stop, Training, begin, spec, stop


@dataclass
class Nights:
    """Runs of one deployment in a storage, one after the other, and each by a flow run of its own."""

    storage: Storage
    number: int = 0

    def claim(
        self,
        name: str,
        resume_from: str = "latest",
        flow_name: str = "nightly",
        deployment_id: str = "deployment-a",
        loop: str = "train:loop",
        config: str = "",
        part: str = "nightly",
    ) -> RunRequest:
        """Return what the driver of another night wants."""
        owner = Owner(flow_run_id=str(uuid.uuid4()), flow_name=flow_name, deployment_id=deployment_id, host="elsewhere")
        return RunRequest(
            name, owner, fingerprint(loop, "torch", {"of": config}), training_name=part, resume_from=resume_from
        )

    def add(
        self,
        name: str,
        outcome: str = "completed",
        scores: tuple[float | None, ...] = (0.5,),
        order: str = "max",
        **more: str,
    ) -> RunRecord:
        """Train a run from the beginning; without an outcome it has not ended. None is a checkpoint without a score."""
        self.number += 1
        store = self.storage.run(name)
        policy = CheckpointSettings(score_attribute="acc", score_order=order)
        attempt = begin(store, spec(self.claim(name, "", **more), checkpoints=policy)).attempt
        ray = Ray(store, attempt, checkpoint_score_attribute="acc", checkpoint_score_order=order).start()
        for number, score in enumerate(scores):
            ray.report(f"checkpoint_{number}", **({} if score is None else {"acc": score}))
        if outcome:
            end_attempt(store, attempt, outcome)
        dated = RunDirectory(store).record.model_copy(update={"created_at": self.number})
        store.replace(layout.RUN, encode(dated))
        if outcome == "completed":
            record_completed_run(self.storage, name)
        return dated

    def choose(self, resume_from: str = "latest") -> Source:
        """Return the checkpoint that another night would start from."""
        return choose_source(self.storage, self.claim("another", resume_from))

    def start(self, wanted: RunRequest) -> tuple[Begun, list[str]]:
        """Begin a run as a driver does; return what the user is told, too."""
        store = self.storage.run(wanted.run_name)
        begun = begin(store, wanted, seed=lambda: copy_source(self.storage, wanted, store))
        return begun, begun.notes


@pytest.fixture
def nights(disk: Storage) -> Nights:
    return Nights(disk)


@pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
def test_a_night_starts_from_the_best_checkpoint_of_the_newest_completed_run(storage: Storage) -> None:
    nights, prefix = Nights(storage), f"n{uuid.uuid4().hex[:8]}"
    deployment = {"deployment_id": prefix}
    nights.add(f"{prefix}-1", scores=(0.9,), **deployment)
    nights.add(f"{prefix}-2", scores=(0.1, 0.7, 0.4), **deployment)
    record_completed_run(storage, f"{prefix}-1")  # begun earlier, though it ended later
    source = storage.run(f"{prefix}-2")
    before = {name: source.file_sizes(name) for name in source.folders()}
    begun, notes = nights.start(nights.claim(f"{prefix}-3", **deployment))
    store = storage.run(f"{prefix}-3")
    assert (begun.point.base, loop_name(begun.point.checkpoint), notes) == ((0, 0), f"from-{prefix}-2", [])
    assert store.read(f"{begun.point.checkpoint}/model.pt") == b"checkpoint_1"
    assert begun.point.initial_metrics == {"acc": 0.7}
    assert RunDirectory(store).started_from == f"{storage.uri}/{prefix}-2/checkpoint_1"
    assert {name: source.file_sizes(name) for name in before} == before, "the source is untouched"


@pytest.mark.parametrize(
    ("choice", "number"),
    [("base", 2), ("base@latest", 2), ("base@best", 1), ("base@checkpoint_0", 0), ("latest@latest", 2)],
)
def test_a_new_run_starts_from_a_copy_of_another_runs_checkpoint(nights: Nights, choice: str, number: int) -> None:
    scores = (0.5, 0.9, 0.1)
    nights.add("base", scores=scores)
    store = nights.storage.run("tuned")
    wanted = nights.claim("tuned", choice)
    begun, notes = nights.start(wanted)
    assert notes == []
    assert store.read(f"{begun.point.checkpoint}/model.pt") == f"checkpoint_{number}".encode()
    assert begun.point.initial_metrics == {"acc": scores[number]}
    # A restart goes on from its own checkpoints, and does not copy again, though the source is gone.
    nights.storage.run("base").delete_folder("")
    Training(store, begun.attempt).report("mine")
    again = begin(store, wanted, seed=lambda: pytest.fail("copied again"))
    assert (again.point.checkpoint, again.point.initial_metrics) == ("mine", {})


@pytest.mark.parametrize(("order", "best"), [("min", 1), ("max", 2)])
def test_the_best_checkpoint_of_a_run_is_one_that_has_a_score(nights: Nights, order: str, best: int) -> None:
    nights.add("base", scores=(math.nan, 0.2, 0.7, None, None), order=order)
    for resume_from in ("base@best", "latest", "latest@best"):
        source = nights.choose(resume_from)
        assert (source.folder, source.notes) == (f"checkpoint_{best}", [])
    assert nights.choose("base").folder == "checkpoint_4"


def test_without_any_score_the_best_is_refused_and_the_newest_of_the_night_before_is_taken_with_a_note(
    nights: Nights,
) -> None:
    nights.add("base", scores=(None, math.nan), order="min")
    words = r"no checkpoint of run 'base' has the score 'acc'; give base@latest for its newest one"
    with pytest.raises(AttemptFailedError, match=words):
        nights.choose("base@best")
    source = nights.choose()
    note = "resume_from='latest': no checkpoint of run 'base' has the score 'acc': its newest one is used"
    assert (source.folder, source.notes) == ("checkpoint_1", [note])


def test_a_checkpoint_is_asked_for_by_the_loops_name_of_which_the_newest_counts_or_by_its_folder(
    nights: Nights,
) -> None:
    store = nights.storage.run("base")
    training = Training(store, begin(store, nights.claim("base", "")).attempt)
    for report in (1, 9_999, 10_000):
        training.report(physical_name("epoch-1", 1, 1, report))
    folders = [result["checkpoint_dir_name"] for result in training.snapshot["checkpoint_results"]]
    for name, folder in (("epoch-1", folders[2]), (folders[0], folders[0])):
        assert nights.choose(f"base@{name}").folder == folder


def test_a_source_that_is_not_there_is_refused_with_what_there_is(nights: Nights) -> None:
    nights.add("base", scores=(0.5, 0.9))
    nights.add("going")
    owner = Owner(flow_run_id=PRUNER, flow_run_name=PRUNER)
    nights.storage.run("going").create(layout.attempt_name(2), encode(AttemptRecord(attempt=2, owner=owner)))
    with pytest.raises(ConfigurationError, match=r"'a\|b'"):
        nights.choose("a|b@best")
    with pytest.raises(ConfigurationError, match="give the run another name"):
        make_training(lambda: None, run_name="latest")
    for resume_from, words in {
        "nowhere": "nowhere has no committed checkpoint",
        "base@z": "run 'base' has no checkpoint 'z', it has checkpoint_0, checkpoint_1",
        "going@best": "run 'going' is being deleted",
    }.items():
        with pytest.raises(AttemptFailedError, match=f"resume_from='{resume_from}': .*{words}") as refused:
            nights.choose(resume_from)
        assert refused.value.outcome is Outcome.INVALID


def test_completed_runs_that_are_no_base_any_more_are_passed_over_and_named_with_the_reason(nights: Nights) -> None:
    for name in ("night-1", "damaged", "deleted", "anew", "again"):
        nights.add(name)
    nights.add("empty", scores=())
    nights.add("failed", outcome="user_error")
    nights.add("training", outcome="")
    nights.storage.run("damaged").delete_folder("checkpoint_0")
    for name in ("deleted", "anew"):
        nights.storage.run(name).delete_folder("")
    begin(nights.storage.run("anew"), nights.claim("anew", ""))
    begin(nights.storage.run("again"), replace(nights.claim("again", ""), resume=True, named=True))
    source = nights.choose()
    assert (source.run, source.folder) == ("night-1", "checkpoint_0")
    told = "\n".join(source.notes)
    for words in ("empty has no committed checkpoint", "damaged has no committed checkpoint; checkpoint checkpoint_0"):
        assert words in told
    for name in ("anew", "again", "deleted"):
        assert f"run '{name}' was deleted, or is not completed any more" in told
    assert "failed" not in told


def test_records_of_completed_runs_that_are_torn_or_lost_are_passed_over_and_a_torn_one_is_told(nights: Nights) -> None:
    for name in ("night-1", "night-2", "night-3"):
        nights.add(name)
    folder = Path(nights.storage.uri, ".elastic_train", "completed")
    _, torn, lost = sorted(folder.rglob("*.json"))
    torn.write_bytes(torn.read_bytes()[:100])
    lost.unlink()
    source = nights.choose()
    assert source.run == "night-1"
    assert f"{torn}, the record of a completed run, is torn" in source.notes[0]
    record_completed_run(nights.storage, "night-2")
    assert nights.choose().run == "night-2"
    assert nights.storage.run_names() == ["night-1", "night-2", "night-3"], "it is no run"


def test_only_the_newest_completed_runs_of_a_training_stay_recorded(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect_elastic_train.runs.seeding._RECENT_RUNS", 2)
    for number in range(4):
        nights.add(f"night-{number}")
    recorded = sorted(Path(nights.storage.uri, ".elastic_train", "completed").rglob("*.json"))
    assert [path.stem.partition("-")[2] for path in recorded] == ["night-2", "night-3"]


def test_only_runs_of_the_same_training_of_the_same_deployment_count(nights: Nights) -> None:
    first = nights.add("night-1", config="other")
    nights.add("other-deployment", deployment_id="deployment-b")
    nights.add("by-hand", deployment_id="")
    nights.add("other-loop", loop="train:other_loop")
    nights.add("other-place", loop="my.vision:loop")
    nights.add("second-training", part="nightly-2")
    source = nights.choose()
    assert source.run == "night-1"
    assert source.notes == [
        "resume_from='latest': run 'night-1' had another configuration: train_loop_config['of'] changed"
    ]
    # Without a deployment the flow's name decides.
    nights.add("by-hand-of-another-flow", deployment_id="", flow_name="weekly")
    assert choose_source(nights.storage, nights.claim("by-hand-2", deployment_id="")).run == "by-hand"
    # A flow run does not start from what it has trained itself.
    assert choose_source(nights.storage, replace(nights.claim("mine"), owner=first.creator)).run == ""


def test_the_first_night_trains_from_the_beginning_and_says_so(nights: Nights) -> None:
    begun, (note,) = nights.start(nights.claim("night-1"))
    assert (begun.point.checkpoint, RunDirectory(nights.storage.run("night-1")).started_from) == ("", "")
    assert "holds no completed run with a checkpoint of training 'nightly'" in note
    assert "training starts from the beginning" in note


def test_a_run_that_is_taken_over_before_its_first_commit_starts_from_what_it_was_to_start_from(
    nights: Nights,
) -> None:
    nights.add("night-1")
    store = nights.storage.run("night-2")
    with pytest.raises(Stop):
        begin_attempt(store, spec(nights.claim("night-2")), seed=stop)
    other = replace(nights.claim("night-2", ""), resume=True, named=True)
    begun = begin(store, other, seed=lambda: copy_source(nights.storage, other, store))
    assert loop_name(begun.point.checkpoint) == "from-night-1"


@pytest.mark.parametrize("why", [r"model\.pt has 4 bytes", "it was deleted meanwhile"])
def test_a_copy_that_is_not_whole_is_no_first_commit_and_is_removed(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    nights.add("night-0")
    nights.add("night-1")
    copy_folder = LocalRunStore.copy_folder

    def lose_some(self: LocalRunStore, source: str, name: str) -> None:
        if "deleted" in why:
            nights.storage.run("night-1").delete_folder("")
        copy_folder(self, source, name)
        Path(self.path, name, "model.pt").write_bytes(b"half")

    monkeypatch.setattr(LocalRunStore, "copy_folder", lose_some)
    wanted = nights.claim("night-2")
    store = nights.storage.run("night-2")
    with pytest.raises(AttemptFailedError, match=f"the copy of the checkpoint is damaged: {why}") as error:
        nights.start(wanted)
    assert (error.value.outcome, RunDirectory(store).commit_ids) == (Outcome.STORAGE_ERROR, [])
    left = RunDirectory(store).leftovers
    assert len(left) == ("deleted" not in why)
    monkeypatch.undo()
    begun, _ = nights.start(wanted)
    assert begun.point.checkpoint not in left, "written into what another copy left"
    assert loop_name(begun.point.checkpoint) == ("from-night-0" if "deleted" in why else "from-night-1")
    assert store.read(f"{begun.point.checkpoint}/model.pt") == b"checkpoint_0"


def test_each_night_shows_what_it_started_from_and_names_of_copies_do_not_grow(nights: Nights) -> None:
    nights.add("night-0")
    for number in (1, 2):  # neither of which trains anything better
        begun, _ = nights.start(nights.claim(f"night-{number}"))
        assert loop_name(begun.point.checkpoint) == f"from-night-{number - 1}"
        end_attempt(nights.storage.run(f"night-{number}"), 1, "completed")
        record_completed_run(nights.storage, f"night-{number}")
    started_from = RunDirectory(nights.storage.run("night-2")).started_from
    assert loop_name(started_from) == f"{nights.storage.uri}/night-1/from-night-0"
    assert os.path.isfile(f"{started_from}/model.pt")
    shown = CliRunner().invoke(app, ["runs", "show", nights.storage.uri, "night-1"]).stdout
    assert f"started from:   {nights.storage.uri}/night-0/checkpoint_0" in shown
