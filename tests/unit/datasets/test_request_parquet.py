"""Requests written to Parquet and read back: nothing changes, in any layout, order, split or epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.datasets.parquet_cases import SCHEMA, assert_same, make_requests
from torchrec_adaptive.datasets import (
    ImpressionParquet,
    RequestParquet,
    read_parquet_schema,
    take_requests,
    to_single_impressions,
    write_impression_parquet,
    write_request_parquet,
)
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, RequestFeatures, concat_batches, expand_kjt

BATCH = make_requests((2, 3, 1, 7, 1, 4, 2, 5, 1, 1, 6))


def whole(source: RequestParquet | ImpressionParquet, epoch: int = 0, world_size: int = 1) -> list:
    return [
        source.batch(epoch, step, rank, world_size)
        for step in range(source.num_steps(epoch))
        for rank in range(world_size)
    ]


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    group=st.integers(1, 5),
    step=st.integers(1, 4),
    cut=st.integers(0, 9),
)
def test_what_is_written_is_read(tmp_path_factory, counts: list[int], group: int, step: int, cut: int) -> None:
    path = tmp_path_factory.mktemp("requests") / "requests.parquet"
    batch = make_requests(tuple(counts), seed=cut)
    numbers = torch.arange(len(counts))
    parts = [take_requests(batch, part) for part in (numbers[:cut], numbers[cut:])]
    write_request_parquet(parts, SCHEMA, path, requests_a_row_group=group)
    assert_same(concat_batches(whole(RequestParquet(path, SCHEMA, step, shuffle=False))), batch)
    assert read_parquet_schema(path) == SCHEMA


def test_requests_without_candidates_are_kept(tmp_path) -> None:
    batch = _without(make_requests((2, 3, 1)), 1)
    write_request_parquet([batch], SCHEMA, tmp_path / "r.parquet")
    assert_same(RequestParquet(tmp_path / "r.parquet", SCHEMA, 8, shuffle=False).batch(0, 0), batch)
    write_impression_parquet([batch], SCHEMA, tmp_path / "i.parquet")
    assert_same(
        ImpressionParquet(tmp_path / "i.parquet", SCHEMA, 8, shuffle=False).batch(0, 0), to_single_impressions(batch)
    )


def _without(batch: RequestBatch, request: int) -> RequestBatch:
    """The batch with no candidate in one request."""
    kept = torch.nonzero(batch.candidate_to_request != request).squeeze(1)
    features = RequestFeatures(
        batch.features.request,
        expand_kjt(batch.features.candidate, kept),
        batch.features.history,
        batch.candidate_to_request[kept],
    )
    return RequestBatch(
        features, batch.request_dense, batch.candidate_dense[kept], batch.labels[kept], batch.weights[kept]
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_has_every_request_once_in_an_order_of_its_own(tmp_path, world_size: int) -> None:
    path = tmp_path / "requests.parquet"
    write_request_parquet([BATCH], SCHEMA, path, requests_a_row_group=4)
    source = RequestParquet(path, SCHEMA, requests_a_step=3, seed=5)
    epochs = [concat_batches(whole(source, epoch, world_size)) for epoch in (0, 1)]
    wanted = Counter(BATCH.candidate_dense[:, 1].tolist())
    assert all(Counter(epoch.candidate_dense[:, 1].tolist()) == wanted for epoch in epochs)
    assert epochs[0].candidate_dense.tolist() != epochs[1].candidate_dense.tolist()
    again = RequestParquet(path, SCHEMA, requests_a_step=3, seed=5, num_cached_row_groups=1)
    assert_same(again.batch(1, 2, 0, world_size), source.batch(1, 2, 0, world_size))


def test_both_layouts_give_the_same_candidates_step_by_step(tmp_path) -> None:
    paths = [tmp_path / "requests.parquet", tmp_path / "impressions.parquet"]
    write_request_parquet([BATCH], SCHEMA, paths[0], requests_a_row_group=4)
    write_impression_parquet([BATCH], SCHEMA, paths[1], requests_a_row_group=4)
    requests, impressions = RequestParquet(paths[0], SCHEMA, 3), ImpressionParquet(paths[1], SCHEMA, 3)
    for step in range(requests.num_steps()):
        for rank in range(2):
            one, other = (source.batch(1, step, rank, 2) for source in (requests, impressions))
            assert_same(to_single_impressions(one), other)


def test_several_files_and_another_model(tmp_path) -> None:
    """Files are read one after the other; what is the model's own (dims, tables, pooling) may change later."""
    paths = [tmp_path / f"{number}.parquet" for number in range(2)]
    for path, chosen in zip(paths, torch.arange(BATCH.num_requests).split(6), strict=True):
        write_request_parquet([take_requests(BATCH, chosen)], SCHEMA, path)
    other = FeatureSchema(
        tuple(
            Feature.bag("user", "request", 50, 16, max_length=4) if feature.name == "user" else feature
            for feature in SCHEMA.features
        ),
        SCHEMA.tasks,
    )
    assert_same(concat_batches(whole(RequestParquet(paths, other, 4, shuffle=False))), BATCH)


def test_ids_are_written(tmp_path) -> None:
    path = tmp_path / "requests.parquet"
    names = [f"request {number}" for number in range(BATCH.num_requests)]
    write_request_parquet([BATCH], SCHEMA, path, names)
    assert pq.read_table(path).column("request_id").to_pylist() == names


@pytest.mark.parametrize("ids", [[1, 2], range(100), [1, "b"] + [2] * 9])
def test_wrong_ids_leave_no_file(tmp_path, ids) -> None:
    with pytest.raises(ValueError, match="request_ids"):
        write_request_parquet([BATCH], SCHEMA, tmp_path / "requests.parquet", ids)
    assert not list(tmp_path.iterdir())


def test_a_batch_that_breaks_leaves_the_file_before(tmp_path) -> None:
    path = tmp_path / "requests.parquet"
    write_request_parquet([BATCH], SCHEMA, path)
    before = path.read_bytes()

    def broken():
        yield BATCH
        wrong = make_requests((2,))
        wrong.features.candidate.values()[0] = 30
        yield wrong

    with pytest.raises(ValueError, match=r"item.*30"):
        write_request_parquet(broken(), SCHEMA, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _changed(feature: Feature) -> FeatureSchema:
    features = tuple(feature if feature.name == other.name else other for other in SCHEMA.features)
    return FeatureSchema(features, SCHEMA.tasks)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (
            _changed(Feature.bag("user", "request", 60, 8, max_length=4)),
            "'user' has num_embeddings=50 in .* and num_emb",
        ),
        (FeatureSchema(SCHEMA.features, ("click",)), "has the tasks"),
        (FeatureSchema(SCHEMA.features[1:], SCHEMA.tasks), "'user' of requests.parquet is not in the schema given"),
        (
            FeatureSchema((*SCHEMA.features, Feature.bag("users", "request", 5, 8)), SCHEMA.tasks),
            "'users' of the schema given is not in",
        ),
    ],
)
def test_another_schema_is_refused(tmp_path, schema: FeatureSchema, sentence: str) -> None:
    path = tmp_path / "requests.parquet"
    write_request_parquet([BATCH], SCHEMA, path)
    with pytest.raises(ValueError, match=sentence):
        RequestParquet(path, schema, 3)


def test_another_layout_and_no_requests_are_refused(tmp_path) -> None:
    path = Path(tmp_path / "impressions.parquet")
    write_impression_parquet([BATCH], SCHEMA, path)
    with pytest.raises(ValueError, match="has the layout 'impression'; it must be 'request'"):
        RequestParquet(path, SCHEMA, 3)
    write_request_parquet([], SCHEMA, tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="hold no requests"):
        RequestParquet(tmp_path / "none.parquet", SCHEMA, 3)
    write_request_parquet([BATCH], SCHEMA, tmp_path / "requests.parquet")
    source = RequestParquet(tmp_path / "requests.parquet", SCHEMA, 3)
    with pytest.raises(ValueError, match="step=4 is not in an epoch of 4 steps"):
        source.batch(0, 4)
    with pytest.raises(ValueError, match="rank=2"):
        source.batch(0, 0, 2, 2)
