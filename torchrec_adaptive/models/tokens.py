"""Embeddings of one side as tokens of one dim.

Shape letters: N tokens, D token dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_adaptive.request import Feature


class TokenProjection(nn.Module):
    """Embeddings of one side as tokens of one dim; dense numbers, where there are any, as one more token.

    Args:
        bags: features of that side.
        dense_width: floats a row.
        token_dim: D.
    """

    def __init__(self, bags: tuple[Feature, ...], dense_width: int, token_dim: int) -> None:
        super().__init__()
        self.token_dim = token_dim
        self.num_tokens = len(bags) + (1 if dense_width else 0)
        self.projections = nn.ModuleList(
            nn.Identity() if f.embedding_dim == token_dim else nn.Linear(f.embedding_dim, token_dim, bias=False)
            for f in bags
        )
        self.dense = nn.Linear(dense_width, token_dim, bias=False) if dense_width else None

    def forward(self, embeddings: list[Tensor], dense: Tensor) -> Tensor:
        """A list of (rows, dim of the feature) and (rows, dense_width) to (rows, N, D)."""
        tokens = [project(rows) for project, rows in zip(self.projections, embeddings, strict=True)]
        if self.dense is not None:
            tokens.append(self.dense(dense))
        return torch.stack(tokens, dim=1) if tokens else dense.new_zeros(dense.shape[0], 0, self.token_dim)
