"""A log of impressions made a file of requests, with bounded memory.

Rows are read a few thousand at a time and folded; only the last request of what was read waits, since its impressions
may go on behind the next row group or in the next file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchrec_adaptive.datasets.arrow import pa, pc, pq
from torchrec_adaptive.datasets.parquet_columns import decode_ids, decode_impressions, run_begins
from torchrec_adaptive.datasets.parquet_layout import PathLike, check_columns, check_same_schema, columns_of, paths_of
from torchrec_adaptive.datasets.parquet_writer import REQUESTS_A_ROW_GROUP, RequestsWriter, requests_writer
from torchrec_adaptive.datasets.regroup import RequestSidesDiffer, fold_requests, take_requests
from torchrec_adaptive.request import FeatureSchema, RequestBatch, concat_batches

_Sources = dict[Path, pq.ParquetFile]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Args:
        num_requests: rows of the target.
        num_impressions: rows of the sources.
        bytes_before: of the sources' files.
        bytes_after: of the target's file.
    """

    num_requests: int
    num_impressions: int
    bytes_before: int
    bytes_after: int

    @property
    def storage_ratio(self) -> float:
        """Bytes before for each byte after; above 1 the target is smaller."""
        return self.bytes_before / self.bytes_after


def convert_impressions(
    source_paths: PathLike | Sequence[PathLike],
    target_path: PathLike,
    schema: FeatureSchema,
    request_key: str = "request_id",
    *,
    is_grouped: bool = True,
    ignored_columns: Sequence[str] = (),
    requests_a_row_group: int = REQUESTS_A_ROW_GROUP,
    rows_a_read: int = 8192,
) -> ConversionReport:
    """Fold files of the impression layout into one of the request layout.

    What is held at once is `rows_a_read` impressions, one row group of requests, and the ids of all requests; without
    `is_grouped` all that the sources hold.

    Args:
        source_paths: one file or several, read in this order. Bags may be plain integers, labels and dense values any
            numbers, and the column `weight` may be absent.
        target_path: of the new file; one that is there already is replaced when the new one is whole.
        schema: what to read.
        request_key: the column that tells requests apart: integers or strings.
        is_grouped: whether impressions of one request stand together, be it over two row groups or files. If not, as in
            a table shuffled for training, they are sorted by `request_key` first, those of one request in the order of
            the sources.
        ignored_columns: columns of the sources that are left out.
        requests_a_row_group: of the target.
        rows_a_read: impressions read at once.

    Returns:
        Counts and sizes.

    Raises:
        ValueError: no source, a target that is a source, a column that is missing, unknown, of another type or with
            nulls, a value that the schema does not allow, a request-side value that differs within a request, or a
            request whose impressions do not stand together. Then no target is left.
    """
    paths = paths_of(source_paths)
    target = Path(target_path)
    if not paths:
        raise ValueError("source_paths is empty; give one file or more")
    if rows_a_read < 1:
        raise ValueError(f"rows_a_read={rows_a_read} must be 1 or more")
    if any(path.resolve() == target.resolve() for path in paths):
        raise ValueError(f"target_path {target} is one of the sources; give another name")
    sources = {path: pq.ParquetFile(path) for path in paths}
    if len(sources) < len(paths):
        raise ValueError(f"source_paths={[str(path) for path in paths]} has a file twice; name each once")
    for path, file in sources.items():
        check_same_schema(file.schema_arrow, schema, path)
        check_columns(
            [name for name in file.schema_arrow.names if name not in ignored_columns], schema, path.name, request_key
        )
    id_type = decode_ids(
        pa.chunked_array([], type=sources[paths[0]].schema_arrow.field(request_key).type), request_key
    ).type
    columns = [request_key, *columns_of(schema)]
    with requests_writer(target, schema, "request", id_type, requests_a_row_group) as writer:
        folding = _Folding(writer, request_key)
        parts = _read(sources, columns, rows_a_read) if is_grouped else _sorted(sources, columns, rows_a_read)
        for where, rows in parts:
            try:
                folding.add(rows, id_type)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        folding.finish()
    return ConversionReport(
        writer.num_requests,
        folding.num_impressions,
        sum(path.stat().st_size for path in paths),
        target.stat().st_size,
    )


def _read(sources: _Sources, columns: list[str], rows_a_read: int) -> Iterator[tuple[str, pa.Table]]:
    """Rows in the order of the files, each part with the name of where it comes from."""
    for path, file in sources.items():
        names = [name for name in columns if name in file.schema_arrow.names]
        first = 0
        for rows in file.iter_batches(batch_size=rows_a_read, columns=names):
            yield f"{path.name}, rows {first} to {first + rows.num_rows - 1}", pa.Table.from_batches([rows])
            first += rows.num_rows


def _sorted(sources: _Sources, columns: list[str], rows_a_part: int) -> Iterator[tuple[str, pa.Table]]:
    """All rows, sorted by the first column."""
    tables = [file.read([name for name in columns if name in file.schema_arrow.names]) for file in sources.values()]
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise ValueError(f"the sources' columns differ in type: {error}; convert each file by itself") from None
    order = pc.sort_indices(table.column(columns[0]))  # a stable sort
    for first in range(0, table.num_rows, rows_a_part):
        part = order[first : first + rows_a_part]
        yield f"sorted rows {first} to {first + len(part) - 1}", table.take(part)


class _Folding:
    """Impressions in, requests out; the last request waits for more of its impressions."""

    def __init__(self, writer: RequestsWriter, request_key: str) -> None:
        self.num_impressions = 0
        self._writer, self._key = writer, request_key
        self._waiting: tuple[RequestBatch, pa.Array] | None = None
        self._ids: list[pa.Array] = []

    def add(self, rows: pa.Table, id_type: pa.DataType) -> None:
        schema = self._writer.schema
        ids = decode_ids(rows.column(self._key), self._key)
        if ids.type != id_type:
            raise ValueError(f"column {self._key!r} is {ids.type} here and {id_type} in the first file; use one type")
        batch = decode_impressions(rows, schema)
        self.num_impressions += batch.num_candidates
        if self._waiting is not None:
            batch = concat_batches([self._waiting[0], batch])
            ids = pa.concat_arrays([self._waiting[1], ids])
        if not len(ids):
            return
        begins = run_begins(ids)
        try:
            batch = fold_requests(batch, torch.from_numpy(begins), schema)
        except RequestSidesDiffer as error:
            raise ValueError(
                f"request-side feature {error.feature!r} differs within request {ids[error.row].as_py()!r}; make it a "
                "candidate feature"
            ) from None
        ids = ids.filter(pa.array(begins))
        _check_unique(ids, self._key)
        last = batch.num_requests - 1
        if last:
            self._write(take_requests(batch, torch.arange(last)), ids[:last])
        self._waiting = take_requests(batch, torch.tensor([last])), ids[last:]

    def _write(self, batch: RequestBatch, ids: pa.Array) -> None:
        self._writer.add(batch, ids)
        self._ids.append(ids)

    def finish(self) -> None:
        if self._waiting is not None:
            self._write(*self._waiting)
            _check_unique(pa.chunked_array(self._ids), self._key)


def _check_unique(ids: pa.Array | pa.ChunkedArray, request_key: str) -> None:
    counted = pc.value_counts(ids)
    again = counted.filter(pc.greater(counted.field("counts"), 1))
    if len(again):
        raise ValueError(
            f"request {again[0]['values'].as_py()!r} comes back after other requests; impressions of one request must "
            f"stand together: give is_grouped=False, or sort the sources by {request_key!r}"
        )
