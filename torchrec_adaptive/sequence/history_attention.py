"""A user's history, encoded once a request, and candidates that attend over it.

Shape letters: R requests, B candidates, T events, H heads, D embedding dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_adaptive.ops import broadcast_attention


class HistoryAttention(nn.Module):
    """Keys and values of each event once a request; each candidate attends over its request's events.

    key = W_k [e_1; ...; e_F],  value = W_v [e_1; ...; e_F] over the F columns of an event,  query = W_q c of the
    candidate. A learnt null event stands before each history, so that an empty one is no special case. Without biases.
    Source: target attention over keys and values shared by the candidates, M-FALCON, arXiv 2402.17152.

    Args:
        event_dim: floats of an event, all columns side by side.
        candidate_dim: floats of a candidate's query input.
        embedding_dim: D, floats of the result.
        num_heads: H; must divide D.

    Raises:
        ValueError: `num_heads` does not divide `embedding_dim`.
    """

    def __init__(self, event_dim: int, candidate_dim: int, embedding_dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or embedding_dim % num_heads:
            raise ValueError(
                f"embedding_dim={embedding_dim} must divide by num_heads={num_heads}; use "
                f"{max(num_heads, 1) * max(1, embedding_dim // max(num_heads, 1))}"
            )
        self.num_heads = num_heads
        head_dim = embedding_dim // num_heads
        self.key = nn.Linear(event_dim, embedding_dim, bias=False)
        self.value = nn.Linear(event_dim, embedding_dim, bias=False)
        self.query = nn.Linear(candidate_dim, embedding_dim, bias=False)
        self.out = nn.Linear(embedding_dim, embedding_dim, bias=False)
        self.null_key_HD = nn.Parameter(torch.randn(num_heads, head_dim) / math.sqrt(head_dim))
        self.null_value_HD = nn.Parameter(torch.zeros(num_heads, head_dim))

    def forward(self, candidate_BQ: Tensor, columns: list[JaggedTensor], candidate_to_request: Tensor) -> Tensor:
        """Attend.

        Args:
            candidate_BQ: (B, candidate_dim) floats.
            columns: of the history; each (T, ...) values with the same lengths (R,).
            candidate_to_request: (B,) integer, ascending.

        Returns:
            (B, D).
        """
        events_TE = torch.cat([column.values() for column in columns], dim=1)
        heads = (self.num_heads, -1)
        out_BHD = broadcast_attention(
            self.query(candidate_BQ).unflatten(1, heads),
            self.key(events_TE).unflatten(1, heads),
            self.value(events_TE).unflatten(1, heads),
            columns[0].lengths(),
            candidate_to_request,
            self.null_key_HD,
            self.null_value_HD,
        )
        return self.out(out_BHD.flatten(1))


class HistoryMean(nn.Module):
    """A token of the request: the mean of its events, projected. R rows; zeros for an empty history.

    Args:
        event_dim: floats of an event, all columns side by side.
        embedding_dim: D.
    """

    def __init__(self, event_dim: int, embedding_dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(event_dim, embedding_dim, bias=False)

    def forward(self, columns: list[JaggedTensor]) -> Tensor:
        """Columns of the history, each (T, ...) and (R,) lengths, to (R, D)."""
        events_TE = torch.cat([column.values() for column in columns], dim=1)
        lengths_R = columns[0].lengths()
        rows_T = torch.repeat_interleave(torch.arange(lengths_R.shape[0], device=lengths_R.device), lengths_R.long())
        total_RE = events_TE.new_zeros(lengths_R.shape[0], events_TE.shape[1]).index_add(0, rows_T, events_TE)
        return self.projection(total_RE / lengths_R.clamp(min=1).unsqueeze(1))
