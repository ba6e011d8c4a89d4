"""Replays in one process, and which ranks have wrong results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefect_elastic_train import loop
from prefect_elastic_train.loop import replays, training_session
from prefect_elastic_train.loop.replays import WrongResultError, find_wrong_ranks

DATA = np.ones((8, 3), np.float32)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_session, "current", None)


@pytest.mark.parametrize(
    ("results", "wrong"),
    [
        ([(0, 5)], set()),
        ([(0, 5), (1, 5), (2, 5)], set()),
        ([(0, 5), (1, 6), (2, 5)], {1}),
        ([(0, 5), (1, 6)], {0, 1}),
        ([(0, 5), (1, 6), (2, 7)], {0, 1, 2}),
        ([(0, 5), (0, 6)], {0}),
        ([(0, 5), (1, 5), (2, 6), (3, 6)], {0, 1, 2, 3}),
        # Two ranks; rank 0 computes the batch twice.
        ([(0, 5), (1, 6), (0, 5)], {0, 1}),
        ([(0, 5), (1, 6), (0, 6)], {0}),
    ],
)
def test_ranks_with_another_result_than_most_are_wrong(results: list[tuple[int, int]], wrong: set[int]) -> None:
    assert find_wrong_ranks(results) == wrong


def test_a_loop_that_leaves_out_the_gradients_of_a_replay_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a replay has no gradients"):
        _train(use=lambda *_: None)


def _train(
    shards: int = 0, use: Callable[[Any, Any], None] = lambda session, loss: session.backward(loss), **options: Any
) -> list[bool]:
    """Train, and return for each batch whether it is a replay."""
    model = torch.nn.Linear(3, 1)
    state = loop.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    seen = []
    with loop.session(state, steps=4, global_batch=8, shards=shards, **{"replay_every": 2, **options}) as session:
        for batch in session.batches(DATA):
            seen.append(session.is_replay)
            use(session, model(torch.from_numpy(batch)).mean() * session.weight)
            if session.is_last_part:
                session.step()
    return seen


@pytest.mark.parametrize(("shards", "plain_step", "replays"), [(0, [False], [True]), (2, 2 * [False], 2 * [True])])
def test_steps_begin_with_replays(shards: int, plain_step: list[bool], replays: list[bool]) -> None:
    assert _train(shards) == 2 * [*replays, *plain_step, *plain_step]


def test_a_batch_may_have_several_losses() -> None:
    def compute(session: Any, loss: Any) -> None:
        session.backward(loss)
        session.backward(torch.ones(1, requires_grad=True).sum())

    assert _train(use=compute) == 2 * [True, False, False]


def test_results_that_differ_are_an_error_with_step_and_rank() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(WrongResultError, match=r"^step 2: the gradients of rank 0 on .* \(ranks: \[0\]\)"):
        _train(use=lambda session, loss: session.backward(loss * random.random()))


def test_a_loop_that_calls_step_on_a_replay_fails_at_its_first_step() -> None:
    def step_each_time(session: Any, loss: Any) -> None:
        loss.backward()
        session.step()

    with pytest.raises(loop.LoopError, match="with shards or replay_every"):
        _train(use=step_each_time, replay_every=1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": SimpleNamespace(mesh=torch.zeros(1, dtype=torch.int), get_rank=lambda: 0)},
            "a mesh supports neither",
        ),
    ],
)
def test_what_replays_do_not_support_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _train(**options)
    with pytest.raises(TypeError, match="ArrayState supports neither shards nor replay_every"):
        loop.session(loop.ArrayState(weights=np.zeros(3)), steps=1, global_batch=8, replay_every=1)


@pytest.mark.parametrize("kind", ["fsdp", "static_graph", "complex"])
def test_modules_that_replays_do_not_support_are_refused(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model: Any = torch.nn.Linear(4, 4, dtype=torch.complex64 if kind == "complex" else None)
        if kind == "static_graph":
            model = torch.nn.parallel.DistributedDataParallel(model, static_graph=True)
        elif kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="replay_every: FSDP"):
            loop.session(loop.TorchState(model=model), steps=1, global_batch=8, replay_every=1)
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_with_other_versions_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replays.Replays, "_gather", lambda *_: [{"torch": "2.12"}, {"torch": "2.13"}])
    two = replays.Replays([torch.nn.Linear(3, 1)], 0, 2, 2)
    assert not two.is_supported
    monkeypatch.setattr(loop.TorchState, "replays", lambda *_: two)
    assert _train() == 4 * [False]
    assert "No replays: the ranks have different hardware" in caplog.text
