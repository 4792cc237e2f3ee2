import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, batch_from_rows, concat_batches

SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 100, 8),
        Feature.bag("tags", "request", 30, 8),
        Feature.bag("item", "candidate", 50, 8, table="items"),
        Feature.bag("words", "candidate", 40, 8, weighted=True),
        Feature.sequence("seen", 50, 8, table="items", max_length=4),
        Feature.sequence("action", 3, 8),
        Feature.dense("hour", "request", 2),
        Feature.dense("price", "candidate"),
    ),
    tasks=("click", "buy"),
)
SMALL = FeatureSchema((Feature.bag("user", "request", 9, 4), Feature.bag("item", "candidate", 9, 4)))
IDS = st.lists(st.integers(0, 29), max_size=3)


@st.composite
def groups_of_rows(draw) -> list[list[dict]]:
    """Rows of several batches; request ids differ everywhere."""
    groups, number = [], 0
    for _ in range(draw(st.integers(1, 4))):
        rows = []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            events = draw(st.integers(0, 4))
            shared = {
                "request_id": number,
                "user": draw(st.integers(0, 99)),
                "tags": draw(IDS),
                "seen": draw(st.lists(st.integers(0, 49), min_size=events, max_size=events)),
                "action": [1] * events,
                "hour": [0.5, float(number)],
            }
            for _ in range(draw(st.integers(1, 3))):
                words = draw(IDS)
                rows.append(
                    shared
                    | {
                        "item": draw(IDS),
                        "words": (words, [0.5 + word for word in words]),
                        "price": draw(st.floats(0, 9, width=32)),
                        "labels": {"buy": draw(st.integers(0, 1))},
                        "weight": draw(st.floats(0, 2, width=32)),
                    }
                )
        groups.append(rows)
    return groups


def reverse_keys(part: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return part.permute(list(reversed(range(len(part.keys())))))


def with_keys_reversed(batch: RequestBatch) -> RequestBatch:
    features = batch.features
    return dataclasses.replace(
        batch,
        features=dataclasses.replace(
            features,
            request=reverse_keys(features.request),
            candidate=reverse_keys(features.candidate),
            history=reverse_keys(features.history),
        ),
    )


def assert_same_kjt(got: KeyedJaggedTensor, wanted: KeyedJaggedTensor) -> None:
    assert got.keys() == wanted.keys()
    assert got.stride() == wanted.stride()
    assert torch.equal(got.values(), wanted.values())
    assert torch.equal(got.lengths(), wanted.lengths())
    assert (got.weights_or_none() is None) == (wanted.weights_or_none() is None)
    if wanted.weights_or_none() is not None:
        assert torch.equal(got.weights(), wanted.weights())


def assert_same(got: RequestBatch, wanted: RequestBatch) -> None:
    for name in ("request", "candidate", "history"):
        assert_same_kjt(getattr(got.features, name), getattr(wanted.features, name))
    for name in ("candidate_to_request", "request_dense", "candidate_dense", "labels", "weights"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert getattr(got, name).dtype == getattr(wanted, name).dtype, name


@settings(max_examples=50, deadline=None)
@given(groups_of_rows(), st.integers(0, 2**31))
def test_batches_joined_are_the_batch_of_all_their_rows(groups: list[list[dict]], seed: int) -> None:
    """Bit for bit, whatever the order of the keys in the batches after the first."""
    batches = [batch_from_rows(SCHEMA, rows) for rows in groups]
    batches[1:] = [with_keys_reversed(b) if seed >> place & 1 else b for place, b in enumerate(batches[1:])]
    joined = concat_batches(batches)
    joined.validate(SCHEMA)
    assert_same(joined, batch_from_rows(SCHEMA, [row for rows in groups for row in rows]))


def small(*requests: tuple[int, list[list[int]]]) -> RequestBatch:
    rows = [
        {"request_id": place, "user": user, "item": item}
        for place, (user, items) in enumerate(requests)
        for item in items
    ]
    return batch_from_rows(SMALL, rows)


def without_candidates(batch: RequestBatch) -> RequestBatch:
    """The same requests, no candidate."""
    empty = small()
    return RequestBatch(
        dataclasses.replace(
            batch.features,
            candidate=empty.features.candidate,
            candidate_to_request=empty.candidate_to_request,
        ),
        batch.request_dense,
        empty.candidate_dense,
        empty.labels,
        empty.weights,
    )


def test_requests_without_candidates_keep_their_place() -> None:
    joined = concat_batches(
        [small((1, [[2]])), without_candidates(small((3, [[1]]), (4, [[1]]))), small((5, [[6], []]))]
    )
    joined.validate(SMALL)
    assert joined.features.request["user"].values().tolist() == [1, 3, 4, 5]
    assert joined.candidate_to_request.tolist() == [0, 3, 3]
    assert joined.features.candidate["item"].lengths().tolist() == [1, 1, 0]


def test_one_batch_is_itself() -> None:
    batch = small((1, [[2]]))
    assert concat_batches([batch]) is batch


def with_candidate(batch: RequestBatch, candidate: KeyedJaggedTensor) -> RequestBatch:
    return dataclasses.replace(batch, features=dataclasses.replace(batch.features, candidate=candidate))


def test_ids_of_a_batch_without_weights_weigh_one() -> None:
    batch = small((1, [[2, 3]]))
    ids = batch.features.candidate
    weighted = with_candidate(
        batch, KeyedJaggedTensor(["item"], ids.values(), lengths=ids.lengths(), weights=torch.tensor([0.5, 2.0]))
    )
    joined = concat_batches([batch, weighted])
    assert joined.features.candidate.weights().tolist() == [1.0, 1.0, 0.5, 2.0]
    assert joined.features.request.weights_or_none() is None


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="0 batches to join; give 1 or more"):
        concat_batches([])


def test_different_keys_are_refused() -> None:
    batch = small((1, [[2]]))
    ids = batch.features.candidate
    other = with_candidate(batch, KeyedJaggedTensor(["itme"], ids.values(), lengths=ids.lengths()))
    with pytest.raises(ValueError, match=r"candidate part of batch 1 has the features \['itme'\] .*of one schema"):
        concat_batches([batch, other])


def test_different_devices_are_refused() -> None:
    batch = small((1, [[2]]))
    with pytest.raises(ValueError, match=r"batch 1 lies on meta and batch 0 on cpu; .*`to`"):
        concat_batches([batch, batch.to(torch.device("meta"))])


@pytest.mark.parametrize("name", ["request_dense", "candidate_dense", "labels"])
def test_different_widths_are_refused(name: str) -> None:
    batch = small((1, [[2]]))
    other = dataclasses.replace(batch, **{name: torch.zeros(1, 7)})
    with pytest.raises(ValueError, match=f"{name} of batch 1 has 7 columns"):
        concat_batches([batch, other])
