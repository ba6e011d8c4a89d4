"""The checker: what it finds wrong with ledgers, and how far it finds checkpoints apart."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefect_elastic_train.rehearsal.checker import (
    is_performance_metric,
    largest_difference,
    norm_difference,
    read_arrays,
)
from tests.support.ledgers import check_ledger, lost_commits

LENGTH, STEPS = 8, 8


def _lines(steps: Any = range(1, STEPS + 1), group: str = "a", world: int = 2) -> list[dict[str, Any]]:
    """Two samples a step, divided by the workers."""
    return [
        {"step": step, "rank": rank, "world": world, "group": group, "seen": list(seen)}
        for step in steps
        for rank, seen in enumerate(np.split(2 * (step - 1) % LENGTH + np.arange(2), world))
    ]


@pytest.mark.parametrize(
    ("lines", "redone", "problem"),
    [
        (_lines(), 0, ""),
        (_lines(range(1, 6)) + _lines(range(4, 9), "b", 1), 2, ""),
        (_lines(range(1, 6)) + _lines(range(2, 9), "b"), 4, "began with step 2 after step 5"),
        (_lines(range(1, 5)) + _lines(range(6, 9), "b"), 0, "began with step 6 after step 4"),
        (_lines(range(1, 8)), 0, "7 steps up to 7, not 1 to 8"),
        (_lines()[:-1], 0, "step 8 was not done once by each of 2 ranks"),
        ([{**line, "seen": [0]} for line in _lines()], 0, "epoch 0 has not seen each"),
    ],
)
def test_each_step_counts_once_with_its_samples_and_no_more_is_redone_than_may_be(
    lines: list[dict[str, Any]], redone: int, problem: str
) -> None:
    checked = check_ledger(lines, STEPS, LENGTH, most_redone=3)
    assert checked.redone == redone
    assert (problem in " ".join(checked.problems)) if problem else (checked.problems == [])


def test_groups_that_train_beside_each_other_are_found() -> None:
    lines = _lines(range(1, 6)) + _lines(range(5, 9), "b")
    timed = [{**line, "at": float(place)} for place, line in enumerate(lines)]
    assert check_ledger(timed, STEPS, LENGTH, most_redone=3).problems == []
    stale = {**timed[9], "at": 30.0}
    found = check_ledger([*timed[:14], stale, *timed[14:]], STEPS, LENGTH, most_redone=3).problems
    assert "group a trained on beside the one after it" in found


@pytest.mark.parametrize(("at", "is_lost"), [(5.5, True), (6.5, False)])
def test_commit_before_a_group_began_behind_it_is_lost(at: float, is_lost: bool) -> None:
    lines = [{**line, "born": 0.0} for line in _lines(range(1, 6))] + [
        {**line, "born": 6.0} for line in _lines([5], "b")
    ]
    assert bool(lost_commits(lines, [(3.0, 4), (at, 5)])) is is_lost


def _write(folder: Path, value: float, kind: str) -> None:
    import orbax.checkpoint as ocp
    import torch
    from torch.distributed import checkpoint as dcp

    from prefect_elastic_train.loop.jax_state import JaxState

    folder.mkdir()
    state = {"model": {"weight": torch.tensor([1.0, value])}, "step": 3}
    arrays = {"weight": np.array([1.0, value])}
    if kind == "torch":
        torch.save({**state, "at_second": value * 7}, folder / "state.pth.tar")
    elif kind == "session":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        (folder / "loop.json").write_text(json.dumps({"cost": value * 7}))
        np.savez(folder / "rank-00000.npz", random=value * 7)
    elif kind == "orbax":
        with ocp.StandardCheckpointer() as saving:
            saving.save(folder / "state", {"model": arrays, "step": 3, "empty": {}, "none": None})
    elif kind == "jax":
        JaxState(**arrays).stage(str(folder))()
    else:
        np.savez(folder / "state.npz", **arrays)


@pytest.mark.parametrize("kind", ["torch", "session", "orbax", "jax", "numpy"])
def test_checkpoints_are_as_far_apart_as_their_numbers_whatever_wrote_them(tmp_path: Path, kind: str) -> None:
    for name, value in (("one", 2.0), ("same", 2.0), ("other", 2.2)):
        _write(tmp_path / name, value, kind)
    one, same, other = (read_arrays(tmp_path / name) for name in ("one", "same", "other"))
    assert one
    assert largest_difference(one, same) == (0.0, "")
    gap, where = largest_difference(one, other)
    assert gap == pytest.approx(0.2 / 2.2, rel=1e-6)
    assert "weight" in where


def test_what_cannot_be_read_or_is_of_another_shape_or_no_number_is_not_the_same(tmp_path: Path) -> None:
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    (tmp_path / "words.txt").write_text("1 2 3")
    assert read_arrays(tmp_path) == {}
    assert largest_difference({"a": np.zeros(2)}, {"a": np.zeros(3)}) == (math.inf, "a")
    assert largest_difference({"a": np.zeros(2)}, {"a": np.array([0, math.nan])}) == (math.inf, "a")
    assert largest_difference({"a": np.array([math.nan])}, {"a": np.array([math.nan])}) == (0.0, "")
    assert largest_difference({"a": 1.0}, {"b": 2.0}) == (0.0, "")
    many = np.ones(1_000_000)
    wrong = many.copy()
    wrong[7] = 0.9
    assert largest_difference({"a": many}, {"a": wrong}).size == pytest.approx(0.1), "one element is enough"


def test_an_orbax_checkpoint_without_one_of_its_files_is_unreadable_and_not_zeros(tmp_path: Path) -> None:
    _write(tmp_path / "jax", 2.0, "jax")
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "_METADATA"]
    for file in files:
        data = file.read_bytes()
        file.unlink()
        read = read_arrays(tmp_path)
        assert all(np.array_equal(value, [1.0, 2.0]) for value in read.values()), file
        file.write_bytes(data)
    assert len(read_arrays(tmp_path)) == 1


def test_numbers_of_clocks_and_loads_are_known_by_their_names() -> None:
    clocks = "step_ms runtime samples/s tokens_per_s gpu_mem_gb trainTime mfu tokensPerSecond peakMemoryGB microseconds"
    others = "sentiment_acc val/score loss mse items remember ms_ssim beta"
    assert [
        name for name in f"{clocks} timestamps gpu_utilization {others}".split() if not is_performance_metric(name)
    ] == others.split()


def test_as_a_whole_checkpoints_are_as_far_apart_as_most_of_their_numbers() -> None:
    many, few, mask = np.ones(10_000), np.array([1e-6]), np.array([0.0, -math.inf])
    one, other = (
        {"many": many * factor, "few": sign * few, "mask": mask * factor} for factor, sign in ((1.0, 1), (1 + 1e-9, -1))
    )
    assert largest_difference(one, other) == (2.0, "few")
    assert norm_difference(one, other) == pytest.approx(2e-8, rel=0.01)
    frozen = {"few": few, "frozen": 1e6 * many, "mask": mask}
    assert norm_difference(frozen, {**frozen, "few": 2 * few}) == pytest.approx(0.5), "what is frozen hides nothing"
    holes = np.array([math.nan, -math.inf, 1.0])
    assert norm_difference({"a": holes}, {"a": holes * [1, 1, 1.5]}) == pytest.approx(0.5 / 1.5)
    for changed, difference in (
        ({"many": many * 1.01}, 0.01 / 1.01),
        ({"many": many[1:]}, math.inf),
        ({"few": np.array([math.nan])}, math.inf),
    ):
        assert norm_difference(one, {**one, **changed}) == pytest.approx(difference)
