"""Batches read from Parquet files of requests, and the same candidates read from files of impressions.

Both are batch sources: `batch(epoch, step, rank, world_size)` is a pure function of its arguments, the files and the
seed, so that a resumed job sees what an unbroken one would have seen. An epoch is the row groups in an order of its
own, and the requests of each in an order of its own; a step is the next `requests_a_step` of them, and a rank's part
the next share of the step. So a step touches one row group or two, which are kept for the steps that follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_adaptive.datasets.arrow import pa, pq
from torchrec_adaptive.datasets.parquet_columns import decode_impressions, decode_requests, run_begins
from torchrec_adaptive.datasets.parquet_layout import (
    REQUEST_ID,
    Layout,
    PathLike,
    check_columns,
    check_file,
    columns_of,
    paths_of,
)
from torchrec_adaptive.datasets.regroup import take_requests
from torchrec_adaptive.request import FeatureSchema, RequestBatch, batch_from_rows, concat_batches

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _RowGroup:
    """Where a row group lies.

    Args:
        file: number of the file.
        number: of the row group in it.
        num_requests: that it holds.
    """

    file: int
    number: int
    num_requests: int


@dataclass(frozen=True)
class _Loaded:
    """A row group in memory; row r of `batch` belongs to the request that begins at the last of `begins` up to r."""

    batch: RequestBatch
    begins: Ints  # (requests + 1,)


class _ParquetSource(ABC):
    """What both sources share: the files, the order of an epoch, and the row groups kept.

    Args and errors are those of `RequestParquet`.
    """

    _layout: Layout

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        schema: FeatureSchema,
        requests_a_step: int,
        seed: int = 0,
        shuffle: bool = True,
        num_cached_row_groups: int = 2,
    ) -> None:
        for name, value in (("requests_a_step", requests_a_step), ("num_cached_row_groups", num_cached_row_groups)):
            if value < 1:
                raise ValueError(f"{name}={value} must be 1 or more")
        self.schema, self.seed, self.shuffle = schema, seed, shuffle
        self.requests_a_step, self.num_cached_row_groups = requests_a_step, num_cached_row_groups
        self.paths = tuple(paths_of(paths))
        self._columns = list(columns_of(schema))
        self._metadata = []
        groups = []
        for number, path in enumerate(self.paths):
            file = pq.ParquetFile(path)
            check_file(file.schema_arrow, schema, self._layout, path)
            check_columns(file.schema_arrow.names, schema, path.name)
            self._metadata.append(file.metadata)
            groups += [
                _RowGroup(number, group, self._num_requests(file, group)) for group in range(file.num_row_groups)
            ]
        self._groups = tuple(group for group in groups if group.num_requests)
        self.num_requests = sum(group.num_requests for group in self._groups)
        if not self.num_requests:
            raise ValueError(f"paths={[str(path) for path in self.paths]} hold no requests; give files that do")
        self._kept: OrderedDict[int, _Loaded] = OrderedDict()

    @abstractmethod
    def _num_requests(self, file: pq.ParquetFile, group: int) -> int: ...

    @abstractmethod
    def _decode(self, file: pq.ParquetFile, group: int) -> _Loaded: ...

    def num_steps(self, epoch: int = 0) -> int:
        """Batches an epoch; the last may have fewer requests."""
        return -(-self.num_requests // self.requests_a_step)

    def batch(self, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> RequestBatch:
        """One rank's part of a step's requests.

        Args:
            epoch: 0 or more; where `shuffle` is off, all are the same.
            step: 0 to `num_steps - 1`.
            rank: 0 to `world_size - 1`.
            world_size: ranks; their parts are disjoint, and together they are the step.

        Returns:
            RequestBatch on the CPU; without requests where a step has fewer of them than there are ranks.

        Raises:
            ValueError: a step or a rank that there is not, or a row group with values that the schema does not allow.
        """
        if not 0 <= step < self.num_steps(epoch):
            raise ValueError(f"step={step} is not in an epoch of {self.num_steps(epoch)} steps; use 0 to num_steps - 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be 0 or more and below world_size={world_size}")
        begin = step * self.requests_a_step
        places = np.arange(begin, min(self.num_requests, begin + self.requests_a_step))
        share = np.array_split(places, world_size)[rank]
        if not len(share):
            return batch_from_rows(self.schema, [])
        order = np.arange(len(self._groups))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(order)
        ends = np.cumsum([self._groups[group].num_requests for group in order])
        parts = []
        for place in range(*np.searchsorted(ends, [share[0], share[-1]], side="right") + [0, 1]):
            group = int(order[place])
            start = ends[place] - self._groups[group].num_requests
            own = share[(share >= start) & (share < ends[place])] - start
            parts.append(self._take(group, self._order_within(epoch, group)[own]))
        return concat_batches(parts)

    def _order_within(self, epoch: int, group: int) -> Ints:
        numbers = np.arange(self._groups[group].num_requests)
        return np.random.default_rng((self.seed, epoch, group)).permutation(numbers) if self.shuffle else numbers

    def _take(self, group: int, requests: Ints) -> RequestBatch:
        loaded = self._load(group)
        firsts, counts = loaded.begins[requests], np.diff(loaded.begins)[requests]
        ends = np.cumsum(counts)
        rows = np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1])
        return take_requests(loaded.batch, torch.from_numpy(rows))

    def _load(self, group: int) -> _Loaded:
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        while len(self._kept) >= self.num_cached_row_groups:
            self._kept.popitem(last=False)
        place = self._groups[group]
        path = self.paths[place.file]
        with pq.ParquetFile(path, metadata=self._metadata[place.file]) as file:
            try:
                loaded = self._decode(file, place.number)
            except ValueError as error:
                raise ValueError(f"{path.name}, row group {place.number}: {error}") from None
        self._kept[group] = loaded
        return loaded


class RequestParquet(_ParquetSource):
    """Requests from files of the request layout.

    Args:
        paths: one file or several, written by `write_request_parquet` or `convert_impressions`.
        schema: what to read; embedding dims, tables and poolings may be others than when the files were written.
        requests_a_step: R of a step, over all ranks.
        seed: of the orders.
        shuffle: whether every epoch has an order of its own; otherwise that of the files.
        num_cached_row_groups: row groups kept in memory, decoded.

    Raises:
        ValueError: a file of another layout or schema, or no request in any.
    """

    _layout = "request"

    def _num_requests(self, file: pq.ParquetFile, group: int) -> int:
        return file.metadata.row_group(group).num_rows

    def _decode(self, file: pq.ParquetFile, group: int) -> _Loaded:
        batch = decode_requests(file.read_row_group(group, columns=self._columns), self.schema)
        return _Loaded(batch, np.arange(batch.num_requests + 1))


class ImpressionParquet(_ParquetSource):
    """Impressions from files of the impression layout, each a request of its own: R = B.

    Impressions of one request go to one step and one rank. Where the file is `write_impression_parquet`'s and another
    is `write_request_parquet`'s, of the same requests, all with candidates, and row groups of as many requests, this
    source and a `RequestParquet` of the same seed give the same candidates in the same order, step by step: what
    differs is only that all a request says is repeated for each. A request in two row groups counts as two.

    Args:
        paths: one file or several, written by `write_impression_parquet`.
        schema: what to read; embedding dims, tables and poolings may be others than when the files were written.
        requests_a_step: requests whose impressions make a step, over all ranks.
        seed: of the orders.
        shuffle: whether every epoch has an order of its own; otherwise that of the files.
        num_cached_row_groups: row groups kept in memory, decoded.

    Raises:
        ValueError: a file of another layout or schema, or no request in any.
    """

    _layout = "impression"

    def _num_requests(self, file: pq.ParquetFile, group: int) -> int:
        return len(_begins(file.read_row_group(group, columns=[REQUEST_ID]))) - 1

    def _decode(self, file: pq.ParquetFile, group: int) -> _Loaded:
        table = file.read_row_group(group, columns=[REQUEST_ID, *self._columns])
        return _Loaded(decode_impressions(table, self.schema), _begins(table))


def _begins(table: pa.Table) -> Ints:
    """(requests + 1,) where the rows of each request begin, and the number of rows."""
    ids = table.column(REQUEST_ID).combine_chunks()
    return np.append(np.flatnonzero(run_begins(ids)), len(ids))
