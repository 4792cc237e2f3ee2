"""Impression-level Parquet made request-level: what is folded, what is refused, and that an error leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.datasets.parquet_cases import SCHEMA, assert_same, make_requests
from torchrec_adaptive.datasets import RequestParquet, convert_impressions, write_impression_parquet
from torchrec_adaptive.request import Feature, FeatureSchema

BATCH = make_requests((2, 3, 1, 7, 1, 4, 2, 5))
PLAIN = FeatureSchema(
    (
        Feature.bag("user", "request", 50, 8),
        Feature.dense("hour", "request"),
        Feature.bag("item", "candidate", 30, 8),
        Feature.sequence("seen", 30, 8),
    ),
    tasks=("click",),
)
ROWS = {
    "session": ["a", "a", "b", "c", "c", "c"],
    "user": [3, 3, 4, 3, 3, 3],
    "hour": [1, 1, 2, 3, 3, 3],
    "item": [5, 6, 7, 8, 9, 10],
    "seen": [[1, 2], [1, 2], [], [1, 2, 5], [1, 2, 5], [1, 2, 5]],
    "label_click": [True, False, True, False, False, True],
}


def read_all(path: Path, schema: FeatureSchema):
    return RequestParquet(path, schema, 1000, shuffle=False).batch(0, 0)


@pytest.mark.parametrize("rows_a_read", [1, 3, 8192])
@pytest.mark.parametrize("row_group", [1, 2, 100])
def test_a_log_is_folded(tmp_path, rows_a_read: int, row_group: int) -> None:
    source, target = tmp_path / "impressions.parquet", tmp_path / "requests.parquet"
    write_impression_parquet([BATCH], SCHEMA, source, requests_a_row_group=row_group)
    report = convert_impressions(source, target, SCHEMA, rows_a_read=rows_a_read)
    assert_same(read_all(target, SCHEMA), BATCH)
    assert (report.num_requests, report.num_impressions) == (8, 25)
    assert (report.bytes_before, report.bytes_after) == (source.stat().st_size, target.stat().st_size)
    assert report.storage_ratio == report.bytes_before / report.bytes_after


def test_a_shuffled_table_is_grouped_first(tmp_path) -> None:
    source, target = tmp_path / "impressions.parquet", tmp_path / "requests.parquet"
    write_impression_parquet([BATCH], SCHEMA, source)
    table = pq.read_table(source)
    order = np.random.default_rng(0).permutation(table.num_rows)
    pq.write_table(table.take(order), source)
    with pytest.raises(ValueError, match="give is_grouped=False, or sort"):
        convert_impressions(source, target, SCHEMA)
    assert not target.exists()
    convert_impressions(source, target, SCHEMA, is_grouped=False, rows_a_read=4)
    batch = read_all(target, SCHEMA)
    own, wanted = (
        [part.tolist() for part in b.candidate_dense.split(np.bincount(b.candidate_to_request).tolist())]
        for b in (batch, BATCH)
    )
    assert [sorted(part) for part in own] == [sorted(part) for part in wanted]
    assert batch.features.history.values().tolist() == BATCH.features.history.values().tolist()


def test_a_log_of_someone_else(tmp_path) -> None:
    """Plain integers for bags, booleans for labels, no weights, a key and columns of its own, two files."""
    table = pa.table(ROWS | {"logged_at": [0] * 6})
    pq.write_table(table.slice(0, 4), tmp_path / "1.parquet")
    pq.write_table(table.slice(4), tmp_path / "2.parquet")
    target = tmp_path / "requests.parquet"
    report = convert_impressions(
        [tmp_path / "1.parquet", tmp_path / "2.parquet"], target, PLAIN, "session", ignored_columns=["logged_at"]
    )
    assert report.num_requests == 3
    batch = read_all(target, PLAIN)
    assert batch.candidate_to_request.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.features.candidate["item"].values().tolist() == ROWS["item"]
    assert batch.features.history["seen"].values().tolist() == [1, 2, 1, 2, 5]
    assert batch.labels[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert batch.weights.tolist() == [1.0] * 6
    assert pq.read_table(target).column("request_id").to_pylist() == ["a", "b", "c"]


def _with(name: str, values: list) -> Callable[[dict], dict]:
    return lambda rows: rows | {name: values}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_with("user", [3, 4, 4, 3, 3, 3]), "'user' differs within request 'a'; make it a candidate feature"),
        (_with("hour", [1, 1, 2, 3, 3, 4]), "'hour' differs within request 'c'"),
        (_with("seen", [[1, 2], [1, 3], [], [], [], []]), "'seen' differs within request 'a'"),
        (_with("session", ["a", "a", "b", "a", "c", "c"]), "request 'a' comes back after other requests"),
        (_with("session", ["a", "a", None, "c", "c", "c"]), "'session' holds 1 nulls, the first as value 2"),
        (_with("session", [0.5] * 6), "'session' has the type double; request ids must be integers or strings"),
        (_with("item", [5, 6, 7, 8, 9, 30]), "item.*30"),
        (_with("item", [5, None, 7, 8, 9, 3]), "'item' holds 1 nulls"),
        (_with("item", ["x"] * 6), "'item' has the type string; it must hold integer ids"),
        (_with("hour", ["1"] * 6), "'hour' holds values of the type string; they must be numbers"),
        (_with("hour", [[1.0, 2.0]] * 6), "'hour' has 2 values in row 0; its width is 1"),
        (_with("logged", [0] * 6), "unknown column 'logged' in log.parquet"),
        (lambda rows: {k: v for k, v in rows.items() if k != "item"}, "column 'item' is missing from log.parquet"),
        (lambda rows: {k: v for k, v in rows.items() if k != "label_click"}, "column 'label_click' is missing"),
    ],
)
def test_a_wrong_log_is_refused_and_leaves_nothing(tmp_path, change, sentence: str) -> None:
    source, target = tmp_path / "log.parquet", tmp_path / "requests.parquet"
    pq.write_table(pa.table(change(ROWS)), source)
    with pytest.raises(ValueError, match=sentence):
        convert_impressions(source, target, PLAIN, "session")
    assert list(tmp_path.iterdir()) == [source]


def test_wrong_arguments(tmp_path) -> None:
    source = tmp_path / "log.parquet"
    pq.write_table(pa.table(ROWS), source)
    for arguments, sentence in (
        (([], tmp_path / "x"), "source_paths is empty"),
        ((source, source), "is one of the sources"),
        (([source, source], tmp_path / "x"), "has a file twice"),
        ((source, tmp_path / "no" / "x"), "does not exist"),
    ):
        with pytest.raises(ValueError, match=sentence):
            convert_impressions(*arguments, PLAIN, "session")
    for name in ("rows_a_read", "requests_a_row_group"):
        with pytest.raises(ValueError, match=f"{name}=0 must be 1 or more"):
            convert_impressions(source, tmp_path / "x", PLAIN, "session", **{name: 0})
