"""The training task around a ranking model, in the shape that TorchRec's pipelines expect."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_adaptive.request import RequestBatch

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class RankingTask(nn.Module):
    """Weighted binary cross-entropy of a model's logits.

    Args:
        model: `forward(RequestBatch)` gives (B, T) logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: RequestBatch) -> tuple[Tensor, Outputs]:
        """Score and compare.

        Args:
            batch: with labels (B, T) and weights (B,).

        Returns:
            The loss, a scalar: mean over tasks of the weighted mean over candidates; and
            (loss, logits (B, T), labels (B, T), weights (B,)), all detached.
        """
        logits = self.model(batch)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        weights = batch.weights.unsqueeze(1)
        total = weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        loss = ((losses * weights).sum(0) / total).mean()
        return loss, (loss.detach(), logits.detach(), batch.labels, batch.weights)
