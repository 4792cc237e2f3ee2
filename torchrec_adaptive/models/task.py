"""The training task around a ranking model, in the shape that TorchRec's pipelines expect."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_adaptive.embeddings import BroadcastKeyedTensor
from torchrec_adaptive.request import RequestBatch

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class RankingTask(nn.Module):
    """Weighted binary cross-entropy of a model's logits, and a penalty on the embeddings that they come from.

    loss = sum_b w_b (mean_t bce[b, t] + embedding_l2 * sum_f |e_f[b]|^2) / sum_b w_b, over the pooled features f of
    candidate b: the squared length of a request's row counts once for each of its candidates.

    Args:
        model: `forward(RequestBatch)` gives (B, T) logits.
        embedding_l2: weight of the penalty; above 0 the model must have `embeddings` and `score`, as
            AdaptiveRankingModel has.
    """

    def __init__(self, model: nn.Module, embedding_l2: float = 0.0) -> None:
        super().__init__()
        self.model, self.embedding_l2 = model, embedding_l2

    def forward(self, batch: RequestBatch) -> tuple[Tensor, Outputs]:
        """Score and compare.

        Args:
            batch: with labels (B, T) and weights (B,).

        Returns:
            The loss, a scalar: mean over tasks of the weighted mean over candidates; and
            (loss, logits (B, T), labels (B, T), weights (B,)), all detached.
        """
        weights = batch.weights
        penalty = None
        if self.embedding_l2:
            looked_up = self.model.embeddings(batch.features)  # pyrefly: ignore[not-callable]
            logits = self.model.score(looked_up, batch)  # pyrefly: ignore[not-callable]
            penalty = _sum_of_squares(looked_up, weights)
        else:
            logits = self.model(batch)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        total = weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        loss = ((losses * weights.unsqueeze(1)).sum(0) / total).mean()
        if penalty is not None:
            loss = loss + self.embedding_l2 * penalty / total
        return loss, (loss.detach(), logits.detach(), batch.labels, weights)


def _sum_of_squares(looked_up: BroadcastKeyedTensor, weights: Tensor) -> Tensor:
    """sum_b w_b sum_f |e_f[b]|^2, the request's rows read once."""
    penalty = weights.new_zeros(())
    for key in looked_up.candidate_keys():
        penalty = penalty + (looked_up.candidate(key).square().sum(1) * weights).sum()
    for key in looked_up.request_keys():
        shared = looked_up.broadcast(key)
        of_request = weights.new_zeros(shared.num_requests)
        of_request = of_request.index_add(0, shared.candidate_to_request.long(), weights)
        penalty = penalty + (shared.values.square().sum(1) * of_request).sum()
    return penalty
