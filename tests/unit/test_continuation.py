"""`resume_from="latest"`: which run a night starts from, on every storage, and what is told of it."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.checkpoint_names import loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, Owner, RunRecord, decode, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.orchestration.task import elastic_train
from prefect_elastic_train.runs import layout, seeding
from prefect_elastic_train.runs.ancestry import ancestors
from prefect_elastic_train.runs.attempts import Begun, begin_attempt, end_attempt, host_id, peek, process_start
from prefect_elastic_train.runs.commits import all_commits, newest_attempt
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.runs.model import PRUNER, RunDirectory
from prefect_elastic_train.runs.pruning import AwaitedSources, RunChangedError, carry_out, plan_run
from prefect_elastic_train.runs.seeding import Source, choose_source, note_completed, parse_source, seed_from_source
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from tests.support.s3 import FaultProxy
from tests.unit.support import Training, begin, spec

DAY = 86400.0

on_all_storages = pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)


@dataclass
class Nights:
    """Runs of one deployment in a storage, each a day after the one before, and each by a flow run of its own."""

    storage: Storage
    number: int = 0
    names: dict[str, str] = field(default_factory=dict)

    def claim(self, name: str, **more: str) -> RunRequest:
        """Give what the driver of another night wants."""
        owner = Owner(
            flow_run_id=str(uuid.uuid4()),
            flow_name=more.pop("flow_name", "nightly"),
            deployment_id=more.pop("deployment_id", "deployment-a"),
            host="elsewhere/1",
        )
        marks = fingerprint(more.pop("loop", "train:loop"), "torch", None)
        part = more.pop("part", "nightly")
        return RunRequest(name, owner, marks, part=part, resume_from="latest", **more)

    def add(self, name: str, outcome: str = "completed", scores: tuple[float, ...] = (0.5,), **more: str) -> RunRecord:
        """Train a run from the beginning; without an outcome it has not ended."""
        self.number += 1
        store = self.storage.run(name)
        wanted = replace(self.claim(name, **more), resume_from="")
        training = Training(store, begin(store, wanted).attempt)
        for number, score in enumerate(scores):
            training.report(f"checkpoint_{number}", {"acc": score})
            _rank_by_score(training)
        if outcome:
            end_attempt(store, newest_attempt(store), outcome)
        record = decode(RunRecord, store.read(layout.RUN))
        assert record is not None
        dated = record.model_copy(update={"created_at": time.time() - 100 * DAY + self.number * DAY})
        store.replace(layout.RUN, encode(dated))
        if outcome == "completed":
            note_completed(self.storage, name)
        return dated

    def source(self, wanted: RunRequest) -> Source:
        """Give what a night's driver finds before it begins."""
        return choose_source(self.storage, wanted, self.storage.run(wanted.run_name))

    def start(self, wanted: RunRequest) -> tuple[Begun, list[str]]:
        """Begin a run as a driver does; give what the user is told, too."""
        source = self.source(wanted)
        notes = list(source.notes)
        store = self.storage.run(wanted.run_name)

        def seed() -> None:
            notes.extend(seed_from_source(self.storage, wanted, store))

        begun = begin(store, wanted, source=source.checkpoint, seed=seed)
        return begun, notes


def _rank_by_score(training: Training) -> None:
    """Keep the results as Ray does: the best last. The next commit has them in this order."""
    results, indices = training.snapshot["checkpoint_results"], training.snapshot["checkpoint_report_indices"]
    pairs = sorted(zip(results, indices, strict=True), key=lambda pair: pair[0]["metrics"]["acc"])
    training.snapshot["checkpoint_results"] = [result for result, _ in pairs]
    training.snapshot["checkpoint_report_indices"] = [index for _, index in pairs]
    training.log.commit(json.dumps(training.snapshot).encode())


@pytest.fixture
def nights(storage: Storage) -> Nights:
    return Nights(storage)


@pytest.fixture
def on_disk(disk: Storage) -> Nights:
    return Nights(disk)


@on_all_storages
def test_a_night_starts_from_the_best_checkpoint_of_the_newest_completed_run(nights: Nights, storage: Storage) -> None:
    prefix = f"n{uuid.uuid4().hex[:8]}"
    deployment = {"deployment_id": prefix}
    nights.add(f"{prefix}-1", scores=(0.9,), **deployment)
    nights.add(f"{prefix}-2", scores=(0.1, 0.7, 0.4), **deployment)
    before = {name: storage.run(f"{prefix}-2").file_sizes(name) for name in storage.run(f"{prefix}-2").folders()}
    begun, notes = nights.start(nights.claim(f"{prefix}-3", **deployment))
    store = storage.run(f"{prefix}-3")
    assert loop_name(begun.point.checkpoint) == f"from-{prefix}-2-checkpoint_1"
    assert store.read(f"{begun.point.checkpoint}/model.pt") == b"weights of checkpoint_1"
    assert notes == []
    assert RunDirectory(store).started_from == f"{storage.uri}/{prefix}-2/checkpoint_1"
    assert {name: storage.run(f"{prefix}-2").file_sizes(name) for name in before} == before, "the source is untouched"


@pytest.mark.parametrize(
    ("resume_from", "parsed"),
    [
        ("latest", ("latest", "best")),
        ("latest@latest", ("latest", "latest")),
        ("latest@best", ("latest", "best")),
        ("mnist", ("mnist", "latest")),
        ("mnist@best", ("mnist", "best")),
    ],
)
def test_latest_is_the_newest_run_whose_best_checkpoint_is_meant_unless_one_is_named(
    resume_from: str, parsed: tuple[str, str]
) -> None:
    assert parse_source(resume_from) == parsed


@pytest.mark.parametrize("bad", ["../up", "@best", "a/b@best"])
def test_a_source_is_the_name_of_a_run(bad: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_source(bad)


def test_the_newest_checkpoint_of_the_newest_run_can_be_asked_for(on_disk: Nights) -> None:
    on_disk.add("night-1", scores=(0.9, 0.5))
    wanted = replace(on_disk.claim("night-2"), resume_from="latest@latest")
    assert on_disk.source(wanted) == Source("night-1@checkpoint_1")


@pytest.mark.parametrize(
    ("resume_from", "number"),
    [("base", 2), ("base@latest", 2), ("base@best", 1), ("base@checkpoint_0", 0)],
)
def test_a_new_run_starts_from_a_copy_of_another_runs_checkpoint(
    on_disk: Nights, resume_from: str, number: int
) -> None:
    scores = (0.5, 0.9, 0.1)
    on_disk.add("base", scores=scores)
    store = on_disk.storage.run("tuned")
    store.create(f"{physical_name(f'from-base-checkpoint_{number}', 0)}/half", b"of a copy that was interrupted")
    wanted = replace(on_disk.claim("tuned"), resume_from=resume_from)
    begun, notes = on_disk.start(wanted)
    folder = begun.point.checkpoint
    assert (begun.point.base, loop_name(folder), notes) == ((0, 0), f"from-base-checkpoint_{number}", [])
    assert store.read(f"{folder}/model.pt") == f"weights of checkpoint_{number}".encode()
    assert list(store.file_sizes(folder) or {}) == ["model.pt"]
    assert begun.point.inherited_metrics == {"acc": scores[number]}
    # A restart goes on from its own checkpoints, and does not copy again.
    Training(store, begun.attempt).report("mine")
    again = begin(store, wanted, seed=lambda: pytest.fail("copied again"))
    assert (again.point.checkpoint, again.point.inherited_metrics) == ("mine", {})


def test_a_checkpoint_is_asked_for_by_the_loops_name_of_which_the_newest_counts(on_disk: Nights) -> None:
    store = on_disk.storage.run("base")
    training = Training(store, begin(store, replace(on_disk.claim("base"), resume_from="")).attempt)
    for report in (1, 9_999, 10_000):
        training.report(physical_name("epoch-1", 1, 1, report))
    for name, report in (("epoch-1", 10_000), (physical_name("epoch-1", 1, 1, 1), 1)):
        source = on_disk.source(replace(on_disk.claim("tuned"), resume_from=f"base@{name}"))
        assert source.folder == physical_name("epoch-1", 1, 1, report)


def test_a_checkpoint_is_asked_for_by_its_folder_whatever_that_is_called(on_disk: Nights) -> None:
    store = on_disk.storage.run("base")
    training = Training(store, begin(store, replace(on_disk.claim("base"), resume_from="")).attempt)
    folder = physical_name("e", 1, 1, 1)
    for score, name in enumerate(["best", physical_name(folder, 1, 2, 1), folder][::-1]):  # it gives back what it reads
        training.report(name, {"acc": -score})
    assert on_disk.source(replace(on_disk.claim("tuned"), resume_from=f"base@{folder}")).folder == folder
    _rank_by_score(training)
    begun, _ = on_disk.start(replace(on_disk.claim("tuned"), resume_from="base@latest"))
    assert begun.point.inherited_metrics == {"acc": -2}


def test_a_source_that_trains_on_while_it_is_chosen_is_copied_as_it_was_chosen_first(
    on_disk: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_disk.storage.run("base")
    training = Training(store, begin(store, replace(on_disk.claim("base"), resume_from="")).attempt)
    training.report("c0", {"of": "c0"})
    choose, turn = seeding._choose, itertools.count(1)

    def choose_while_it_trains(*arguments: Any, **more: Any) -> Any:
        chosen = choose(*arguments, **more)
        training.report(f"c{next(turn)}")
        return chosen

    monkeypatch.setattr(seeding, "_choose", choose_while_it_trains)
    begun, notes = on_disk.start(replace(on_disk.claim("tuned"), resume_from="base"))
    assert (begun.point.inherited_metrics, notes) == ({"of": "c0"}, [])


@pytest.mark.parametrize(
    ("resume_from", "words"),
    [
        ("nowhere", "nowhere has no committed checkpoint"),
        ("base@z", "run 'base' has no checkpoint 'z'; it has checkpoint_0, checkpoint_1"),
    ],
)
def test_a_source_that_is_not_there_is_refused_with_what_there_is(
    on_disk: Nights, resume_from: str, words: str
) -> None:
    on_disk.add("base", scores=(0.5, 0.9))
    with pytest.raises(AttemptFailedError, match=words) as refused:
        on_disk.source(replace(on_disk.claim("tuned"), resume_from=resume_from))
    assert refused.value.outcome is Outcome.INVALID


def test_no_run_can_be_named_latest() -> None:
    with pytest.raises(ConfigurationError, match="give the run another name"):
        elastic_train.ask(lambda: None, run_name="latest")


def test_completed_runs_that_are_no_base_any_more_are_passed_over_and_named_with_the_reason(on_disk: Nights) -> None:
    for name in ("night-1", "damaged", "deleted", "anew", "again", "worse"):
        on_disk.add(name)
    on_disk.add("empty", scores=())
    on_disk.add("failed", outcome="user_error")
    on_disk.add("training", outcome="")
    on_disk.storage.run("damaged").delete_folder("checkpoint_0")
    for name in ("deleted", "anew"):
        on_disk.storage.run(name).delete_folder("")
    begin(on_disk.storage.run("anew"), replace(on_disk.claim("anew"), resume_from=""))
    for name in ("again", "worse"):
        begin(on_disk.storage.run(name), replace(on_disk.claim(name), resume_from="", resume=True, named=True))
    end_attempt(on_disk.storage.run("worse"), 2, "user_error")
    source = on_disk.source(on_disk.claim("night-2"))
    assert source.checkpoint == "night-1@checkpoint_0"
    (note,) = source.notes
    assert note.startswith("resume_from='latest' passed over ")
    for words in (
        "empty has no committed checkpoint",
        "'worse' ended as user_error",
        "'again' goes on",
        "'anew' is gone",
    ):
        assert words in note
    assert note.endswith("and 1 more")
    assert "failed" not in note


def test_what_tells_the_completed_runs_is_torn_lost_and_made_anew(on_disk: Nights) -> None:
    on_disk.add("night-1")
    on_disk.add("night-2")
    [pointer] = Path(on_disk.storage.uri, ".elastic_train", "completed").rglob("*.json")
    pointer.write_bytes(pointer.read_bytes()[:100])
    with pytest.raises(AttemptFailedError, match=f"{pointer}, which names the completed runs, is torn; name the run"):
        on_disk.source(on_disk.claim("night-3"))
    pointer.unlink()
    assert on_disk.source(on_disk.claim("night-3")).checkpoint == "", "it is told that it begins at the beginning"
    note_completed(on_disk.storage, "night-1")
    assert on_disk.source(on_disk.claim("night-3")).run == "night-1"
    assert on_disk.storage.run_names() == ["night-1", "night-2"], "it is no run"


def test_only_runs_of_the_same_training_of_the_same_deployment_count(on_disk: Nights) -> None:
    on_disk.add("night-1")
    on_disk.add("other-deployment", deployment_id="deployment-b")
    on_disk.add("by-hand", deployment_id="")
    on_disk.add("other-loop", loop="train:other_loop")
    on_disk.add("second-training", part="nightly-2")
    assert on_disk.source(on_disk.claim("night-2")).checkpoint == "night-1@checkpoint_0"
    # Without a deployment the flow's name decides.
    on_disk.add("by-hand-of-another-flow", deployment_id="", flow_name="weekly")
    assert on_disk.source(on_disk.claim("by-hand-2", deployment_id="")).checkpoint == "by-hand@checkpoint_0"
    # A flow run does not start from what it has trained itself.
    mine = on_disk.claim("mine")
    record = decode(RunRecord, on_disk.storage.run("night-1").read(layout.RUN))
    assert record is not None
    assert on_disk.source(replace(mine, owner=record.creator)).checkpoint == ""


@pytest.mark.parametrize("storage", ["disk", "memory"], indirect=True)
def test_the_first_night_trains_from_the_beginning_says_so_and_keeps_to_it(nights: Nights, storage: Storage) -> None:
    wanted = nights.claim("night-1")
    begun, (note,) = nights.start(wanted)
    assert begun.point.checkpoint == ""
    assert "holds no completed run with a checkpoint of training 'nightly'" in note
    assert "it trains from the beginning" in note
    nights.add("night-0")
    end_attempt(storage.run("night-1"), 1, Outcome.DRIVER_LOST.value)
    again, notes = nights.start(wanted)
    assert (again.attempt, again.point.checkpoint, notes) == (2, "", [])
    assert RunDirectory(storage.run("night-1")).started_from == ""


def test_what_a_retry_starts_from_is_never_looked_up_anew(on_disk: Nights) -> None:
    on_disk.add("night-1")
    wanted = on_disk.claim("night-3")
    store = on_disk.storage.run("night-3")
    source = on_disk.source(wanted)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin_attempt(store, spec(wanted), source=source.checkpoint, seed=die)
    on_disk.add("night-2")
    begun, notes = on_disk.start(wanted)
    assert (loop_name(begun.point.checkpoint), notes) == ("from-night-1-checkpoint_0", [])
    # Once it is copied, the other run may go.
    on_disk.storage.run("night-1").delete_folder("")
    end_attempt(store, 1, Outcome.DRIVER_LOST.value)
    again = begin(store, wanted, seed=lambda: pytest.fail("copied again"))
    assert loop_name(again.point.checkpoint) == "from-night-1-checkpoint_0"


def test_a_run_that_was_asked_to_start_from_another_does_not_start_from_the_newest(on_disk: Nights) -> None:
    on_disk.start(on_disk.claim("night-1"))
    wanted = replace(on_disk.claim("night-1"), resume_from="other")
    with pytest.raises(AttemptFailedError, match="did not start from 'other'"):
        begin_attempt(on_disk.storage.run("night-1"), spec(wanted))


def test_loops_of_the_same_name_from_two_places_are_two_trainings(on_disk: Nights) -> None:
    on_disk.add("other", loop="my.vision:train_loop")
    on_disk.add("by-value", loop="train_loop")
    assert on_disk.source(on_disk.claim("night-1", loop="my.text:train_loop")).checkpoint == ""
    on_disk.add("same", loop="my.text:train_loop")
    on_disk.add("other-2", loop="my.vision:train_loop")
    assert on_disk.source(on_disk.claim("night-2", loop="my.text:train_loop")).run == "same"


def _of(nights: Nights, name: str, region: str, part: str, flow_run_id: str) -> RunRequest:
    """Give what a training of a region wants, in a flow run that trains several at a time."""
    wanted = nights.claim(name)
    owner = wanted.owner.model_copy(update={"flow_run_id": flow_run_id})
    return replace(wanted, owner=owner, part=part, fingerprint=fingerprint("train:loop", "torch", {"region": region}))


@pytest.mark.parametrize(("region", "part", "run"), [("eu", "b", "eu-1"), ("us", "a", "us-1"), ("asia", "b", "us-1")])
def test_of_several_trainings_of_a_night_the_one_with_the_same_configuration_is_meant_else_the_one_in_its_place(
    on_disk: Nights, region: str, part: str, run: str
) -> None:
    for name, place in (("eu-1", "a"), ("us-1", "b")):
        _train_of(on_disk, name, place, "first-night")
    source = on_disk.source(_of(on_disk, "new", region, part, "second-night"))
    assert source.run == run
    told = f"run '{run}' had another configuration: train_loop_config['region'] changed"
    assert [told in note for note in source.notes] == ([] if run.startswith(region) else [True])


def _train_of(nights: Nights, name: str, part: str, flow_run_id: str) -> None:
    """Train for the region that a run's name begins with."""
    store = nights.storage.run(name)
    wanted = replace(_of(nights, name, name[:2], part, flow_run_id), resume_from="")
    training = Training(store, begin(store, wanted).attempt)
    training.report("checkpoint_0", {"acc": 0.5})
    end_attempt(store, newest_attempt(store), "completed")
    note_completed(nights.storage, name)


@pytest.mark.parametrize(("region", "part", "run"), [("eu", "a", "eu-1"), ("us", "b", "us-2"), ("asia", "a", "us-2")])
def test_a_night_that_trained_one_of_several_models_is_that_models(
    on_disk: Nights, region: str, part: str, run: str
) -> None:
    _train_of(on_disk, "eu-1", "a", "first-night")
    _train_of(on_disk, "us-1", "b", "first-night")
    _train_of(on_disk, "us-2", "a", "second-night")
    assert on_disk.source(_of(on_disk, "new", region, part, "third-night")).run == run


def test_another_configuration_is_no_other_training_where_a_night_has_one(on_disk: Nights) -> None:
    _train_of(on_disk, "eu-1", "a", "first-night")
    _train_of(on_disk, "us-2", "a", "second-night")
    source = on_disk.source(_of(on_disk, "new", "eu", "a", "third-night"))
    assert source.run == "us-2", "last night's"
    assert "another configuration" in source.notes[0]


def test_without_a_deployment_loops_of_two_files_are_two_trainings(on_disk: Nights, tmp_path: Path) -> None:
    def of(name: str, file: str, deployment_id: str = "") -> RunRequest:
        wanted = on_disk.claim(name, deployment_id=deployment_id)
        return replace(wanted, fingerprint=wanted.fingerprint.model_copy(update={"file": file}))

    for name, file in (("mnist-1", "/mnist/train.py"), ("cifar-1", "/cifar/train.py")):
        for deployment_id in ("", "a"):
            store = on_disk.storage.run(f"{name}{deployment_id}")
            wanted = replace(of(f"{name}{deployment_id}", file, deployment_id), resume_from="")
            training = Training(store, begin(store, wanted).attempt)
            training.report("checkpoint_0")
            end_attempt(store, newest_attempt(store), "completed")
            note_completed(on_disk.storage, wanted.run_name)
    assert on_disk.source(of("mnist-2", "/mnist/train.py")).run == "mnist-1"
    assert on_disk.source(of("other", "/other/train.py")).checkpoint == ""
    assert on_disk.source(of("installed", "")).run == "cifar-1", "nothing tells them apart"
    assert on_disk.source(of("fetched", "/tmp/a1b2/train.py", "a")).run == "cifar-1a", "the deployment does"


def test_a_recorded_source_stays_though_its_run_goes_on_and_fails(on_disk: Nights) -> None:
    on_disk.add("night-0")
    on_disk.add("night-1")
    wanted = on_disk.claim("night-2")
    store = on_disk.storage.run("night-2")
    with pytest.raises(KeyboardInterrupt):
        begin_attempt(store, spec(wanted), source=on_disk.source(wanted).checkpoint, seed=_interrupt)
    begin(on_disk.storage.run("night-1"), replace(on_disk.claim("night-1"), resume_from="", resume=True, named=True))
    assert on_disk.source(wanted) == Source("night-1@checkpoint_0")


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_run_that_is_taken_over_before_its_first_attempt_starts_from_what_was_chosen_for_it(on_disk: Nights) -> None:
    on_disk.add("night-1")
    first = on_disk.claim("night-2")
    store = on_disk.storage.run("night-2")
    with pytest.raises(KeyboardInterrupt):
        begin_attempt(store, spec(first), source=on_disk.source(first).checkpoint, seed=_interrupt)
    other = replace(on_disk.claim("night-2"), resume_from="", resume=True, named=True)
    begun = begin(store, other, seed=lambda: seed_from_source(on_disk.storage, other, store))
    assert loop_name(begun.point.checkpoint) == "from-night-1-checkpoint_0"


def test_a_run_that_another_driver_is_starting_is_refused_before_anything_starts(on_disk: Nights) -> None:
    on_disk.add("night-1")
    first = on_disk.claim("night-2")
    owner = first.owner.model_copy(
        update={"host": host_id(), "pid": os.getpid(), "process_started_at": process_start(os.getpid())}
    )
    first = replace(first, owner=owner)
    store = on_disk.storage.run("night-2")
    with pytest.raises(KeyboardInterrupt):
        begin_attempt(store, spec(first), source="night-1@checkpoint_0", seed=_interrupt)
    with pytest.raises(AttemptFailedError, match=r"belongs to .* it has not begun an attempt yet"):
        peek(store, spec(on_disk.claim("night-2")))
    wants_it = replace(on_disk.claim("night-2"), resume=True, named=True)
    with pytest.raises(AttemptFailedError, match="is being started right now by"):
        peek(store, spec(wants_it))
    with pytest.raises(AttemptFailedError, match="is being started right now by"):
        begin(store, wants_it)
    assert peek(store, spec(first)) is None


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_the_newest_run_is_found_without_a_look_at_each_run(
    nights: Nights, storage: Storage, proxy: FaultProxy
) -> None:
    prefix = f"n{uuid.uuid4().hex[:8]}"
    record = nights.add(f"{prefix}-0", deployment_id=prefix)
    for number in range(1, 30):
        storage.run(f"{prefix}-{number}").replace(layout.RUN, encode(record))
    proxy.reset_counters()
    source = nights.source(nights.claim(f"{prefix}-new", deployment_id=prefix))
    assert source.checkpoint == f"{prefix}-0@checkpoint_0"
    assert len(proxy.requests) <= 15


@pytest.fixture
def claimed(on_disk: Nights) -> RunRequest:
    """A night that has recorded what it will start from, and waits before it copies that."""
    on_disk.add("night-1", scores=(0.3,))
    on_disk.add("night-2")
    wanted = on_disk.claim("night-3")
    source = on_disk.source(wanted).checkpoint

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin_attempt(on_disk.storage.run("night-3"), spec(wanted), source=source, seed=die)
    assert source == "night-2@checkpoint_0"
    return wanted


def _prune(nights: Nights, name: str) -> list[str]:
    """Plan the deletion of a run as if nobody awaited it, and carry it out."""
    store = nights.storage.run(name)
    planned = plan_run(store, name, older_than_seconds=0, now=time.time() + DAY / 2)
    assert planned.whole is not None, planned.kept
    return [deletion.run for deletion in carry_out(store, planned, AwaitedSources(nights.storage, 0))]


def test_prune_leaves_a_run_alone_that_was_chosen_after_the_plan(on_disk: Nights, claimed: RunRequest) -> None:
    with pytest.raises(RunChangedError, match="night-3 is about to start from its checkpoint"):
        _prune(on_disk, "night-2")
    assert _prune(on_disk, "night-1") == ["night-1"]
    begun, notes = on_disk.start(claimed)
    assert (loop_name(begun.point.checkpoint), notes) == ("from-night-2-checkpoint_0", [])
    assert _prune(on_disk, "night-2") == ["night-2"], "it is awaited no more"


def _is_deleted(store: RunStore, number: int = 2) -> None:
    """Have prune take the fence of a run, as it does before it deletes anything."""
    owner = Owner(flow_run_id=PRUNER, flow_run_name=PRUNER)
    assert store.create(layout.attempt_name(number), encode(AttemptRecord(attempt=number, owner=owner)))


def test_a_night_chooses_another_run_when_prune_was_first(on_disk: Nights, claimed: RunRequest) -> None:
    _is_deleted(on_disk.storage.run("night-2"))
    store = on_disk.storage.run("night-3")
    notes: list[str] = []
    begun = begin(store, claimed, seed=lambda: notes.extend(seed_from_source(on_disk.storage, claimed, store)))
    assert loop_name(begun.point.checkpoint) == "from-night-1-checkpoint_0"
    assert "it was to start from night-2@checkpoint_0, but run 'night-2' is being deleted" in notes[0]
    assert RunDirectory(store).started_from.endswith("/night-1/checkpoint_0")


def test_a_copy_that_is_not_whole_is_no_first_commit_and_is_told_by_its_name(
    on_disk: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk.add("night-1")
    copy_folder = LocalRunStore.copy_folder

    def lose_some(self: LocalRunStore, source: str, name: str) -> None:
        copy_folder(self, source, name)
        Path(self.path, name, "model.pt").write_bytes(b"half")

    monkeypatch.setattr(LocalRunStore, "copy_folder", lose_some)
    wanted = on_disk.claim("night-2")
    store = on_disk.storage.run("night-2")
    with pytest.raises(
        AttemptFailedError, match=r"the copy of the checkpoint is not whole: model\.pt has 4 bytes"
    ) as error:
        on_disk.start(wanted)
    assert error.value.outcome is Outcome.STORAGE_ERROR
    assert all_commits(store) == []
    [left] = RunDirectory(store).leftovers
    assert (left.kind, left.reason) == ("upload", "its copy was begun, and no commit names it")
    monkeypatch.undo()
    begun, _ = on_disk.start(wanted)
    assert store.read(f"{begun.point.checkpoint}/model.pt") == b"weights of checkpoint_0"


def test_a_named_run_that_is_being_deleted_is_refused(on_disk: Nights) -> None:
    on_disk.add("base")
    _is_deleted(on_disk.storage.run("base"))
    with pytest.raises(AttemptFailedError, match=r"resume_from='base@best': run 'base' is being deleted by") as error:
        on_disk.source(replace(on_disk.claim("tuned"), resume_from="base@best"))
    assert error.value.outcome is Outcome.INVALID


def test_lineage_over_many_nights_is_shown_and_names_of_copies_do_not_grow(on_disk: Nights) -> None:
    on_disk.add("night-0")
    for number in range(1, 6):  # none of which trains anything better
        store = on_disk.storage.run(f"night-{number}")
        begun, _ = on_disk.start(on_disk.claim(f"night-{number}"))
        assert loop_name(begun.point.checkpoint) == f"from-night-{number - 1}-checkpoint_0"
        end_attempt(store, 1, "completed")
        note_completed(on_disk.storage, f"night-{number}")
        time.sleep(0.01)
    on_disk.storage.run("night-0").delete_folder("")
    found = ancestors(on_disk.storage, "night-5")
    assert [(one.run, one.there) for one in found] == [(f"night-{n}", n > 0) for n in (4, 3, 2, 1, 0)]
    assert loop_name(found[0].checkpoint) == "from-night-3-checkpoint_0"
    assert os.path.isfile(f"{found[0].uri}/model.pt")
    shown = CliRunner().invoke(app, ["runs", "show", on_disk.storage.uri, "night-5"]).stdout
    assert "started from: night-4@from-night-3-checkpoint_0, which started from night-3@" in shown
    assert "which started from 2 more" in shown
    details = json.loads(CliRunner().invoke(app, ["runs", "show", on_disk.storage.uri, "night-5", "--json"]).stdout)
    assert details["resume_from"] == "latest"
    assert details["ancestors"] == [one.model_dump() for one in found]
    last = CliRunner().invoke(app, ["runs", "show", on_disk.storage.uri, "night-1"]).stdout
    assert "night-0@checkpoint_0 (deleted)" in last
