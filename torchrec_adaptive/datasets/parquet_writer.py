"""Requests written as Parquet, in either layout, with the same settings: zstd and dictionaries.

A file appears by one rename: until it is whole it has a hidden name in the same folder, and an error removes that.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrec_adaptive.datasets.arrow import pa, pq
from torchrec_adaptive.datasets.parquet_columns import encode_batch
from torchrec_adaptive.datasets.parquet_layout import Layout, PathLike, arrow_schema
from torchrec_adaptive.datasets.regroup import take_requests
from torchrec_adaptive.request import FeatureSchema, RequestBatch, concat_batches

REQUESTS_A_ROW_GROUP = 8192
# The format's and pyarrow's own defaults but for the codec; one set for both layouts, so that their sizes compare.
WRITER_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": True}


def write_request_parquet(
    batches: Iterable[RequestBatch],
    schema: FeatureSchema,
    path: PathLike,
    request_ids: Iterable[int] | Iterable[str] | None = None,
    requests_a_row_group: int = REQUESTS_A_ROW_GROUP,
) -> None:
    """Write requests, one row each: what the request says once, its candidates as lists.

    Args:
        batches: on any device; their requests stand in the file in this order. A request without candidates is legal.
        schema: of all of them.
        path: of the file; one that is there already is replaced when the new one is whole.
        request_ids: one a request, all integers or all strings; by default the numbers from 0 on.
        requests_a_row_group: requests of each row group, which is what a reader loads at once; the last may have fewer.

    Raises:
        ValueError: a batch that the schema does not allow, or more or fewer ids than requests.
    """
    _write(batches, schema, path, "request", request_ids, requests_a_row_group)


def write_impression_parquet(
    batches: Iterable[RequestBatch],
    schema: FeatureSchema,
    path: PathLike,
    request_ids: Iterable[int] | Iterable[str] | None = None,
    requests_a_row_group: int = REQUESTS_A_ROW_GROUP,
) -> None:
    """Write requests, one row a candidate, all that the request says repeated in each: the plain form of a log.

    A request without candidates has no row. No request stands in two row groups.

    Args:
        batches: on any device; their candidates stand in the file in this order.
        schema: of all of them.
        path: of the file; one that is there already is replaced when the new one is whole.
        request_ids: one a request, all integers or all strings; by default the numbers from 0 on.
        requests_a_row_group: requests of each row group.

    Raises:
        ValueError: a batch that the schema does not allow, or more or fewer ids than requests.
    """
    _write(batches, schema, path, "impression", request_ids, requests_a_row_group)


def _write(
    batches: Iterable[RequestBatch],
    schema: FeatureSchema,
    path: PathLike,
    layout: Layout,
    request_ids: Iterable[int] | Iterable[str] | None,
    requests_a_row_group: int,
) -> None:
    ids = None if request_ids is None else _given_ids(request_ids)
    id_type = pa.int64() if ids is None else ids.type
    with requests_writer(path, schema, layout, id_type, requests_a_row_group) as writer:
        for batch in batches:
            first, last = writer.num_requests, writer.num_requests + batch.num_requests
            if ids is not None and last > len(ids):
                raise ValueError(f"there are {len(ids)} request_ids and {last} requests or more; give one a request")
            batch.validate(schema)
            writer.add(batch, pa.array(np.arange(first, last)) if ids is None else ids[first:last])
        if ids is not None and writer.num_requests != len(ids):
            raise ValueError(f"there are {len(ids)} request_ids and {writer.num_requests} requests; give one a request")


def _given_ids(request_ids: Iterable[int] | Iterable[str]) -> pa.Array:
    ids = list(request_ids)
    kind = pa.string() if ids and isinstance(ids[0], str) else pa.int64()
    try:
        return pa.array(ids, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ValueError(f"request_ids must be all integers of 64 bits or all strings: {error}") from None


class RequestsWriter:
    """Collects requests into row groups of one file; use `requests_writer`.

    Args:
        file: what row groups are written to.
        schema: of the requests.
        layout: of the file.
        requests_a_row_group: of each row group but the last.
    """

    def __init__(
        self, file: pq.ParquetWriter, schema: FeatureSchema, layout: Layout, requests_a_row_group: int
    ) -> None:
        self.schema, self.layout, self.requests_a_row_group = schema, layout, requests_a_row_group
        self.num_requests = 0
        self._file = file
        self._batches: list[RequestBatch] = []
        self._ids: list[pa.Array] = []
        self._num_waiting = 0

    def add(self, batch: RequestBatch, ids: pa.Array) -> None:
        """Append requests.

        Args:
            batch: valid under the schema.
            ids: (R,) of the file's id type.
        """
        self.num_requests += batch.num_requests
        batch = batch.to(torch.device("cpu"))
        first, size = 0, self.requests_a_row_group
        while first < batch.num_requests:
            last = min(batch.num_requests, first + size - self._num_waiting)
            self._batches.append(take_requests(batch, torch.arange(first, last)))
            self._ids.append(ids[first:last])
            self._num_waiting += last - first
            first = last
            if self._num_waiting == size:
                self.flush()

    def flush(self) -> None:
        """Write the requests that wait for their row group to fill."""
        if self._num_waiting:
            table = encode_batch(concat_batches(self._batches), pa.concat_arrays(self._ids), self.schema, self.layout)
            if table.num_rows:
                self._file.write_table(table, row_group_size=table.num_rows)
        self._batches, self._ids, self._num_waiting = [], [], 0


@contextmanager
def requests_writer(
    path: PathLike, schema: FeatureSchema, layout: Layout, id_type: pa.DataType, requests_a_row_group: int
) -> Generator[RequestsWriter]:
    """A writer whose file appears under its name at the end of the block, whole, and not at all where the block raises.

    Args:
        path: of the file.
        schema: of the requests.
        layout: of the file.
        id_type: int64 or string.
        requests_a_row_group: of each row group but the last; 1 or more.

    Raises:
        ValueError: `requests_a_row_group` is below 1, or the folder does not exist.
    """
    if requests_a_row_group < 1:
        raise ValueError(f"requests_a_row_group={requests_a_row_group} must be 1 or more")
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist; create it before a file is written there")
    arrow = arrow_schema(schema, layout, id_type)
    hidden = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        with pq.ParquetWriter(hidden, arrow, **WRITER_OPTIONS) as file:
            writer = RequestsWriter(file, schema, layout, requests_a_row_group)
            yield writer
            writer.flush()
        with open(hidden, "rb") as written:
            os.fsync(written.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
