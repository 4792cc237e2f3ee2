"""Named tensors of the protocol, and the RequestBatch that they make: both ways.

| feature | input | datatype | shape |
| --- | --- | --- | --- |
| bag, request or candidate side | `f.values`, `f.lengths` | INT64, INT32 | [ids], [R] or [B] |
| bag with one id in every row | `f` | INT64 | [R] or [B] |
| weighted bag | also `f.weights` | FP32 | [ids] |
| sequence | `f.values` | INT64 | [events] |
| all sequences | `history.lengths` | INT32 | [R] |
| dense | `f` | FP32 | [R, width] or [B, width] |
| which request each candidate is for | `candidate_to_request` | INT32 | [B] |

R requests and B candidates; `candidate_to_request` may be left out where R is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.request import (
    Feature,
    FeatureSchema,
    Kind,
    RequestBatch,
    RequestFeatures,
    Side,
    empty_kjt,
    nearest_name,
)
from torchrec_adaptive.serving.protocol import DTYPES, BadRequest, datatype_of

INDEX, HISTORY_LENGTHS = "candidate_to_request", "history.lengths"
Arrays = Mapping[str, NDArray[Any]]


def describe_inputs(schema: FeatureSchema) -> list[dict[str, Any]]:
    """Inputs as the protocol's metadata has them; -1 for a size that varies.

    Args:
        schema: of the model.

    Returns:
        A list of {"name", "datatype", "shape"}.
    """
    described = [{"name": INDEX, "datatype": "INT32", "shape": [-1]}]
    for feature in schema.features:
        if feature.kind is Kind.DENSE:
            described.append({"name": feature.name, "datatype": "FP32", "shape": [-1, feature.width]})
            continue
        described.append({"name": f"{feature.name}.values", "datatype": "INT64", "shape": [-1]})
        if feature.kind is Kind.BAG:
            described.append({"name": f"{feature.name}.lengths", "datatype": "INT32", "shape": [-1]})
        if feature.weighted:
            described.append({"name": f"{feature.name}.weights", "datatype": "FP32", "shape": [-1]})
    if schema.sequences:
        described.append({"name": HISTORY_LENGTHS, "datatype": "INT32", "shape": [-1]})
    return described


def to_tensors(batch: RequestBatch, schema: FeatureSchema) -> dict[str, NDArray[Any]]:
    """A batch as named tensors, for a client to send.

    Args:
        batch: valid for the schema, on the CPU.
        schema: of the model.

    Returns:
        Input name to array.
    """
    arrays: dict[str, NDArray[Any]] = {INDEX: batch.candidate_to_request.numpy()}
    for feature in (*schema.request_bags, *schema.candidate_bags):
        side = batch.features.request if feature.side is Side.REQUEST else batch.features.candidate
        ids = side[feature.name]
        arrays[f"{feature.name}.values"] = ids.values().numpy()
        arrays[f"{feature.name}.lengths"] = ids.lengths().to(torch.int32).numpy()
        if feature.weighted:
            arrays[f"{feature.name}.weights"] = ids.weights().numpy()
    for feature in schema.sequences:
        events = batch.features.history[feature.name]
        arrays[f"{feature.name}.values"] = events.values().numpy()
        arrays[HISTORY_LENGTHS] = events.lengths().to(torch.int32).numpy()
    for features, dense in (
        (schema.request_dense, batch.request_dense),
        (schema.candidate_dense, batch.candidate_dense),
    ):
        column = 0
        for feature in features:
            arrays[feature.name] = dense[:, column : column + feature.width].contiguous().numpy()
            column += feature.width
    return arrays


def from_tensors(
    arrays: Arrays, schema: FeatureSchema, max_candidates: int, max_padded_rows: int = 4 * 1024**2
) -> RequestBatch:
    """A batch from named tensors, every value checked.

    Args:
        arrays: as a client sent them.
        schema: of the model.
        max_candidates: that one call may score.
        max_padded_rows: requests times the longest history, and requests times the most candidates of one: what the
            attention over histories lays out.

    Returns:
        A valid RequestBatch with labels of zero.

    Raises:
        BadRequest: the message names the input, the rule and the way out.
    """
    reader = _Reader(arrays)
    num_requests = _rows_of(reader, schema, Side.REQUEST)
    num_candidates = _rows_of(reader, schema, Side.CANDIDATE)
    index = _index(reader, num_requests, num_candidates)
    num_candidates = index.shape[0]
    if num_requests is None:  # no request-side feature tells R: no candidate's request may lie past the last candidate
        num_requests = min(int(index.max(initial=-1)) + 1, num_candidates)
    if num_candidates > max_candidates:
        raise BadRequest(
            f"the call has {num_candidates} candidates; at most {max_candidates} are allowed: split it", 413
        )
    batch = RequestBatch(
        RequestFeatures(
            _bags(reader, schema.request_bags, num_requests),
            _bags(reader, schema.candidate_bags, num_candidates),
            _history(reader, schema.sequences, num_requests),
            torch.from_numpy(index.astype(np.int32)),
        ),
        _dense(reader, schema.request_dense, num_requests),
        _dense(reader, schema.candidate_dense, num_candidates),
        torch.zeros(num_candidates, len(schema.tasks)),
        torch.ones(num_candidates),
    )
    for what, rows in (
        ("candidates", np.bincount(index[(index >= 0) & (index < num_requests)], minlength=1)),
        ("events", arrays[HISTORY_LENGTHS] if schema.sequences else np.zeros(1)),
    ):
        if num_requests * int(rows.max(initial=0)) > max_padded_rows:
            raise BadRequest(
                f"the call has {num_requests} requests, one of them with {int(rows.max())} {what}; their product may "
                f"be {max_padded_rows} at most: send requests of such different sizes in calls of their own",
                413,
            )
    reader.refuse_unread(schema)
    try:
        batch.validate(schema)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return batch


class _Reader:
    """Takes inputs by name, and knows which were not taken."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self._taken = arrays, set[str]()

    def take(self, name: str, datatype: str, dims: int = 1) -> NDArray[Any]:
        if name not in self.arrays:
            raise BadRequest(f"input {name!r} is missing; send it as {datatype}")
        array = self.arrays[name]
        self._taken.add(name)
        if array.dtype != DTYPES[datatype]:
            raise BadRequest(f"input {name!r} is {datatype_of(array)}; it must be {datatype}")
        if array.ndim != dims:
            raise BadRequest(f"input {name!r} has shape {list(array.shape)}; it must have {dims} dim{'s' * (dims > 1)}")
        return array

    def refuse_unread(self, schema: FeatureSchema) -> None:
        for name in self.arrays:
            if name not in self._taken:
                known = [entry["name"] for entry in describe_inputs(schema)]
                raise BadRequest(f"unknown input {name!r}; {nearest_name(name, known)}")


def _rows_of(reader: _Reader, schema: FeatureSchema, side: Side) -> int | None:
    """Rows of a side, from the first of its inputs that tells; None where none does."""
    for feature in schema.features:
        if feature.side is not side:
            continue
        lengths = HISTORY_LENGTHS if feature.kind is Kind.SEQUENCE else f"{feature.name}.lengths"
        for name in (lengths, feature.name):
            if name in reader.arrays and reader.arrays[name].ndim:
                return reader.arrays[name].shape[0]
    return None


def _index(reader: _Reader, num_requests: int | None, num_candidates: int | None) -> NDArray[Any]:
    if INDEX in reader.arrays:
        index = reader.take(INDEX, "INT32")
        if num_candidates is not None and index.shape[0] != num_candidates:
            raise BadRequest(
                f"{INDEX} has {index.shape[0]} entries, but the candidate features have {num_candidates} rows; one "
                "a candidate"
            )
        return index
    if num_requests not in (None, 1):
        raise BadRequest(f"{INDEX} is missing; it may be left out for one request only, and there are {num_requests}")
    return np.zeros(num_candidates or 0, dtype=np.int32)


def _lengths(reader: _Reader, name: str, rows: int, ids: NDArray[Any]) -> NDArray[Any]:
    lengths = reader.take(name, "INT32")
    if lengths.shape[0] != rows:
        raise BadRequest(f"input {name!r} has {lengths.shape[0]} entries; it must have {rows}, one a row")
    if lengths.size and int(lengths.min()) < 0:
        raise BadRequest(f"input {name!r} holds {int(lengths.min())}; lengths are 0 or more")
    total = int(lengths.sum(dtype=np.int64))
    if total != ids.shape[0]:
        raise BadRequest(f"input {name!r} sums to {total}, but there are {ids.shape[0]} values; they must agree")
    return lengths


def _bags(reader: _Reader, features: tuple[Feature, ...], rows: int) -> KeyedJaggedTensor:
    if not features:
        return empty_kjt(rows)
    weighted = any(feature.weighted for feature in features)
    values, lengths, weights = [], [], []
    for feature in features:
        if feature.name in reader.arrays and f"{feature.name}.values" not in reader.arrays:
            ids = reader.take(feature.name, "INT64")
            if ids.shape[0] != rows:
                raise BadRequest(f"input {feature.name!r} has {ids.shape[0]} ids; it must have {rows}, one a row")
            lengths.append(np.ones(rows, dtype=np.int32))
        else:
            ids = reader.take(f"{feature.name}.values", "INT64")
            lengths.append(_lengths(reader, f"{feature.name}.lengths", rows, ids))
        values.append(ids)
        if feature.weighted:
            weights.append(reader.take(f"{feature.name}.weights", "FP32"))
            if weights[-1].shape != ids.shape or not np.isfinite(weights[-1]).all():
                raise BadRequest(f"input '{feature.name}.weights' must have one finite weight for each id")
        elif weighted:
            weights.append(np.ones(ids.shape, dtype=np.float32))
    return KeyedJaggedTensor(
        keys=[feature.name for feature in features],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
        weights=torch.from_numpy(np.concatenate(weights)) if weighted else None,
        stride=rows,
    )


def _history(reader: _Reader, features: tuple[Feature, ...], rows: int) -> KeyedJaggedTensor:
    if not features:
        return empty_kjt(rows)
    values = [reader.take(f"{feature.name}.values", "INT64") for feature in features]
    lengths = [_lengths(reader, HISTORY_LENGTHS, rows, events) for events in values]
    return KeyedJaggedTensor(
        keys=[feature.name for feature in features],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
        stride=rows,
    )


def _dense(reader: _Reader, features: tuple[Feature, ...], rows: int) -> torch.Tensor:
    columns = []
    for feature in features:
        array = reader.take(feature.name, "FP32", dims=2)
        if array.shape != (rows, feature.width):
            raise BadRequest(
                f"input {feature.name!r} has shape {list(array.shape)}; it must be {[rows, feature.width]}"
            )
        columns.append(array)
    return torch.from_numpy(np.concatenate(columns, axis=1)) if columns else torch.empty(rows, 0)
