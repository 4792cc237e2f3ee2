"""The two layouts of a Parquet file of requests: their columns, and what the file says of its schema.

For a schema with the bags `user` (request) and `tags` (candidate, weighted), the history `seen`, the dense features
`hour` (request) and `size` (candidate, width 2) and the task `click`:

| column | impression layout, one row a candidate | request layout, one row a request |
| --- | --- | --- |
| request_id | int64 or string | int64 or string |
| user | list<int64> | list<int64> |
| seen | list<int64> | list<int64> |
| hour | float | float |
| tags | list<int64> | list<list<int64>> |
| tags_weights | list<float> | list<list<float>> |
| size | fixed_size_list<float, 2> | list<fixed_size_list<float, 2>> |
| label_click | float | list<float> |
| weight | float | list<float> |

The outer lists of the request layout have one entry a candidate. Nothing is null.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchrec_adaptive.datasets.arrow import pa, pq
from torchrec_adaptive.request import Feature, FeatureSchema, Kind, Side, nearest_name

Layout = Literal["impression", "request"]
PathLike = str | os.PathLike[str]

REQUEST_ID, WEIGHT = "request_id", "weight"
_LAYOUT_KEY = b"torchrec_adaptive.layout"
_SCHEMA_KEY = b"torchrec_adaptive.schema"
_FINGERPRINT_KEY = b"torchrec_adaptive.schema_fingerprint"
# What says nothing about the values of a file: those may change between writing and training.
_OF_THE_MODEL = ("embedding_dim", "table", "pooling")


def paths_of(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """One path or several, as a list."""
    if isinstance(paths, str | os.PathLike):
        return [Path(paths)]
    return [Path(path) for path in paths]


def weights_column(feature: Feature) -> str:
    """Name of the column with the weights of a weighted bag's ids."""
    return f"{feature.name}_weights"


def label_column(task: str) -> str:
    """Name of the column with a task's labels."""
    return f"label_{task}"


def columns_of(schema: FeatureSchema) -> dict[str, Side]:
    """All columns but the request's id, in the order of the file, each with the side that it belongs to.

    Args:
        schema: of the requests.

    Raises:
        ValueError: two columns would have one name.

    Example:
        >>> schema = FeatureSchema((Feature.bag("user", "request", 9, 4), Feature.bag("item", "candidate", 9, 4)))
        >>> list(columns_of(schema))
        ['user', 'item', 'label_label', 'weight']
    """
    named: list[tuple[str, Side]] = []
    for side in Side:
        for feature in schema.features:
            if feature.side is side:
                named.append((feature.name, side))
                if feature.weighted:
                    named.append((weights_column(feature), side))
    named += [(label_column(task), Side.CANDIDATE) for task in schema.tasks]
    named.append((WEIGHT, Side.CANDIDATE))
    seen = {REQUEST_ID}
    for name, _ in named:
        if name in seen:
            raise ValueError(
                f"two columns of the file would be named {name!r}; {REQUEST_ID!r}, {WEIGHT!r}, label_<task> and "
                "<weighted bag>_weights are taken: rename the feature"
            )
        seen.add(name)
    return dict(named)


def check_columns(names: Sequence[str], schema: FeatureSchema, where: str, request_key: str = REQUEST_ID) -> None:
    """Refuse a file whose columns are not those of the schema.

    Args:
        names: the file's columns that are to be read.
        schema: what they should be; the column `weight` may be absent.
        where: the file's name, for the message.
        request_key: the column that tells requests apart.

    Raises:
        ValueError: a column is missing or unknown; the message has the nearest name.
    """
    wanted = [request_key, *columns_of(schema)]
    for name in names:
        if name not in wanted:
            raise ValueError(
                f"unknown column {name!r} in {where} ({nearest_name(name, wanted)}); every column is read: leave out "
                "the others, or name them in ignored_columns"
            )
    for name in wanted:
        if name not in names and name != WEIGHT:
            raise ValueError(
                f"column {name!r} is missing from {where} ({nearest_name(name, names)}); every "
                f"feature and task has a column: write it, or leave the feature out of the schema"
            )


def arrow_schema(schema: FeatureSchema, layout: Layout, id_type: pa.DataType) -> pa.Schema:
    """The Arrow schema of a file, with the feature schema in its metadata.

    Args:
        schema: of the requests.
        layout: of the file.
        id_type: of the request ids.
    """
    types: dict[str, pa.DataType] = {label_column(task): pa.float32() for task in schema.tasks}
    types[WEIGHT] = pa.float32()
    for feature in schema.features:
        if feature.kind is Kind.DENSE:
            types[feature.name] = pa.float32() if feature.width == 1 else _of(pa.float32(), feature.width)
        else:
            types[feature.name] = _of(pa.int64())
        if feature.weighted:
            types[weights_column(feature)] = _of(pa.float32())
    columns = [pa.field(REQUEST_ID, id_type, nullable=False)]
    for name, side in columns_of(schema).items():
        is_listed = layout == "request" and side is Side.CANDIDATE
        columns.append(pa.field(name, _of(types[name]) if is_listed else types[name], nullable=False))
    metadata = {
        _LAYOUT_KEY: layout.encode(),
        _SCHEMA_KEY: json.dumps(schema.to_dict()).encode(),
        _FINGERPRINT_KEY: schema.fingerprint.encode(),
    }
    return pa.schema(columns, metadata=metadata)


def _of(element: pa.DataType, size: int = -1) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False), size)


def read_parquet_schema(path: PathLike) -> FeatureSchema:
    """The feature schema that a file was written with.

    Args:
        path: a file of either layout, written by this package.

    Raises:
        ValueError: the file names no schema, or one that is damaged.
    """
    schema = _stored_schema(pq.read_schema(path).metadata or {}, str(path))
    if schema is None:
        raise ValueError(f"{path} names no feature schema; it was not written by torchrec_adaptive: convert it first")
    return schema


def check_file(arrow: pa.Schema, schema: FeatureSchema, layout: Layout, path: PathLike) -> None:
    """Refuse a file of another layout or of another schema.

    Embedding dims, tables and poolings may differ: they are the model's, and no value of a file depends on them.

    Args:
        arrow: the file's.
        schema: what it is to be read with.
        layout: what it is to be read as.
        path: for the message.

    Raises:
        ValueError: another layout, or the first difference of the schemas.
    """
    metadata = arrow.metadata or {}
    found = metadata.get(_LAYOUT_KEY, b"none").decode(errors="replace")
    if found != layout:
        way = {
            "request": "write it with write_request_parquet or convert_impressions",
            "impression": "write it with write_impression_parquet",
        }[layout]
        raise ValueError(f"{path} has the layout {found!r}; it must be {layout!r}: {way}")
    check_same_schema(arrow, schema, path)


def check_same_schema(arrow: pa.Schema, schema: FeatureSchema, path: PathLike) -> None:
    """Refuse a file that names another schema; one that names none passes.

    Args:
        arrow: the file's.
        schema: what it is to be read with.
        path: for the message.

    Raises:
        ValueError: the first difference of the schemas.
    """
    stored = _stored_schema(arrow.metadata or {}, str(path))
    if stored is None or stored.fingerprint == schema.fingerprint:
        return
    way_out = "read it with read_parquet_schema(path), or write the file again"
    if sorted(stored.tasks) != sorted(schema.tasks):
        raise ValueError(
            f"{Path(path).name} has the tasks {stored.tasks} and the schema given {schema.tasks}; they must be equal: "
            + way_out
        )
    names = [feature.name for feature in stored.features]
    given = {feature.name: _values_of(feature) for feature in schema.features}
    for feature in stored.features:
        if feature.name not in given:
            raise ValueError(
                f"feature {feature.name!r} of {Path(path).name} is not in the schema given "
                f"({nearest_name(feature.name, list(given))}); the schemas must be equal: {way_out}"
            )
        for key, value in _values_of(feature).items():
            if given[feature.name][key] != value:
                raise ValueError(
                    f"feature {feature.name!r} has {key}={value!r} in {Path(path).name} and "
                    f"{key}={given[feature.name][key]!r} in the schema given; they must be equal: {way_out}"
                )
    for name in given:
        if name not in names:
            raise ValueError(
                f"feature {name!r} of the schema given is not in {Path(path).name} ({nearest_name(name, names)}); the "
                f"schemas must be equal: {way_out}"
            )


def _values_of(feature: Feature) -> dict[str, Any]:
    (entry,) = FeatureSchema((feature,)).to_dict()["features"]
    return {key: value for key, value in entry.items() if key not in _OF_THE_MODEL}


def _stored_schema(metadata: dict[bytes, bytes], path: str) -> FeatureSchema | None:
    if _SCHEMA_KEY not in metadata:
        return None
    try:
        entries = json.loads(metadata[_SCHEMA_KEY])
        schema = FeatureSchema.from_dict(entries)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the feature schema in {path} is damaged ({error}); write the file again") from None
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    if digest.encode() != metadata.get(_FINGERPRINT_KEY):
        raise ValueError(f"the feature schema in {path} does not match its fingerprint; write the file again")
    return schema
