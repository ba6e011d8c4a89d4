"""A session and its parts in one process, outside of Ray: what it yields, what it refuses, what its states keep."""

import itertools
import os
import random
import shutil
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefect_elastic_train import loop
from prefect_elastic_train.loop import scratch_folder, training_session
from prefect_elastic_train.loop.ledger import combine, digest
from prefect_elastic_train.loop.order import SampleOrder
from prefect_elastic_train.loop.state import State, random_state, restore_random_state, seed_everything


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session has been in this process, as in that of a worker."""
    monkeypatch.setattr(training_session, "current", None)


class NoState(State):
    """Stands in where the state of a training plays no part."""


def _session(steps: int = 1, global_batch: int = 4, **options: Any) -> loop.Session:
    return loop.session(NoState(), steps=steps, global_batch=global_batch, **options)


def _network(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)).double()


# What it yields


def test_all_steps_of_all_epochs_see_each_sample_once_an_epoch() -> None:
    data, epochs = np.arange(100, 110), []
    with _session(9) as session:
        for batch in session.batches(data):
            assert batch.tolist() == data[session.samples].tolist()
            if session.done % 3 == 0:
                epochs.append([])
            epochs[session.epoch] += batch.tolist()
            session.step()
    assert [sorted(epoch) for epoch in epochs] == [data.tolist()] * 3
    assert epochs[0] != epochs[1], "each epoch has an order of its own"


def test_torch_datasets_are_loaded_by_its_processes_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    # A child forked from a process in which other tests started a service of Prefect fails in that service's exit.
    monkeypatch.setattr(threading, "_threading_atexits", [])
    dataset = torch.utils.data.TensorDataset(torch.arange(20.0), torch.arange(20))
    with _session(5, 8) as session:
        for values, numbers in session.batches(dataset, num_workers=2, drop_last=True):
            assert numbers.tolist() == session.samples.tolist() == values.tolist()
            session.step()
    assert (session.done, session.epoch) == (5, 2)


def test_gradients_of_parts_add_up_to_those_of_the_whole_step() -> None:
    inputs, targets = torch.randn(26, 3, dtype=torch.float64), torch.randn(26, 1, dtype=torch.float64)
    model = _network().eval()
    gradients = []
    for micro_batch in (0, 3):
        model.zero_grad()
        with _session(2, 16, seed=5) as session:
            parts = 0
            for x, y in session.batches((inputs, targets), micro_batch=micro_batch):
                (((model(x) - y) ** 2).mean() * session.weight).backward()
                parts += 1
                if session.is_last_part:
                    session.step()
        assert parts == (2 if not micro_batch else 6 + 4)
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-12)


def test_a_mixture_has_each_dataset_in_its_share_and_whole() -> None:
    mixture = loop.Mixture([range(10), range(100, 104), range(200, 203)], [2, 1, 1])
    found = [mixture[index] for index in range(len(mixture))]
    assert found == [*range(10), 100, 101, 102, 103, 100, 200, 201, 202, 200, 201]
    with _session() as session:
        assert [batch.tolist() for batch in session.once(mixture, 20)] == [found]
    with pytest.raises(ValueError, match="give each a weight above 0"):
        loop.Mixture([np.arange(3)], [0])


@pytest.mark.parametrize(("length", "world"), [(257, 2), (10, 4)])
def test_an_evaluation_weighed_and_averaged_over_ranks_is_the_mean_over_the_dataset(length: int, world: int) -> None:
    right = np.ones(length)
    right[length - length % 256 - 1 :] = 0.0  # where a batch is smaller than the others
    means = []
    for rank in range(world):
        session = _session()
        session._share = rank, world
        means.append(sum(batch.mean() * session.weight for batch in session.once(right, 256)))
    assert np.mean(means) == pytest.approx(right.mean(), abs=1e-12)


def test_an_evaluation_leaves_the_weight_and_the_samples_of_the_training_batch() -> None:
    with _session(2) as session:
        for _ in session.batches(np.arange(8)):
            before = session.weight, session.samples.tolist()
            for whole in (True, False):
                for _ in session.once(np.arange(9), 2):
                    if not whole:
                        break
            assert (session.weight, session.samples.tolist()) == before
            session.step()


def test_ranks_of_a_tensor_parallel_group_share_their_samples_and_are_counted_once() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shares, counted, draws = [], [], []
    for rank in range(4):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"]
            with _session(1, 8, mesh=mesh) as session:
                draws.append(torch.rand(1).item())
                [batch] = session.batches(np.arange(8))
                assert session.weight == 1.0
                shares.append(batch.tolist())
                counted += [*itertools.chain(*session._step_samples)]
                session.step()
        finally:
            torch.distributed.destroy_process_group()
    assert shares[0] == shares[1] != shares[2] == shares[3]
    assert draws[0] == draws[1] != draws[2] == draws[3], "the same augmentation and dropout of the same samples"
    assert sorted(shares[0] + shares[2]) == sorted(counted) == [*range(8)]


# What it reports and saves


class Recorder:
    """Stands where Ray Train is: keeps the metrics of each report, and the weights that were uploaded with it."""

    CheckpointUploadMode = SimpleNamespace(ASYNC=None, SYNC=None)
    Checkpoint = SimpleNamespace(from_directory=str)

    def __init__(self, session: loop.Session) -> None:
        self.reports: list[tuple[dict[str, Any], float | None]] = []
        session._ray, session._can_save = self, True

    def report(self, metrics: dict[str, Any], checkpoint: str | None = None, **how: Any) -> None:
        self.reports.append((metrics, how["checkpoint_upload_fn"](checkpoint, "") if checkpoint else None))

    def get_context(self) -> Any:
        return SimpleNamespace(get_storage=lambda: self)

    def persist_current_checkpoint(self, folder: str, name: str) -> float:
        with np.load(f"{folder}/arrays.npz") as saved:
            return float(saved["weights"])

    @property
    def scored(self) -> list[tuple[float, float]]:
        """Score and weights of each checkpoint that has a score."""
        return [(one["val_loss"], of) for one, of in self.reports if of is not None and "val_loss" in one]


def _scored(score: str = "val_loss") -> Any:
    """Say in a ``with`` block which metric is the score."""
    return loop.use_run_context(loop.RunContext("run", "id", 1, "/", "/run", score_attribute=score))


def _train(evaluate: Any, score: str = "val_loss", **options: Any) -> Recorder:
    """Train 100 steps whose weights are the number of the step; ``evaluate`` returns the metrics of one."""
    state = loop.ArrayState(weights=0.0)
    with _scored(score), loop.session(state, steps=100, global_batch=4, **options) as session:
        recorder = Recorder(session)
        for _ in session.batches(np.arange(40)):
            state.weights += 1
            session.step({"loss": float(state.weights), **evaluate(int(state.weights))})
    return recorder


@pytest.mark.parametrize(
    ("scored", "save_every", "saved"),
    [
        (range(10, 101, 10), 12, [*range(10, 101, 10)]),
        (range(1, 101), 30, [1, 2, 30, 60, 90, 100]),  # a score of each step, which the first two show
        ({1, 40, 41}, 100, [1, 40, 41]),
        (range(1, 10), 10, [1, 2]),  # the others do not reach the checkpoint of step 10
    ],
)
def test_a_step_with_a_score_is_saved_unless_each_has_one(scored: Any, save_every: Any, saved: list[int]) -> None:
    recorder = _train(
        lambda step: {"val_loss": 1.0 / step} if step in scored else {},
        save_every=save_every,
        means=["loss", "val_loss"],
    )
    assert recorder.scored == [(1.0 / step, step) for step in saved]


def test_a_score_that_is_none_at_each_step_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    _train(lambda step: {"val_loss": 0.5 if step % 40 == 0 else None}, save_every=100)
    assert caplog.text.count("val_loss is None at each step: leave it out where nothing is evaluated") == 1


@pytest.mark.parametrize("score", [{"loss/val": 0.5}, {"loss": {"val": 0.5}}])
def test_a_report_has_no_metrics_of_an_earlier_step_nor_its_score_in_a_mapping(score: dict[str, Any]) -> None:
    recorder = _train(lambda step: {**score, "rate": 0.1} if step == 7 else {}, "loss/val", save_every=10)
    kept = {weights: metrics for metrics, weights in recorder.reports if weights in (7.0, 10.0)}
    assert {**score, "rate": 0.1}.items() <= kept[7.0].items()
    assert not {"loss/val", "rate"} & kept[10.0].keys()
    assert kept[10.0]["loss"] == 9.0, "the mean since step 7"


def test_a_score_that_saves_nothing_is_reported_at_its_step_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = _train(lambda step: {"val_loss": 0.5} if step % 40 == 0 else {}, save_every=30, save_scored=False)
    assert recorder.scored == []
    assert [one["step"] for one, _ in recorder.reports if "val_loss" in one] == [40, 80]
    assert "The score of step 40 has no checkpoint to rank: save_scored=False" in caplog.text


def test_a_step_without_a_batch_does_not_replace_the_scored_step_before_it() -> None:
    with _scored(), loop.session(loop.ArrayState(weights=1.0), steps=9, global_batch=4) as session:
        recorder = Recorder(session)
        for _ in session.batches(np.arange(40)):
            session.step({"val_loss": 0.5})
            break
        session.step()
    assert [one["step"] for one, weights in recorder.reports if weights and "val_loss" in one] == [1]


def test_metrics_are_last_values_unless_they_are_named_as_means() -> None:
    def evaluate(step):
        return {
            "rate": torch.tensor([0.1 * step]),
            "count": step,
            "accuracy": np.array([step / 100]),
            "phase": f"of {step}",
        }

    recorder = _train(evaluate, save_every=50, means="accuracy")
    [(first, weights)] = [one for one in recorder.reports if one[1] == 50.0]
    assert weights == first["loss"] == first["count"] == first["step"] == 50
    assert first["rate"] == pytest.approx(5.0)
    assert (first["phase"], type(first["rate"]), type(first["accuracy"])) == ("of 50", float, float)
    since = recorder.reports[0][0]["step"]  # the first report
    assert first["accuracy"] == pytest.approx((since + 1 + 50) / 2 / 100)


def test_an_evaluation_after_a_step_belongs_to_it_and_comes_before_its_save() -> None:
    state, saved = loop.ArrayState(weights=0.0), []
    with _scored(), loop.session(state, steps=20, global_batch=4, save_every=5) as session:
        recorder = Recorder(session)
        for _ in session.batches(np.arange(40)):
            state.weights += 1
            session.step({"loss": 0.0}, save=session.done == 6)
            if session.done % 5 == 0:
                saved.append(sum(of is not None for _, of in recorder.reports))
                session.save({"val_loss": 0.1 * session.done})
    assert saved == [0, 2, 3, 4], "a kill in between loses no evaluation: the step is done again"
    assert [of for _, of in recorder.reports if of is not None] == [5, 7, 10, 15, 20]
    assert recorder.scored == [(0.1 * step, step) for step in (5, 10, 15, 20)]


# What it refuses


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of four workers."""
    ray = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 4, get_experiment_name=lambda: "run")
    monkeypatch.setattr(training_session, "train_context", lambda: ray)
    monkeypatch.setattr(training_session, "import_module", lambda name: SimpleNamespace(get_checkpoint=lambda: None))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"global_batch": 3}, "global_batch=3 is below the 4 workers, each of which needs a sample"),
    ],
)
@pytest.mark.usefixtures("worker")
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _session(**arguments)


@pytest.mark.parametrize(("data_ranks", "most"), [([0, 1, 2, 3], 6), ([0, 2], 12)])
@pytest.mark.usefixtures("worker")
def test_a_session_knows_for_how_many_workers_its_steps_have_samples(data_ranks: list[int], most: int) -> None:
    mesh = SimpleNamespace(mesh=torch.tensor(data_ranks), get_rank=lambda: 0)
    assert _session(1, 6, mesh=mesh).most_workers == most


def test_a_loop_that_does_not_step_once_for_each_batch_is_told() -> None:
    with pytest.raises(loop.LoopError, match="rank 0 requested the batch of step 1, but has done 0 steps"):
        [*_session(3).batches(np.arange(9))]
    with _session() as session:
        for _ in session.batches(np.arange(9)):
            session.step()
        with pytest.raises(loop.LoopError, match="was called after the last batch"):
            session.step()


# What its states keep


def test_a_torch_state_is_put_back_whole_and_one_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    model, other = _network(), _network()
    loop.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters())).stage(str(tmp_path))()
    loop.TorchState(model=other).read(tmp_path, only_these=True)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for parts, only_these, says in (
        ({"model": other}, False, r"optimizer.*: \(\) in the checkpoint, missing in the state"),
        ({"model": other, "head": _network()}, True, "head.0.bias: missing in the checkpoint"),
        ({"model": _network(5)}, True, r"model.0.bias: \(4,\) in the checkpoint, \(5,\) in the state"),
    ):
        with pytest.raises(loop.StateMismatchError, match=says):
            loop.TorchState(**parts).read(tmp_path, only_these=only_these)


def test_a_torch_state_is_as_it_was_over_many_restarts_whatever_its_parts_hold(tmp_path: Path) -> None:
    def made(**found):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1) for name in ("used", "unused")})
        optimizer = torch.optim.Adam(model.parameters())
        return {
            "model": model,
            "optimizer": optimizer,
            "late": torch.optim.Adam(model["unused"].parameters()),
            "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            "own": SimpleNamespace(state_dict=found.copy, load_state_dict=found.update),
        }

    def train(parts, name):
        parts["optimizer"].zero_grad()
        parts["model"][name](torch.ones(2, 3)).sum().backward()
        for part in ("optimizer", "schedule", "late")[: 3 if name == "unused" else 2]:
            parts[part].step()

    first = made(best=np.float64(0.3), tried=[torch.ones(2)], last={"step": 3, 7: None})
    for number, name in enumerate(["used", "used", "used", "unused", "used"]):
        train(first, name)
        saving = loop.TorchState(**first)
        for save in ("first", "second"):
            saving.stage(str(tmp_path / f"{save}-{number}"))()
        second = made(best=None)
        loop.TorchState(**second).read(tmp_path / f"second-{number}")
        for part in ("own", "schedule"):
            assert str(second[part].state_dict()) == str(first[part].state_dict())
        begun = bool(second["late"].state), bool(first["late"].state)
        assert begun == (number > 0,) * 2, "no step is done for one that has done none"
        for parts in (first, second):
            train(parts, "unused")
        for one, other in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
            assert torch.equal(one, other), "also where there was no gradient yet"
        first = second


def test_a_checkpoint_without_the_parts_of_all_ranks_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / training_session.SESSION_FILE).write_text('{"step": 1, "world_size": 2}')
    np.savez(tmp_path / "rank-00000-of-00002.npz", random=1)
    with pytest.raises(loop.LoopError, match=r"is incomplete: 1 of 2 ranks .* first rank-00001-of-00002.npz. Start"):
        loop.read_about(tmp_path)


def test_a_save_keeps_its_step_however_often_its_upload_is_repeated_and_a_successor_goes_on_there(
    tmp_path: Path,
) -> None:
    reports = []
    tries = iter([OSError("AWS Error SLOW_DOWN"), None, None])

    def persist(checkpoint, name):
        if error := next(tries):
            raise error
        shutil.copytree(checkpoint, tmp_path / name)

    def report(metrics, checkpoint=None, checkpoint_upload_fn=None, **how):
        reports.append((metrics, checkpoint, checkpoint_upload_fn))

    state = loop.ArrayState(weights=0.0)
    session = loop.Session(state, steps=4, global_batch=2, save_every=2)
    vars(Recorder(session)).update(persist_current_checkpoint=persist, report=report)
    with session:
        for _ in session.batches(np.arange(10)):
            state.weights += 1
            session.step({"loss": None if session.done == 2 else torch.tensor(session.done, dtype=torch.float16)})
            if session.done == 2:
                session.save()
                _, checkpoint, upload = reports[-1]
                state.weights += 10
                with pytest.raises(OSError, match="SLOW_DOWN"):
                    upload(checkpoint, "first")
                assert session._writing.locked(), "no other save begins"
                upload(checkpoint, "first")
                assert not Path(checkpoint).exists()
                assert not session._writing.locked()
    saved = [(metrics["step"], metrics["loss"]) for metrics, checkpoint, _ in reports if checkpoint]
    assert saved == [(2, 1.0), (4, 3.0)], "the mean since the report before"
    _, checkpoint, upload = reports[-1]
    upload(checkpoint, "last")
    seen = [digest(SampleOrder(10, 2).indices(step), step) for step in range(4)]
    for name, done, weights in (("first", 2, 2.0), ("last", 4, 14.0)):
        after = loop.ArrayState(weights=0.0)
        successor = loop.Session(after, steps=4, global_batch=2)
        successor._restore(SimpleNamespace(as_directory=partial(nullcontext, tmp_path / name)))
        assert (successor.done, after.weights) == (done, weights)
        assert np.array_equal(successor._ledger.total, combine(seen[:done])), "what all have seen until then"


def test_a_torch_state_that_lacks_something_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = _network()
    loop.session(loop.TorchState(model=model), steps=1, global_batch=1)
    assert "the state has no optimizer: each restart begins with an empty one" in caplog.text
    with pytest.raises(ValueError, match="a function has no load_state_dict"):
        loop.TorchState(model=model, schedule=lambda: None)
    with pytest.raises(ValueError, match="the optimizer's parameters are of none of the modules given"):
        loop.TorchState(model=model, optimizer=torch.optim.SGD(_network().parameters()))


def test_a_jax_state_is_put_back_without_a_word_and_one_of_another_model_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ones = pytest.importorskip("jax.numpy").ones
    state = loop.JaxState(params={"inner": ones((3, 4))})
    with caplog.at_level("INFO"):  # as Ray Train has it in a worker
        write = loop.JaxState(params={"inner": 3 * ones((3, 4))}, count=7).stage(str(tmp_path))
        writer = threading.Thread(target=write)  # as Ray Train does
        writer.start()
        writer.join()
        state.read(tmp_path, only_these=True)
    assert caplog.messages == [], "Orbax says what nobody needs"
    assert (state.params["inner"] == 3).all()
    state.params["inner"] = ones((3, 5))
    with pytest.raises(
        loop.StateMismatchError, match=r"count: .*missing in the state; params.inner: \(3, 4\) in .*, \(3, 5\) in"
    ):
        state.read(tmp_path)
    with pytest.raises(AttributeError, match="JaxState has no moments, only params"):
        state.moments = 1
    with pytest.raises(ValueError, match="give numbers, keys and arrays"):
        loop.JaxState(name="text")


def test_random_states_are_put_back() -> None:
    def draw():
        return [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(())), random.random()]

    seed_everything(4, 2)
    draw()
    saved = random_state()
    following = draw()
    seed_everything(4, 3)
    assert draw() != following
    restore_random_state(saved)
    assert draw() == following


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, other = scratch_folder.ScratchFolder(), scratch_folder.ScratchFolder()
    scratch_folder.remove_abandoned_folders()
    assert {str(path) for path in tmp_path.iterdir()} == {own.path, other.path}
    os.close(other._lock)  # as the end of its process does
    scratch_folder.remove_abandoned_folders()
    assert [str(path) for path in tmp_path.iterdir()] == [own.path]
    own.remove()
    assert not [*tmp_path.iterdir()]
