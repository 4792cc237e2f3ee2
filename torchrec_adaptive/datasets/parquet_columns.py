"""A `RequestBatch` as Arrow columns and back: whole buffers are handed over, no row is looped over.

A column of the candidate side stands at B rows; in the request layout its rows are wrapped into one list a request.

Shape letters: R requests, B candidates, N rows of either side, F features, V ids of all rows of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.datasets.arrow import pa, pc
from torchrec_adaptive.datasets.parquet_layout import (
    REQUEST_ID,
    WEIGHT,
    Layout,
    arrow_schema,
    columns_of,
    label_column,
    weights_column,
)
from torchrec_adaptive.datasets.regroup import candidate_counts, to_single_impressions
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, RequestFeatures, Side, empty_kjt

Array = NDArray[Any]
_MOST_VALUES = 2**31 - 1  # of an Arrow list, whose offsets are int32


def encode_batch(batch: RequestBatch, ids: pa.Array, schema: FeatureSchema, layout: Layout) -> pa.Table:
    """The rows of a file.

    Args:
        batch: R requests with B candidates, valid under the schema.
        ids: (R,) the requests' ids.
        schema: of the batch.
        layout: of the file.

    Returns:
        R rows in the request layout, B in the impression layout.

    Raises:
        ValueError: an unweighted bag has a weight other than 1, or a column more ids than an Arrow list can hold.
    """
    index, counts = batch.candidate_to_request.numpy(force=True), candidate_counts(batch).numpy(force=True)
    arrow = arrow_schema(schema, layout, ids.type)
    if layout == "impression":
        batch, ids = to_single_impressions(batch), ids.take(pa.array(index))
    columns: dict[str, pa.Array] = {REQUEST_ID: ids}
    offset = {Side.REQUEST: 0, Side.CANDIDATE: 0}
    dense = {Side.REQUEST: batch.request_dense, Side.CANDIDATE: batch.candidate_dense}
    for feature in schema.features:
        if feature.width:
            first = offset[feature.side]
            offset[feature.side] = first + feature.width
            values = dense[feature.side][:, first : first + feature.width].numpy(force=True)
            columns[feature.name] = _dense_array(values)
    features = batch.features
    for specs, part in (
        (schema.request_bags, features.request),
        (schema.candidate_bags, features.candidate),
        (schema.sequences, features.history),
    ):
        for spec in specs:
            columns |= _bag_arrays(spec, part)
    for task, labels in zip(schema.tasks, batch.labels.numpy(force=True).T, strict=True):
        columns[label_column(task)] = pa.array(np.ascontiguousarray(labels))
    columns[WEIGHT] = pa.array(batch.weights.numpy(force=True))
    if layout == "request":
        for name, side in columns_of(schema).items():
            if side is Side.CANDIDATE:
                columns[name] = _list_array(columns[name], counts, name)
    return pa.table([columns[name].cast(arrow.field(name).type) for name in arrow.names], schema=arrow)


def _dense_array(values_NW: Array) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values_NW).reshape(-1))
    return flat if values_NW.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, values_NW.shape[1])


def _bag_arrays(spec: Feature, part: KeyedJaggedTensor) -> dict[str, pa.Array]:
    jagged = part[spec.name]
    lengths = jagged.lengths().numpy(force=True)
    values = jagged.values().numpy(force=True).astype(np.int64, copy=False)
    arrays = {spec.name: _list_array(pa.array(values), lengths, spec.name)}
    weights = jagged.weights_or_none()
    if spec.weighted:
        flat = np.empty(0) if weights is None else weights.numpy(force=True)
        column = weights_column(spec)
        arrays[column] = _list_array(pa.array(flat.astype(np.float32, copy=False)), lengths, column)
    elif weights is not None and bool((weights != 1.0).any()):
        wrong = weights[weights != 1.0][0]
        raise ValueError(
            f"unweighted bag {spec.name!r} has the weight {float(wrong)}; its weights must be 1 and are not written: "
            "make the feature weighted"
        )
    return arrays


def _list_array(values: pa.Array, lengths: Array, name: str) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > _MOST_VALUES:
        raise ValueError(
            f"column {name!r} has {offsets[-1]} values in one row group; an Arrow list holds at most {_MOST_VALUES}: "
            "use a smaller requests_a_row_group"
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def decode_requests(table: pa.Table, schema: FeatureSchema) -> RequestBatch:
    """The batch of rows of the request layout.

    Args:
        table: R rows; the column of ids is not read.
        schema: of the file.

    Returns:
        RequestBatch on the CPU, keys in schema order, validated.

    Raises:
        ValueError: nulls, types that do not fit, candidate-side columns of different lengths, or values that the
            schema does not allow.
    """
    columns: dict[str, pa.Array] = {}
    counts: Array | None = None
    for name, side in columns_of(schema).items():
        if name not in table.column_names:
            continue
        column = _plain(table.column(name))
        if side is Side.CANDIDATE:
            if not _is_list(column.type):
                raise ValueError(
                    f"column {name!r} has the type {column.type}; it must be a list, one entry a candidate"
                )
            lengths, column = _unwrap(column, name)
            counts = lengths if counts is None else counts
            if not np.array_equal(lengths, counts):
                row = int(np.flatnonzero(lengths != counts)[0])
                raise ValueError(
                    f"column {name!r} has {lengths[row]} entries in row {row} and another candidate-side column "
                    f"{counts[row]}; every candidate-side column has one entry a candidate: write the file again"
                )
        columns[name] = column
    if counts is None:
        counts = np.zeros(table.num_rows, dtype=np.int64)
    return _decode(columns, schema, table.num_rows, np.repeat(np.arange(table.num_rows, dtype=np.int32), counts))


def decode_impressions(table: pa.Table, schema: FeatureSchema) -> RequestBatch:
    """The batch of rows of the impression layout, each a request of its own with one candidate.

    A bag may be a plain integer, and ids any integers; labels, weights and dense values any numbers.

    Args:
        table: B rows; the column of ids is not read; without the column `weight` every impression weighs 1.
        schema: of the file.

    Returns:
        RequestBatch on the CPU with R = B, keys in schema order, validated.

    Raises:
        ValueError: nulls, types that do not fit, or values that the schema does not allow.
    """
    columns = {name: _plain(table.column(name)) for name in columns_of(schema) if name in table.column_names}
    return _decode(columns, schema, table.num_rows, np.arange(table.num_rows, dtype=np.int32))


def decode_ids(column: pa.ChunkedArray, name: str) -> pa.Array:
    """Request ids as int64 or string.

    Args:
        column: of integers or strings.
        name: for the message.

    Raises:
        ValueError: nulls, or another type.
    """
    array = _without_nulls(_plain(column), name)
    if pa.types.is_integer(array.type):
        return _cast(array, pa.int64(), name)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return _cast(array, pa.string(), name)
    raise ValueError(f"column {name!r} has the type {array.type}; request ids must be integers or strings: cast them")


def run_begins(ids: pa.Array) -> NDArray[np.bool_]:
    """(N,) whether a row's id is another than that of the row before.

    Args:
        ids: (N,) without nulls.
    """
    begins = np.ones(len(ids), dtype=bool)
    begins[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    return begins


def _decode(columns: Mapping[str, pa.Array], schema: FeatureSchema, num_requests: int, index: Array) -> RequestBatch:
    request_dense, candidate_dense = (
        [_floats(columns[f.name], f.name, f.width) for f in specs]
        for specs in (schema.request_dense, schema.candidate_dense)
    )
    labels = [_floats(columns[name], name, 1) for name in map(label_column, schema.tasks)]
    weights = _floats(columns[WEIGHT], WEIGHT, 1)[:, 0] if WEIGHT in columns else np.ones(len(index), np.float32)
    batch = RequestBatch(
        RequestFeatures(
            _kjt(columns, schema.request_bags, num_requests),
            _kjt(columns, schema.candidate_bags, len(index)),
            _kjt(columns, schema.sequences, num_requests),
            torch.from_numpy(index),
        ),
        _beside(request_dense, num_requests),
        _beside(candidate_dense, len(index)),
        _beside(labels, len(index)),
        torch.from_numpy(np.array(weights)),
    )
    batch.validate(schema)
    return batch


def _beside(parts: list[Array], rows: int) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts, axis=1)) if parts else torch.empty(rows, 0)


def _kjt(columns: Mapping[str, pa.Array], specs: tuple[Feature, ...], rows: int) -> KeyedJaggedTensor:
    if not specs:
        return empty_kjt(rows)
    is_weighted = any(spec.weighted for spec in specs)
    bags = [_bag(columns, spec, is_weighted) for spec in specs]
    weights = torch.from_numpy(np.concatenate([bag.weights for bag in bags])) if is_weighted else None
    return KeyedJaggedTensor(
        keys=[spec.name for spec in specs],
        values=torch.from_numpy(np.concatenate([bag.ids for bag in bags])),
        lengths=torch.from_numpy(np.concatenate([bag.lengths for bag in bags]).astype(np.int32)),
        weights=weights,
        stride=rows,
    )


@dataclass(frozen=True)
class _Bag:
    """ids (V,) int64; lengths (N,); weights (V,) float32, or (0,) where no bag of the part is weighted."""

    ids: Array
    lengths: Array
    weights: Array


def _bag(columns: Mapping[str, pa.Array], spec: Feature, is_part_weighted: bool) -> _Bag:
    lengths, ids = _unwrap(columns[spec.name], spec.name)
    if not pa.types.is_integer(ids.type):
        raise ValueError(f"column {spec.name!r} has the type {columns[spec.name].type}; it must hold integer ids")
    values = _cast(ids, pa.int64(), spec.name).to_numpy()
    if not spec.weighted:
        return _Bag(values, lengths, np.ones(len(values) if is_part_weighted else 0, dtype=np.float32))
    name = weights_column(spec)
    weight_lengths, weights = _unwrap(columns[name], name)
    if not np.array_equal(weight_lengths, lengths):
        row = int(np.flatnonzero(weight_lengths != lengths)[0])
        raise ValueError(
            f"column {name!r} has {weight_lengths[row]} weights where {spec.name!r} has {lengths[row]} ids (row "
            f"{row}); give one weight for each id"
        )
    return _Bag(values, lengths, _numbers(weights, name))


def _floats(column: pa.Array, name: str, width: int) -> Array:
    """(N, width) float32."""
    lengths, values = _unwrap(column, name)
    if wrong := np.flatnonzero(lengths != width).tolist():
        raise ValueError(f"column {name!r} has {lengths[wrong[0]]} values in row {wrong[0]}; its width is {width}")
    return _numbers(values, name).reshape(len(column), width)


def _numbers(values: pa.Array, name: str) -> Array:
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"column {name!r} holds values of the type {kind}; they must be numbers")
    return _cast(values, pa.float32(), name, safe=False).to_numpy()


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """One array, dictionaries replaced by what they stand for."""
    array = column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _unwrap(column: pa.Array, name: str) -> tuple[Array, pa.Array]:
    """Lengths (N,) int64 and the values side by side; a plain value is a list of one."""
    _without_nulls(column, name)
    if not _is_list(column.type):
        return np.ones(len(column), dtype=np.int64), column
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size, dtype=np.int64)
    else:
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int64, copy=False)
    return lengths, _without_nulls(column.flatten(), name)


def _without_nulls(array: pa.Array, name: str) -> pa.Array:
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise ValueError(
            f"column {name!r} holds {array.null_count} nulls, the first as value {row}; nothing may be null: write [] "
            "for an empty bag or history, and a number elsewhere"
        )
    return array


def _cast(array: pa.Array, kind: pa.DataType, name: str, safe: bool = True) -> pa.Array:
    try:
        return array if array.type == kind else array.cast(kind, safe=safe)
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name!r} cannot be read as {kind}: {error}") from None
