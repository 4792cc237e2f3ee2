"""A batch cut by requests, folded into fewer of them, or taken apart into impressions; no row is looped over.

Shape letters: R requests, B candidates, F features, N chosen requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.request import FeatureSchema, RequestBatch, RequestFeatures, expand_kjt


def candidate_counts(batch: RequestBatch) -> Tensor:
    """(R,) int64, how many candidates each request has.

    Args:
        batch: its index is ascending.
    """
    return torch.bincount(batch.candidate_to_request.long(), minlength=batch.num_requests)


def take_requests(batch: RequestBatch, chosen: Tensor) -> RequestBatch:
    """A batch of some of the requests, with all of their candidates.

    Args:
        batch: R requests.
        chosen: (N,) int64 numbers of requests, each below R, in the order wanted; one may come again.

    Returns:
        RequestBatch of N requests.

    Example:
        >>> from torchrec_adaptive.request import Feature, batch_from_rows
        >>> schema = FeatureSchema((Feature.bag("user", "request", 9, 4), Feature.bag("item", "candidate", 9, 4)))
        >>> rows = [{"request_id": user, "user": user, "item": item} for user, item in ((1, 5), (1, 6), (2, 7))]
        >>> taken = take_requests(batch_from_rows(schema, rows), torch.tensor([1, 0]))
        >>> taken.features.candidate["item"].values().tolist(), taken.candidate_to_request.tolist()
        ([7, 5, 6], [0, 1, 1])
    """
    counts_R = candidate_counts(batch)
    firsts_R = torch.cumsum(counts_R, 0) - counts_R
    counts_N = counts_R[chosen]
    shift_N = firsts_R[chosen] - (torch.cumsum(counts_N, 0) - counts_N)
    index = torch.repeat_interleave(torch.arange(chosen.shape[0]), counts_N)
    rows = shift_N[index] + torch.arange(index.shape[0])
    features = batch.features
    return RequestBatch(
        RequestFeatures(
            expand_kjt(features.request, chosen),
            expand_kjt(features.candidate, rows),
            expand_kjt(features.history, chosen),
            index.to(torch.int32),
        ),
        batch.request_dense[chosen],
        batch.candidate_dense[rows],
        batch.labels[rows],
        batch.weights[rows],
    )


def to_single_impressions(batch: RequestBatch) -> RequestBatch:
    """The same candidates, each a request of its own: every request-side value is repeated for each of them.

    This is what a model trains on whose data has one row an impression. A request without candidates leaves nothing.

    Args:
        batch: R requests with B candidates.

    Returns:
        RequestBatch with B requests of one candidate each; candidates, labels and weights are `batch`'s own tensors.
    """
    index = torch.arange(batch.num_candidates, dtype=torch.int32)
    features, rows = batch.features, batch.candidate_to_request.long()
    return RequestBatch(
        RequestFeatures(
            expand_kjt(features.request, rows), features.candidate, expand_kjt(features.history, rows), index
        ),
        batch.request_dense[rows],
        batch.candidate_dense,
        batch.labels,
        batch.weights,
    )


def fold_requests(batch: RequestBatch, begins: Tensor, schema: FeatureSchema) -> RequestBatch:
    """Runs of requests made one request each, where all of a run say the same on the request side.

    Args:
        batch: R requests.
        begins: (R,) bool, whether a request begins a run; the first does.
        schema: of the batch.

    Returns:
        RequestBatch with a request a run; its request side is that of the run's first request.

    Raises:
        RequestSidesDiffer: a request-side value differs within a run.
    """
    if batch.num_requests == 0:
        return batch
    later = torch.nonzero(~begins).squeeze(1)
    features = batch.features
    for part in (features.request, features.history):
        for name in part.keys():  # noqa: SIM118  (a KeyedJaggedTensor is no mapping)
            _check_equal(name, _differs(part[name].lengths(), part[name].values(), part[name].weights_or_none(), later))
    first = 0
    for feature in schema.request_dense:
        columns = batch.request_dense[:, first : first + feature.width]
        _check_equal(feature.name, later[(columns[later] != columns[later - 1]).any(1)])
        first += feature.width
    starts = torch.nonzero(begins).squeeze(1)
    index = (torch.cumsum(begins, 0) - 1)[batch.candidate_to_request.long()]
    return RequestBatch(
        RequestFeatures(
            expand_kjt(features.request, starts),
            features.candidate,
            expand_kjt(features.history, starts),
            index.to(torch.int32),
        ),
        batch.request_dense[starts],
        batch.candidate_dense,
        batch.labels,
        batch.weights,
    )


class RequestSidesDiffer(ValueError):
    """Two requests to be folded say different things on the request side.

    Args:
        feature: name of the first feature that differs.
        row: number of the request that differs from the one before it.
    """

    def __init__(self, feature: str, row: int) -> None:
        super().__init__(f"request-side feature {feature!r} differs between requests {row - 1} and {row} of one run")
        self.feature, self.row = feature, row


def _check_equal(name: str, wrong: Tensor) -> None:
    if wrong.numel():
        raise RequestSidesDiffer(name, int(wrong[0]))


def _differs(lengths: Tensor, values: Tensor, weights: Tensor | None, later: Tensor) -> Tensor:
    """Those of `later` whose row is not that of the row before."""
    lengths = lengths.long()
    wrong = lengths[later] != lengths[later - 1]
    if bool(wrong.any()):
        return later[wrong]
    counts = lengths[later]
    owner = torch.repeat_interleave(torch.arange(later.shape[0]), counts)
    firsts = (torch.cumsum(lengths, 0) - lengths)[later]
    place = firsts[owner] + torch.arange(owner.shape[0]) - (torch.cumsum(counts, 0) - counts)[owner]
    before = place - counts[owner]
    unequal = values[place] != values[before]
    if weights is not None:
        unequal = unequal | (weights[place] != weights[before])
    return later[owner[unequal]]
