"""The samples of a step are those at its positions, whatever the dataset is and whatever labels it has."""

import os
import signal
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy import sparse

from prefect_elastic_train import loop
from prefect_elastic_train.loop.batches import length_of
from tests.unit.test_loop_session import NoState

LENGTH, STEPS = 10, 3
X = np.arange(float(LENGTH))
#: Shuffled as by ``frame.sample(frac=1)``: no row's label is its position.
FRAME = pd.DataFrame({"x": X, "y": 10 * X}, index=np.random.default_rng(0).permutation(LENGTH))


class Own:
    """A dataset that is no torch Dataset."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Sorted(Own):
    """Fancy indexing takes rising positions only, as in an HDF5 file's datasets."""

    def __getitem__(self, index: Any) -> Any:
        if np.ndim(index) and (np.diff(index) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        return self.samples[index]


def _steps(dataset: Any, **options: Any) -> Iterator[tuple[list[int], Any]]:
    """Each step's samples and batch."""
    with loop.session(NoState(), steps=STEPS, global_batch=4, seed=0) as session:
        for batch in session.batches(dataset, **options):
            yield session.samples.tolist(), batch
            session.step()


# By position


@pytest.mark.parametrize(
    "targets",
    [
        FRAME["y"],
        FRAME["y"].astype("category"),
        pd.Index(10 * X)[::-1][::-1],
        FRAME["y"].array,
        pa.array(10 * X),
        pa.chunked_array([10 * X[:3], 10 * X[3:]]),
        (10 * X).tolist(),
        np.ma.array(10 * X, mask=X == 3),
        torch.arange(LENGTH) * 10,
        Sorted(10 * X),
    ],
    ids=lambda targets: type(targets).__name__,
)
def test_inputs_meet_their_own_targets_whatever_both_are_kept_in(targets: Any) -> None:
    mixture = loop.Mixture([(X, targets), {"x": X, "y": targets}], [1, 1])
    assert all(np.array_equal(10 * mixture[index][0], mixture[index][1]) for index in range(LENGTH) if index != 3)
    for samples, (x, y) in _steps((FRAME["x"].to_numpy(), targets)):
        assert (X[samples] == x).all()
        assert np.ma.allequal(10 * x, np.ma.asarray(y))
        assert np.ma.isMA(y) == np.ma.isMA(targets)
    for columns in ({"x": X, "inner": {"y": targets}}, UserDict(x=X, inner=UserDict(y=targets))):
        for _, batch in _steps(columns):
            assert np.ma.allequal(10 * batch["x"], np.ma.asarray(batch["inner"]["y"]))


@pytest.mark.parametrize("table", [FRAME, pa.Table.from_pandas(FRAME), pa.Table.from_pandas(FRAME).to_batches()[0]])
def test_a_tables_samples_are_its_rows(table: Any) -> None:
    assert length_of(table) == LENGTH
    for samples, batch in _steps(table):
        assert np.asarray(batch["x"]).tolist() == samples
        assert np.asarray(batch["y"]).tolist() == [10 * sample for sample in samples]
    row = loop.Mixture([table], [1])[7]
    assert (row["x"], row["y"]) == (7, 70)


def test_the_parts_of_a_batch_do_not_meet_by_labels_either() -> None:
    renamed = FRAME["y"].set_axis(range(LENGTH))
    for samples, (x, y) in _steps((FRAME["x"], renamed)):
        assert (10 * x == y).all(), "which pandas aligns by their labels"
        assert torch.as_tensor(y).tolist() == [10 * sample for sample in samples], "torch reads a Series by label"


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (iter(X), "cannot be resumed at a position. Load the samples by index"),
        (({5: 1.0, 0: 2.0}, X[:2]), "float has no __len__ and __getitem__"),
        (sparse.csr_array(np.eye(3)), "length is ambiguous"),
        *(
            (dataset, f"the samples of {type(dataset).__name__} cannot be read by position: give an array")
            for dataset in (
                torch.utils.data.Subset(torch.utils.data.Subset(FRAME["y"], [3, 4]), [0]),
                torch.utils.data.StackDataset(X, FRAME["y"]),
                torch.utils.data.StackDataset(x=X, y=FRAME["y"]),
                torch.utils.data.ConcatDataset([FRAME["y"], FRAME["y"]]),
            )
        ),
        (torch.utils.data.DataLoader(Own(X)), r"DataLoader has no .* \(for a DataLoader, pass loader\.dataset\)"),
        (({"x": X, "y": X}, X[:2]), r"one length, not \[2, 10\]"),
    ],
)
def test_what_is_not_read_by_position_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        next(_steps(dataset))


def test_a_dataset_of_hugging_face_is_read_by_position() -> None:
    library = pytest.importorskip("datasets")
    frame = library.Dataset.from_dict({"x": X, "y": 10 * X})
    for dataset in ((frame["x"], frame["y"]), frame, frame.with_format("torch")):
        for samples, batch in _steps(dataset):
            x, y = batch if isinstance(batch, tuple) else (batch["x"], batch["y"])
            assert (np.asarray(x).tolist(), np.asarray(y).tolist()) == (samples, [10 * one for one in samples])


# By torch's DataLoader


@pytest.mark.parametrize(
    "dataset",
    [
        [{"x": torch.tensor(x), "y": 10 * x} for x in X],
        pa.Table.from_pandas(FRAME),
        loop.Mixture([{"x": X, "y": FRAME["y"]}], [2]),
    ],
)
def test_anything_with_a_length_and_an_index_goes_through_torchs_loader_if_options_of_that_are_given(
    dataset: Any,
) -> None:
    options = {"num_workers": 0}
    for samples, batch in _steps(dataset, **options):
        assert isinstance(batch["x"], torch.Tensor)
        assert (batch["x"].tolist(), batch["y"].tolist()) == (samples, [10 * one for one in samples])
    session = loop.session(NoState(), steps=1, global_batch=4)
    assert [len(batch["x"]) for batch in session.once(dataset, 8, **options)] == [8, 2]


def test_a_mixtures_masked_samples_stay_masked() -> None:
    masked = np.ma.array(np.stack([X, X]).T, mask=np.stack([X == 3, X == 4]).T)
    for samples, batch in _steps(loop.Mixture([masked, masked], [1, 1])):
        index = [sample % LENGTH for sample in samples]
        assert (np.ma.getmaskarray(batch) == masked.mask[index]).all()


class Killed(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


class Broken(Killed):
    def __getitem__(self, index: int) -> int:
        raise EOFError("the file is too short")


def test_a_data_loading_process_that_was_killed_is_one_line_and_an_error_in_one_is_the_datasets_own() -> None:
    with pytest.raises(RuntimeError, match=r"a data loading process was killed or has crashed.*num_workers") as killed:
        next(_steps(Killed(), num_workers=1))
    assert killed.value.__suppress_context__, "45 lines of torch are not shown"
    with pytest.raises(EOFError, match="the file is too short"):
        next(_steps(Broken(), num_workers=1))


@pytest.mark.parametrize("option", ["batch_size", "sampler", "batch_sampler"])
def test_options_that_choose_the_samples_of_a_batch_are_the_sessions(option: str) -> None:
    with pytest.raises(TypeError, match=rf"{option}=.*global_batch.*micro_batch"):
        next(_steps(X, **{option: 4}))


def test_a_collate_function_gets_the_samples_as_the_dataset_gives_them() -> None:
    texts = [f"text {number}" for number in range(LENGTH)]
    for samples, batch in _steps(texts, collate_fn=list):
        assert batch == [texts[sample] for sample in samples]


def test_samples_that_are_tensors_stay_tensors() -> None:
    own = Own([(torch.full((2,), x, dtype=torch.bfloat16), {"y": 10 * x}) for x in X])
    for samples, (x, rest) in _steps(own):
        assert (x.dtype, x[:, 1].tolist()) == (torch.bfloat16, samples)
        assert rest["y"].tolist() == [10 * sample for sample in samples]


@pytest.mark.parametrize("turned", [False, True])
def test_a_mixture_with_a_torch_dataset_gives_tensors_wherever_that_stands(turned: bool) -> None:
    mixed = [torch.utils.data.TensorDataset(torch.tensor(X)), Own([(torch.tensor(x),) for x in X])]
    for _, (batch,) in _steps(loop.Mixture(mixed[::-1] if turned else mixed, [1, 1])):
        assert isinstance(batch, torch.Tensor)
