"""Shards: the same bits at any number of workers, the right gradients, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from prefect_elastic_train import loop
from prefect_elastic_train.loop import training_session
from prefect_elastic_train.loop.order import BatchPosition, SampleOrder, shards_of
from prefect_elastic_train.loop.shard_gradients import (
    PartialSum,
    ShardGradients,
    _Bucket,
    add_partial_sum,
    partial_sums_of,
)
from tests.support.shard_loops import SHARDS


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_session, "current", None)


# The sums


class Sum(str):
    """A sum that shows in which order it was computed."""

    def __iadd__(self, other: str) -> Sum:  # type: ignore[misc]
        return Sum(f"({self}+{other})")


@pytest.mark.parametrize("shards", [1, 2, 4, 16, 64, 256])
def test_sums_have_the_same_order_at_any_number_of_workers_and_few_blocks(shards: int) -> None:
    orders = set()
    for world in range(1, shards + 1):
        exchanged = []
        for rank in range(world):
            own: list[PartialSum] = []
            for shard in shards_of(rank, world, shards):
                list(add_partial_sum(own, PartialSum(shard, 1, Sum(shard))))
            assert [block[:2] for block in own] == [
                block[:2] for block in partial_sums_of(shards_of(rank, world, shards))
            ]
            assert len(own) <= max(1, math.log2(shards))
            assert len(own) == 1 or shards % world, "one block for each rank: the traffic of an all-reduce"
            exchanged += own
        total: list[PartialSum] = []
        for block in exchanged:
            list(add_partial_sum(total, block))
        [[first, size, order]] = total
        assert (first, size) == (0, shards)
        orders.add(order)
    assert len(orders) == 1


# One worker


DATA = np.random.default_rng(2).standard_normal((22, 3)).astype(np.float32)


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _train(model: Any, shards: int) -> Any:
    """Train with a last batch of an epoch of fewer samples than shards; return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = loop.TorchState(model=model, optimizer=optimizer)
    with loop.session(state, steps=7, global_batch=16, shards=shards) as session:
        for batch in session.batches(DATA):
            loss = model(torch.from_numpy(batch)).square().mean() * session.weight
            optimizer.zero_grad()
            session.backward(loss)
            if session.is_last_part:
                optimizer.step()
                session.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def _is_as_without_shards() -> bool:
    return torch.allclose(_train(_model(), 8), _train(_model(), 0), rtol=1e-5)


def test_gradients_are_those_of_the_whole_batch() -> None:
    assert _is_as_without_shards()


def test_a_wrong_weight_of_the_shards_of_a_short_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SampleOrder.weight

    def alike(order: SampleOrder, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> float:
        return 1 / parts if parts > 1 else weight(order, step, rank, world_size)

    monkeypatch.setattr(SampleOrder, "weight", alike)
    assert not _is_as_without_shards()


def test_a_shard_without_samples_adds_nothing_whatever_its_loss() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    state = loop.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters()))
    with loop.session(state, steps=1, global_batch=8, shards=8) as session:
        for batch in session.batches(DATA[:6]):
            inputs = torch.from_numpy(np.repeat(batch, 2, axis=0))
            session.backward(model(inputs).sum() * session.weight / (session.weight > 0))
            if session.is_last_part:
                assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
                session.step()


def test_running_statistics_are_the_mean_over_the_shards_and_other_buffers_stay_as_they_are() -> None:
    model = torch.nn.BatchNorm1d(3, momentum=0.5)
    model.register_buffer("mask", torch.tensor([-math.inf, 0.1]))
    state = loop.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters()))
    means = []
    with loop.session(state, steps=1, global_batch=12, shards=4) as session:
        for batch in session.batches(DATA):
            means.append(batch.mean(0))
            session.backward(model(torch.from_numpy(batch)).sum() * session.weight)
            session.step() if session.is_last_part else None
    np.testing.assert_allclose(model.running_mean, 0.5 * np.mean(means, axis=0), rtol=1e-6)
    assert (model.mask.tolist(), int(model.num_batches_tracked)) == ([-math.inf, pytest.approx(0.1)], 1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused, self.frozen = (torch.nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Any) -> Any:
        return self.frozen(self.shared(self.shared(batch)))


def _compute(gradients: ShardGradients, model: Any, *shards: int) -> None:
    for shard in shards:
        gradients.begin(shard, 0.5)
        gradients.backward(model(torch.ones(2, 3)).sum() * 0.5)


def test_parameters_may_be_shared_unused_frozen_and_trained_again() -> None:
    model = Model()
    gradients = ShardGradients([model], 0, 1, 2)
    for is_trained in (False, True, False):  # each from a step on
        gradients.begin(0, 0.5)
        model.frozen.requires_grad_(is_trained)  # in the loop's body
        gradients.backward(model(torch.ones(2, 3)).sum() * 0.5)
        _compute(gradients, model, 1)
        expected = torch.autograd.grad(model(torch.ones(2, 3)).sum(), [*model.shared.parameters()])
        for parameter, gradient in zip(model.shared.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert not model.unused.weight.grad.any()
        assert (model.frozen.weight.grad is not None) == is_trained


def test_a_step_that_the_loop_has_left_in_the_middle_leaves_nothing() -> None:
    model = torch.nn.Linear(3, 1)
    gradients = ShardGradients([model], 0, 1, 8)
    _compute(gradients, model, *range(8))
    expected = model.weight.grad.clone()
    _compute(gradients, model, *range(5))
    gradients.begin(5, 0.5)
    _compute(gradients, model, *range(8))
    assert torch.equal(model.weight.grad, expected)


def _unfreeze(model: Model) -> None:
    model.frozen.requires_grad_(False)


def _replace_buffer(model: Model) -> None:
    model.seen = model.seen + 1


def _compute_elsewhere(model: Model) -> None:
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("change", [_unfreeze, _replace_buffer, _compute_elsewhere])
def test_changes_within_a_step_that_ranks_would_not_share_are_refused(change: Callable[[Model], None]) -> None:
    model = Model()
    gradients = ShardGradients([model], 0, 1, 2)
    _compute(gradients, model, 0)
    gradients.begin(1, 0.5)
    change(model)
    with pytest.raises(RuntimeError, match="within a step, requires_grad was changed, a buffer was replaced"):
        gradients.backward(model(torch.ones(2, 3)).sum())


def test_gradients_have_the_memory_format_of_their_parameters_and_hooks_may_replace_them() -> None:
    model = torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    gradients = ShardGradients([model], 0, 1, 1)
    images = torch.rand(2, 3, 4, 4)
    gradients.begin(0, 1.0)
    gradients.backward(model(images).square().sum())
    [expected] = torch.autograd.grad(model(images).square().sum(), [model.weight])
    torch.testing.assert_close(model.weight.grad, expected)
    assert model.weight.grad.stride() == model.weight.stride()
    model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", weight.grad.clamp(0)))
    gradients = ShardGradients([model], 0, 1, 2)
    for shard in (0, 1):  # the hook gets the gradient of each shard
        gradients.begin(shard, 0.5)
        gradients.backward((-1) ** shard * model(images).square().sum())
    torch.testing.assert_close(model.weight.grad, expected.abs())


def test_zeros_keep_their_sign_whether_one_rank_has_both_shards_of_a_pair_or_two_have_one_each() -> None:
    parameter = torch.zeros(2)
    both, first, second = (_Bucket([parameter], [[], []], 0) for _ in range(3))
    for bucket in (both, first):
        bucket.begin()
        bucket.add(parameter, torch.tensor([-0.0, 1.0]))
    both.begin()  # no gradient of the second shard, such as one without samples
    second.begin()
    both.end(0, 2)
    first.end(0, 1)
    second.end(1, 1)
    [one], [two] = (bucket.own for bucket in (both, first))
    add_partial_sum([two], second.own[0])
    assert torch.signbit(one.values).tolist() == torch.signbit(two.values).tolist() == [True, False]


def test_a_loop_may_replace_the_data_of_gradients() -> None:
    model = torch.nn.Linear(3, 1)
    gradients = ShardGradients([model], 0, 1, 4)
    for _ in range(2):
        for shard in range(4):
            gradients.begin(shard, 0.25)
            gradients.backward(model(torch.full((2, 3), float(shard))).sum())
        assert model.weight.grad.tolist() == [[12.0] * 3]
        model.double().float()


def test_a_parameter_that_two_segments_of_a_reentrant_checkpoint_use_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Linear(3, 3)
    gradients = ShardGradients([model], 0, 1, 1)
    gradients.begin(0, 1.0)
    hidden = checkpoint(model, torch.ones(2, 3, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gradients.backward(checkpoint(model, hidden, use_reentrant=True).sum())


def test_sums_take_as_much_memory_as_promised() -> None:
    for world in range(1, SHARDS + 1):
        ranges = [shards_of(rank, world, SHARDS) for rank in range(world)]
        for shards in ranges:
            bucket = _Bucket([torch.zeros(5)], [partial_sums_of(each) for each in ranges], 0)
            for shard in shards:
                bucket.begin()
                if shard % 2 or shard == shards[-1]:  # a pair, or what is left of one
                    bucket.end(first := max(shards[0], shard - shard % 2), shard - first + 1)
            assert len(bucket.own) + len(bucket._unused) <= math.log2(len(shards)) + 1, (world, shards)


# What is refused


def _session(part: Any = None, **options: Any) -> loop.Session:
    state = loop.TorchState(model=part or torch.nn.Linear(3, 1))
    return loop.session(state, **{"steps": 3, "global_batch": 8, "shards": 4, **options})


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: _session(shards=3), "shards=3: must be a power of two between the number of workers"),
        (lambda: _session(shards=16), r"and global_batch \(8\)"),
        (lambda: next(_session().batches(DATA, micro_batch=2)), "micro_batch=2: not supported with shards"),
        (lambda: _session(torch.nn.SyncBatchNorm(3)), "do not support SyncBatchNorm"),
        (lambda: _session(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)), "need modules"),
        (lambda: _session(torch.nn.Embedding(3, 1, sparse=True)), "do not support Embedding"),
        (
            lambda: loop.session(loop.ArrayState(weights=0.0), steps=1, global_batch=8, shards=4),
            "ArrayState supports neither shards nor replay_every",
        ),
    ],
)
def test_what_shards_do_not_support_is_refused(use: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        use()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped_and_sharded_modules_are_refused(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model: Any = torch.nn.Linear(4, 4)
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="DistributedDataParallel" if kind == "ddp" else "sharded parameters"):
            _session(model)
    finally:
        torch.distributed.destroy_process_group()


def _misuse(kind: str) -> None:
    model = torch.nn.Linear(3, 1)
    with _session(model) as session:
        for batch in session.batches(DATA):
            loss = model(torch.from_numpy(batch)).mean()
            if kind == "another backward":
                loss.backward()
            elif kind == "two losses":
                session.backward(loss)
                session.backward(loss)
            elif kind == "another loop":
                break
            elif kind == "an early step":
                session.backward(loss)
                session.step()
            session.step() if session.is_last_part else None
        session.step()


def test_a_group_grows_to_as_many_workers_as_there_are_shards() -> None:
    assert (_session(shards=4).most_workers, _session(shards=0).most_workers) == (4, 8)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another backward", r"session.backward\(\) was not called for the last batch"),
        ("two losses", r"session.backward\(\) was called twice for a batch"),
        ("an early step", "if session.is_last_part"),
        ("another loop", "use session.batches"),
    ],
)
def test_a_loop_that_does_not_compute_the_gradients_of_each_shard_once_is_told_so(kind: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _misuse(kind)


def test_a_worker_whose_environment_is_not_that_of_the_run_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    session = _session()
    about = json.loads(json.dumps(session._about))
    assert (about["environment"]["shards"], about["environment"]["threads"]) == (4, torch.get_num_threads())
    assert "bitwise" not in caplog.text
    session._record_environment(SimpleNamespace(environments=[{**about["environment"], "threads": 99}, {}]))
    assert "rank 0 has threads 99, not" in caplog.text


def test_positions_of_shards() -> None:
    order = SampleOrder(12, 8)
    sampler = loop.StepBatches(order, range(2), 1, 3, shards=4)
    assert [*sampler.positions()] == [BatchPosition(0, 1, 4, True), BatchPosition(1, 1, 4, True)]
    whole = loop.StepBatches(order, range(2))
    shards = [loop.StepBatches(order, range(2), rank, 3, shards=4) for rank in range(3)]
    assert [len(one) for one in shards] == [2, 2, 4]
    for step, samples in enumerate(whole.arrays()):
        parts = [
            indices.tolist()
            for one in shards
            for position, indices in zip(one.positions(), one.arrays(), strict=True)
            if position.step == step
        ]
        assert [*itertools.chain(*parts)] == samples.tolist()
