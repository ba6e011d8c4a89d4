"""Batches of a Ray Data dataset in one order, so that the position in the dataset is the number of the step.

Rank 0 executes the dataset, in order, and broadcasts references of its blocks. Each rank takes its share of each step's
rows from the same blocks. So the rows of a step do not depend on the number of workers, and no row is read or
transformed twice. Advantages: no rank waits for another one's rows, and any number of workers can continue. Costs: each
node gets all blocks, and the threads of Ray Data's executor run in the process of rank 0.

The rows of each row group are known before they are read. So after a restart, only the row group of the position is
read again. Ray's own readers do not show in which order they read: they pack files by size.

Ray Data shows the operations of a dataset in no public way; ``driver/ray_contract.py`` lists the names in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pyarrow.dataset
import ray
from ray.data import Dataset, Datasource, ReadTask, read_datasource
from ray.data.block import BlockAccessor, BlockMetadata
from ray.train.collective import broadcast_from_rank_zero

from .order import SampleOrder, StepBatches, permute

#: Ray Data's operations that return one row for each row.
_ROW_BY_ROW = {"Project", "MapBatches", "MapRows"}


class ParquetRows(Datasource):  # type: ignore[misc]
    """Row groups of Parquet files, each a read task of Ray Data.

    Attributes:
        rows: Number of rows of each row group.
    """

    def __init__(self, groups: list[Any], columns: Any) -> None:
        self._groups = groups
        self._columns = columns
        self.rows = np.array([group.row_groups[0].num_rows for group in groups])
        self.seek(SampleOrder(1, 1, shuffle=False), 0, 0)

    def seek(self, order: SampleOrder, epoch: int, row: int) -> int:
        """Choose the row groups to read from a row of an epoch on, and return the number of rows before them.

        Args:
            order: Order of the samples. With ``shuffle``, the row groups are shuffled, and the rows in each.
            epoch: Number of the epoch.
            row: Position of the row in the order of the epoch.
        """
        key = (order.seed, epoch) if order.shuffle else ()
        numbers = np.arange(len(self.rows))
        if key:
            numbers = permute(numbers, len(numbers), *key)
        ends = np.cumsum(self.rows[numbers])
        first = np.searchsorted(ends, row, side="right")
        chosen = [self._groups[number] for number in numbers[first:]]
        self._tasks = [
            # Ray Data takes a dataset without files for empty.
            ReadTask(partial(_read, group, self._columns, key), BlockMetadata(None, None, [group.path], None))
            for group in chosen
        ]
        return int(ends[first] - self.rows[numbers[first]])

    def estimate_inmemory_data_size(self) -> None:
        return

    def get_read_tasks(self, *_: Any, **__: Any) -> list[ReadTask]:
        return self._tasks


def _read(group: Any, columns: Any, key: Any) -> list[Any]:
    rows = group.to_table(columns=columns)
    return [rows.take(permute(np.arange(len(rows)), len(rows), *key)) if key else rows]


def read_parquet(paths: str | list[str], columns: list[str] | None = None) -> Dataset:
    """Return a Ray Data dataset of Parquet files that :meth:`Session.batches` can read from any position.

    Operations that return one row for each row may follow: ``map``, ``map_batches``, and the selection of columns. Each
    row group is a task of Ray Data.

    Args:
        paths: A folder, a file, or a list of files, whose order is that of the rows. URIs of pyarrow are allowed.
        columns: Names of the columns to read. Default: all.

    Example::

        def read():
            return loop.read_parquet("s3://bucket/train").map_batches(encode)

        elastic_train(train_loop, datasets={"train": read}, dataset_config=DataConfig(datasets_to_split=[]))
    """
    files = pyarrow.dataset.dataset(paths, format="parquet").get_fragments()
    return read_datasource(ParquetRows([group for file in files for group in file.split_by_row_group()], columns))


def source_of(dataset: Any) -> ParquetRows:
    """Return the row groups that a dataset reads.

    Raises:
        TypeError: The dataset has no known position of each row.
    """
    source, *others = dataset._logical_plan.dag.post_order_iter() if isinstance(dataset, Dataset) else [dataset]
    rows = getattr(source, "datasource", source)
    if not isinstance(rows, ParquetRows) or {type(other).__name__ for other in others} - _ROW_BY_ROW:
        raise TypeError(
            f"{[source, *others]} has no known position of each row. A session reads only Ray Data datasets of "
            "prefect_elastic_train.loop.read_parquet, followed by map, map_batches and the selection of columns. Its "
            "shards must not be split: dataset_config=ray.train.DataConfig(datasets_to_split=[]). Write other datasets "
            "to Parquet files before, or use iter_batches and accept that a restart begins its epoch again"
        )
    return rows


def load_rows(dataset: Any, sampler: StepBatches, rank: int, world_size: int) -> Iterator[Any]:
    """Yield the indices and the columns, as a dict of arrays, of each batch that the sampler chooses.

    The indices are those of the ledger, and not the numbers of the rows.

    Args:
        dataset: Dataset that :func:`source_of` accepts.
        sampler: Indices of each batch.
        rank: Rank of the worker.
        world_size: Number of workers, all of which call this.
    """
    order = sampler.order
    blocks: Any = None
    tables: list[Any] = []  # the rows up to `end`, counted over all epochs
    for (step, part, parts, *_), indices in zip(sampler.positions(), sampler.arrays(), strict=True):
        # All ranks take the blocks of the whole step, so that all broadcast equally often.
        epoch = order.epoch(step)
        first = order.bounds(step, 0, 1)[0]
        begin = epoch * order.length + first
        if blocks is None:
            blocks = _execute(dataset, order, epoch, first)
            end = begin - first + source_of(dataset).seek(order, epoch, first)
        while end < begin + order.size(step):
            reference = [next(blocks)] if rank == 0 else []
            [reference] = broadcast_from_rank_zero(reference) if world_size > 1 else reference
            tables.append(BlockAccessor.for_block(ray.get(reference)).to_arrow())
            end += len(tables[-1])
        rows = pyarrow.concat_tables(tables, promote_options="default")[begin - end :]
        tables = [rows]
        batch = rows.slice(order.bounds(step, *sampler.share, part, parts)[0] - first, len(indices))
        yield indices, BlockAccessor.for_block(batch).to_batch_format("numpy")


def _execute(dataset: Dataset, order: SampleOrder, epoch: int, row: int) -> Iterator[Any]:
    """Yield a reference of each block from a row of an epoch on, without an end."""
    dataset.context.execution_options.preserve_order = True
    for number in count(epoch):
        row = source_of(dataset).seek(order, number, row)
        for bundle in dataset.iter_internal_ref_bundles():
            for reference, metadata in zip(bundle.block_refs, bundle.metadata, strict=True):
                row += metadata.num_rows
                yield reference
        if row != order.length:
            raise ValueError(
                f"epoch {number} of the Ray Data dataset has {row} rows, not {order.length}: its files have changed, "
                "or a function of map_batches has returned fewer or more rows than it was given"
            )
        row = 0
