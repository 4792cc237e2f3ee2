"""Impression rows folded into requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.request.batch import RequestBatch
from torchrec_adaptive.request.features import RequestFeatures, empty_kjt
from torchrec_adaptive.request.schema import Feature, FeatureSchema, Kind, Side, nearest_name

Row = Mapping[str, Any]


def batch_from_rows(schema: FeatureSchema, rows: Sequence[Row], request_key: str = "request_id") -> RequestBatch:
    """Fold impression rows into a batch: consecutive rows of one request become one request.

    A row maps each feature's name to its value: an id or a list of ids (a bag or a sequence), a pair
    (ids, weights) for a weighted bag, a float or a list of floats (dense). `"labels"` maps tasks to floats, 0.0 where
    absent; `"weight"` is the weight in the loss, 1.0 where absent.

    Args:
        schema: what to read.
        rows: impressions; those of one request stand together.
        request_key: the column that tells requests apart.

    Returns:
        RequestBatch on the CPU, validated.

    Raises:
        ValueError: a feature is missing, unknown or malformed, or a request-side feature differs within a request
            (the message names the feature and the request).

    Example:
        >>> schema = FeatureSchema((Feature.bag("user", "request", 9, 4), Feature.bag("item", "candidate", 9, 4)))
        >>> rows = [{"request_id": "a", "user": 1, "item": 5}, {"request_id": "a", "user": 1, "item": 6}]
        >>> batch = batch_from_rows(schema, rows)
        >>> batch.num_requests, batch.num_candidates, batch.features.request["user"].values().tolist()
        (1, 2, [1])
    """
    known = [f.name for f in schema.features]
    request_features = [f for f in schema.features if f.side is Side.REQUEST]
    request_rows: list[Row] = []
    index: list[int] = []
    previous: Hashable = object()
    for row in rows:
        if request_key not in row:
            raise ValueError(f"a row has no {request_key!r}; every impression names its request")
        for name in row:
            if name not in known and name not in (request_key, "labels", "weight"):
                raise ValueError(f"unknown feature {name!r} in a row; {nearest_name(name, known)}")
        if not request_rows or row[request_key] != previous:
            previous = row[request_key]
            request_rows.append(row)
        first = request_rows[-1]
        for feature in request_features:
            if row is not first and _ids_and_weights(feature, row) != _ids_and_weights(feature, first):
                raise ValueError(
                    f"request-side feature {feature.name!r} differs within request {previous!r}: "
                    f"{first[feature.name]!r} and {row[feature.name]!r}; make it a candidate feature"
                )
        index.append(len(request_rows) - 1)
    batch = RequestBatch(
        RequestFeatures(
            _kjt(schema.request_bags, request_rows),
            _kjt(schema.candidate_bags, rows),
            _kjt(schema.sequences, request_rows),
            torch.tensor(index, dtype=torch.int32),
        ),
        _dense(schema.request_dense, request_rows),
        _dense(schema.candidate_dense, rows),
        _labels(schema, rows),
        torch.tensor([float(row.get("weight", 1.0)) for row in rows], dtype=torch.float32),
    )
    batch.validate(schema)
    return batch


def _ids_and_weights(feature: Feature, row: Row) -> tuple[list[Any], list[float] | None]:
    """The row's values as a list, and the weights where the feature has them."""
    if feature.name not in row:
        raise ValueError(f"feature {feature.name!r} is missing from a row; give its value, [] for an empty bag")
    value = row[feature.name]
    weights = None
    if feature.weighted:
        if not (isinstance(value, tuple) and len(value) == 2 and len(value[0]) == len(value[1])):
            raise ValueError(f"weighted feature {feature.name!r} is {value!r}; give (ids, weights) of equal length")
        value, weights = value[0], [float(w) for w in value[1]]
    values = list(value) if isinstance(value, (list, tuple)) or hasattr(value, "__array__") else [value]
    wanted = (int, float) if feature.kind is Kind.DENSE else (int,)
    for item in values:
        if isinstance(item, bool) or (not isinstance(item, wanted) and not hasattr(item, "__index__")):
            raise ValueError(
                f"feature {feature.name!r} holds {item!r}; give {' or '.join(t.__name__ for t in wanted)}s"
            )
    return values, weights


def _kjt(specs: tuple[Feature, ...], rows: Sequence[Row]) -> KeyedJaggedTensor:
    """One key a feature; where some features are weighted, ids of the others weigh 1."""
    if not specs:
        return empty_kjt(len(rows))
    weighted = any(spec.weighted for spec in specs)
    values: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    for spec in specs:
        for row in rows:
            ids, row_weights = _ids_and_weights(spec, row)
            values += ids
            weights += row_weights if row_weights is not None else [1.0] * len(ids)
            lengths.append(len(ids))
    return KeyedJaggedTensor(
        keys=[spec.name for spec in specs],
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=torch.tensor(weights, dtype=torch.float32) if weighted else None,
        stride=len(rows),
    )


def _dense(specs: tuple[Feature, ...], rows: Sequence[Row]) -> torch.Tensor:
    columns = []
    for spec in specs:
        column = [_ids_and_weights(spec, row)[0] for row in rows]
        if wrong := [values for values in column if len(values) != spec.width]:
            raise ValueError(f"dense feature {spec.name!r} holds {wrong[0]!r}; its width is {spec.width}")
        columns.append(torch.tensor(column, dtype=torch.float32).view(len(rows), spec.width))
    return torch.cat(columns, dim=1) if columns else torch.empty(len(rows), 0)


def _labels(schema: FeatureSchema, rows: Sequence[Row]) -> torch.Tensor:
    for row in rows:
        for task in row.get("labels", {}):
            if task not in schema.tasks:
                raise ValueError(f"unknown task {task!r} in a row's labels; {nearest_name(task, schema.tasks)}")
    values = [[float(row.get("labels", {}).get(task, 0.0)) for task in schema.tasks] for row in rows]
    return torch.tensor(values, dtype=torch.float32).view(len(rows), len(schema.tasks))
