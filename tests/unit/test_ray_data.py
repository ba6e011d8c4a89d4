"""The position in a Ray Data dataset: which row groups are read, and in which order the rows are seen."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
from ray.data import DataContext, Dataset
from ray.data._internal.datasource.range_datasource import RangeDatasource
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators import Filter, MapBatches, RandomShuffle, Read
from ray.data._internal.stats import DatasetStats

from prefect_elastic_train.loop import SampleOrder
from prefect_elastic_train.loop.ray_data import ParquetRows, source_of

SIZES = (70, 5, 130)
LENGTH = sum(SIZES)


def _files(folder: Path) -> pyarrow.dataset.Dataset:
    for number, rows in enumerate(np.split(np.arange(LENGTH), np.cumsum(SIZES)[:-1])):
        table = pyarrow.table({"id": rows, "other": rows})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=30)
    return pyarrow.dataset.dataset(str(folder), format="parquet")


@pytest.fixture
def source(tmp_path: Path) -> ParquetRows:
    """Three files with a column of row numbers, in row groups of at most 30 rows."""
    groups = [group for file in _files(tmp_path).get_fragments() for group in file.split_by_row_group()]
    return ParquetRows(groups, ["id"])


def _read(source: ParquetRows) -> list[int]:
    tables = [block for task in source.get_read_tasks() for block in task()]
    assert all(table.column_names == ["id"] for table in tables)
    return [row for table in tables for row in table["id"].to_pylist()]


def test_without_shuffle_the_rows_have_the_order_of_the_files(source: ParquetRows) -> None:
    assert source.rows.tolist() == [30, 30, 10, 5, 30, 30, 30, 30, 10]
    assert _read(source) == [*range(LENGTH)]
    assert source.seek(SampleOrder(LENGTH, 10, shuffle=False), 3, 40) == 30
    assert _read(source) == [*range(30, LENGTH)]


def test_a_restart_reads_the_epoch_from_the_row_group_of_its_position_on(source: ParquetRows) -> None:
    order = SampleOrder(LENGTH, 10, seed=4)
    epochs = []
    for epoch in range(2):
        source.seek(order, epoch, 0)
        whole = _read(source)
        assert sorted(whole) == [*range(LENGTH)]
        for row in range(0, LENGTH, 7):
            skipped = source.seek(order, epoch, row)
            assert row - 30 < skipped <= row
            assert _read(source) == whole[skipped:]
        epochs.append(whole)
    assert epochs[0] != epochs[1]


def _dataset(operation: Any) -> Dataset:
    context = DataContext.get_current()
    return Dataset(LogicalPlan(operation, context), context, DatasetStats(metadata={}, parent=None))


def test_datasets_whose_rows_have_no_known_position_are_refused(source: ParquetRows) -> None:
    read = Read(source, source, 1)
    mapped = MapBatches(fn=lambda batch: batch, input_dependencies=[read])
    assert source_of(_dataset(mapped)) is source
    for operation in (
        RandomShuffle(input_dependencies=[mapped]),
        Filter(fn=lambda row: True, input_dependencies=[mapped]),
        Read(RangeDatasource(9), RangeDatasource(9), 1),
    ):
        with pytest.raises(TypeError, match="has no known position of each row"):
            source_of(_dataset(operation))
