import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.request import Broadcast, Feature, FeatureSchema, RequestBatch, batch_from_rows

SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 100, 8),
        Feature.bag("tags", "request", 30, 8),
        Feature.bag("item", "candidate", 50, 8, table="items"),
        Feature.sequence("seen", 50, 8, table="items", max_length=4),
        Feature.sequence("action", 3, 8),
        Feature.dense("hour", "request", 2),
        Feature.dense("price", "candidate"),
    )
)
IDS = st.lists(st.integers(0, 29), max_size=4)


@st.composite
def requests_of_rows(draw) -> list[dict]:
    rows = []
    for number in range(draw(st.integers(0, 4))):
        events = draw(st.integers(0, 4))
        shared = {
            "request_id": number,
            "user": draw(st.integers(0, 99)),
            "tags": draw(IDS),
            "seen": draw(st.lists(st.integers(0, 49), min_size=events, max_size=events)),
            "action": [1] * events,
            "hour": [0.5, float(number)],
        }
        for _ in range(draw(st.integers(1, 4))):
            rows.append(shared | {"item": draw(IDS), "price": 1.5, "labels": {"label": draw(st.integers(0, 1))}})
    return rows


def impressions(rows: list[dict]) -> Batch:
    """The same rows as TorchRec's own batch, built with no code of the package's."""
    names = ["user", "tags", "item"]
    bags = [row[name] if isinstance(row[name], list) else [row[name]] for name in names for row in rows]
    return Batch(
        torch.tensor([[*row["hour"], row["price"]] for row in rows], dtype=torch.float32).view(len(rows), 3),
        KeyedJaggedTensor(
            keys=names,
            values=torch.tensor([i for bag in bags for i in bag], dtype=torch.int64),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
            stride=len(rows),
        ),
        torch.tensor([float(row["labels"]["label"]) for row in rows]),
    )


@settings(max_examples=50, deadline=None)
@given(requests_of_rows())
def test_folding_and_expanding_give_torchrecs_batch_bit_for_bit(rows: list[dict]) -> None:
    batch = batch_from_rows(SCHEMA, rows)
    assert batch.num_requests == len({row["request_id"] for row in rows})
    assert batch.num_candidates == len(rows)
    got, wanted = batch.to_impressions(), impressions(rows)
    assert torch.equal(got.dense_features, wanted.dense_features)
    assert torch.equal(got.labels, wanted.labels)
    assert got.sparse_features.keys() == wanted.sparse_features.keys()
    assert got.sparse_features.stride() == wanted.sparse_features.stride()
    assert torch.equal(got.sparse_features.values(), wanted.sparse_features.values())
    assert torch.equal(got.sparse_features.lengths(), wanted.sparse_features.lengths())


def two_requests() -> list[dict]:
    one = {"request_id": "a", "user": 1, "tags": [2, 3], "seen": [5], "action": [1], "hour": [1.0, 2.0]}
    two = one | {"request_id": "b", "user": 2}
    return [
        one | {"item": [4], "price": 1.0, "labels": {"label": 1.0}},
        one | {"item": [6], "price": 2.0},
        two | {"item": [4], "price": 3.0, "weight": 0.5},
    ]


def test_labels_weights_and_index() -> None:
    batch = batch_from_rows(SCHEMA, two_requests())
    assert batch.candidate_to_request.tolist() == [0, 0, 1]
    assert batch.candidate_to_request.dtype == torch.int32
    assert batch.labels.tolist() == [[1.0], [0.0], [0.0]]
    assert batch.weights.tolist() == [1.0, 1.0, 0.5]
    assert batch.features.history["seen"].lengths().tolist() == [1, 1]


def test_to_moves_every_tensor() -> None:
    batch = batch_from_rows(SCHEMA, two_requests()).to(torch.device("meta"))
    features = batch.features
    parts = [features.request.values(), features.candidate.lengths(), features.history.values()]
    parts += [batch.candidate_to_request, batch.request_dense, batch.candidate_dense, batch.labels, batch.weights]
    assert {part.device.type for part in parts} == {"meta"}


def test_weighted_bags_fold_and_expand() -> None:
    schema = FeatureSchema(
        (Feature.bag("user", "request", 9, 4), Feature.bag("item", "candidate", 9, 4, weighted=True))
    )
    rows = [{"request_id": 0, "user": 3, "item": ([1, 2], [0.5, 2.0])}, {"request_id": 0, "user": 3, "item": ([], [])}]
    sparse = batch_from_rows(schema, rows).features.expand()
    assert sparse["item"].weights().tolist() == [0.5, 2.0]
    assert sparse["user"].weights().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"user": 7}, "'user' differs within request 'a'"),
        ({"hour": [1.0, 9.0]}, "'hour' differs within request 'a'"),
        ({"itme": 3}, "did you mean 'item'"),
        ({"price": [1.0, 2.0]}, "its width is 1"),
        ({"item": [50]}, "holds the id 50; its table has 50 rows"),
        ({"item": [-1]}, "holds the id -1"),
        ({"item": [1.5]}, "holds 1.5"),
        ({"item": [True]}, "holds True"),
        ({"price": float("nan")}, "NaN or infinity"),
        ({"labels": {"lable": 1.0}}, "did you mean 'label'"),
    ],
)
def test_a_wrong_row_is_refused_with_its_name(change: dict, sentence: str) -> None:
    rows = two_requests()
    rows[1] = rows[1] | change
    with pytest.raises(ValueError, match=sentence):
        batch_from_rows(SCHEMA, rows)


@pytest.mark.parametrize("missing", ["request_id", "user", "item", "seen", "price"])
def test_a_missing_value_is_refused(missing: str) -> None:
    rows = two_requests()
    del rows[0][missing]
    with pytest.raises(ValueError, match=f"'{missing}'"):
        batch_from_rows(SCHEMA, rows)


def with_index(batch: RequestBatch, index: torch.Tensor) -> RequestBatch:
    return dataclasses.replace(batch, features=dataclasses.replace(batch.features, candidate_to_request=index))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (torch.tensor([1, 0, 1], dtype=torch.int32), "falls from 1 to 0 at position 1"),
        (torch.tensor([0, 0, 2], dtype=torch.int32), "holds 2, but there are 2 requests"),
        (torch.tensor([-1, 0, 1], dtype=torch.int32), "holds -1"),
        (torch.tensor([0, 0, 1]), "of int32"),
    ],
)
def test_a_wrong_index_is_refused(index: torch.Tensor, sentence: str) -> None:
    batch = with_index(batch_from_rows(SCHEMA, two_requests()), index)
    with pytest.raises(ValueError, match=sentence):
        batch.validate(SCHEMA)


def test_history_columns_must_agree_and_stay_within_bounds() -> None:
    rows = [row | {"action": [1, 1]} for row in two_requests()]
    with pytest.raises(ValueError, match="'seen' and 'action' have different lengths"):
        batch_from_rows(SCHEMA, rows)
    rows = [row | {"action": [1] * 5, "seen": [1] * 5} for row in two_requests()]
    with pytest.raises(ValueError, match="'seen' has 5 ids in one row; its max_length is 4"):
        batch_from_rows(SCHEMA, rows)


def test_a_request_without_candidates_is_legal() -> None:
    batch = batch_from_rows(SCHEMA, two_requests())
    batch = with_index(batch, torch.tensor([1, 1, 1], dtype=torch.int32))
    batch.validate(SCHEMA)
    assert batch.features.expand()["user"].values().tolist() == [2, 2, 2]


def test_broadcast_is_materialised_only_when_asked() -> None:
    shared = Broadcast(torch.arange(6.0).view(3, 2), torch.tensor([0, 2, 2], dtype=torch.int32))
    assert shared.shape == (3, 2)
    assert torch.equal(shared.expand(), torch.tensor([[0.0, 1.0], [4.0, 5.0], [4.0, 5.0]]))
    assert shared.map(lambda rows: rows * 2).values.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    with pytest.raises(ValueError, match="turned 3 rows into 2"):
        shared.map(lambda rows: rows[:2])
