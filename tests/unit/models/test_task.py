import dataclasses

import torch
from torch import nn

from torchrec_adaptive.models import RankingTask
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, batch_from_rows

SCHEMA = FeatureSchema((Feature.dense("x", "candidate", 2),), tasks=("click", "buy"))


class Identity(nn.Module):
    """Its dense inputs are its logits."""

    def forward(self, batch: RequestBatch) -> torch.Tensor:
        return batch.candidate_dense


def batch_of(weights: list[float]) -> RequestBatch:
    rows = [
        {"request_id": 0, "x": [0.3 * i - 1, 0.5], "labels": {"click": i % 2, "buy": 1}, "weight": weight}
        for i, weight in enumerate(weights)
    ]
    batch = batch_from_rows(SCHEMA, rows)
    return dataclasses.replace(batch, candidate_dense=batch.candidate_dense.requires_grad_())


def test_loss_is_the_weighted_mean_cross_entropy() -> None:
    batch = batch_of([1.0, 0.5, 2.0])
    loss, (detached, logits, labels, weights) = RankingTask(Identity())(batch)
    p = torch.sigmoid(batch.candidate_dense.double())
    entropy = -(batch.labels * p.log() + (1 - batch.labels) * (1 - p).log())
    by_hand = sum((entropy[:, t] * weights).sum() / 3.5 for t in range(2)) / 2
    torch.testing.assert_close(loss.double(), by_hand, rtol=1e-6, atol=1e-7)
    assert torch.equal(detached, loss.detach())
    assert torch.equal(logits, batch.candidate_dense.detach())
    assert labels is batch.labels
    assert not detached.requires_grad
    assert not logits.requires_grad


def test_a_candidate_of_weight_0_has_no_say() -> None:
    batch = batch_of([1.0, 0.0])
    loss, _ = RankingTask(Identity())(batch)
    loss.backward()
    assert bool((batch.candidate_dense.grad[1] == 0).all())
    torch.testing.assert_close(loss.detach(), RankingTask(Identity())(batch_of([1.0]))[0].detach())


def test_nothing_to_weigh_is_a_loss_of_0() -> None:
    for batch in (batch_of([]), batch_of([0.0])):
        loss, _ = RankingTask(Identity())(batch)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert bool(torch.isfinite(batch.candidate_dense.grad).all())


def test_extreme_logits_stay_finite() -> None:
    batch = batch_of([1.0])
    batch = dataclasses.replace(batch, candidate_dense=torch.tensor([[200.0, -200.0]], requires_grad=True))
    loss, _ = RankingTask(Identity())(batch)
    loss.backward()
    assert float(loss.detach()) == 200.0
