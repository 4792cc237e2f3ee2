"""Requests with every kind of feature, for the tests of Parquet files."""

from __future__ import annotations

import numpy as np
import torch

from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, batch_from_rows

SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 50, 8, max_length=4),
        Feature.bag("topics", "request", 20, 8, weighted=True),
        Feature.dense("hour", "request", 2),
        Feature.bag("item", "candidate", 30, 8, table="items"),
        Feature.bag("tags", "candidate", 20, 8, weighted=True),
        Feature.dense("price", "candidate"),
        Feature.dense("image", "candidate", 3),
        Feature.sequence("seen", 30, 8, table="items"),
        Feature.sequence("action", 4, 8),
    ),
    tasks=("click", "buy"),
)


def make_requests(counts: tuple[int, ...], seed: int = 0) -> RequestBatch:
    """Requests with as many candidates as `counts` says, 1 or more each."""
    random = np.random.default_rng(seed)

    def weighted(longest: int) -> tuple[list[int], list[float]]:
        length = int(random.integers(0, longest))
        return random.integers(0, 20, length).tolist(), random.random(length).astype(np.float32).tolist()

    rows = []
    for request, count in enumerate(counts):
        events = int(random.integers(0, 6))
        shared = {
            "request_id": request,
            "user": random.integers(0, 50, random.integers(0, 4)).tolist(),
            "topics": weighted(4),
            "hour": random.random(2).tolist(),
            "seen": random.integers(0, 30, events).tolist(),
            "action": random.integers(0, 4, events).tolist(),
        }
        for _ in range(count):
            own = {"item": [int(random.integers(0, 30))], "tags": weighted(3), "price": float(random.random())}
            own |= {"image": random.random(3).tolist(), "weight": float(random.integers(1, 4))}
            own |= {"labels": {"click": float(random.integers(0, 2)), "buy": float(random.integers(0, 2))}}
            rows.append(shared | own)
    return batch_from_rows(SCHEMA, rows)


def assert_same(one: RequestBatch, other: RequestBatch) -> None:
    for name in ("candidate_to_request", "request_dense", "candidate_dense", "labels", "weights"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0)
    for name in ("request", "candidate", "history"):
        ours, theirs = getattr(one.features, name), getattr(other.features, name)
        assert ours.keys() == theirs.keys()
        for key in ours.keys():  # noqa: SIM118  (a KeyedJaggedTensor is no mapping)
            assert ours[key].lengths().tolist() == theirs[key].lengths().tolist(), key
            assert ours[key].values().tolist() == theirs[key].values().tolist(), key
            if ours[key].weights_or_none() is not None:
                assert ours[key].weights().tolist() == theirs[key].weights().tolist(), key
