"""A user's history, encoded once a request, and candidates that attend over it.

Shape letters: R requests, B candidates, T events, H heads, D embedding dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_adaptive.ops import broadcast_attention


def event_ages(lengths_R: Tensor) -> Tensor:
    """How many events of its history come after each event.

    Args:
        lengths_R: (R,) integer, events of each request, oldest first.

    Returns:
        (T,) int64; 0 for the newest.

    Example:
        >>> event_ages(torch.tensor([3, 0, 1])).tolist()
        [2, 1, 0, 0]
    """
    lengths = lengths_R.long()
    ends_T = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths)
    return ends_T - 1 - torch.arange(ends_T.shape[0], device=lengths.device)


def side_by_side(columns: list[JaggedTensor]) -> tuple[Tensor, Tensor]:
    """The columns of a history as one.

    Args:
        columns: each of (T, its dim) values, with the same (R,) lengths.

    Returns:
        (T, sum of the dims) floats and (R,) lengths.

    Raises:
        ValueError: no column, or columns of different numbers of events.
    """
    if not columns:
        raise ValueError("a history without columns has no events; give at least one")
    if len({column.values().shape[0] for column in columns}) > 1:
        raise ValueError(
            f"the columns have {[column.values().shape[0] for column in columns]} events; every event has one row in "
            "each column"
        )
    return torch.cat([column.values() for column in columns], dim=1), columns[0].lengths()


class HistoryAttention(nn.Module):
    """Keys and values of each event once a request; each candidate attends over its request's events.

    key = W_k [e_1; ...; e_F],  value = W_v [e_1; ...; e_F] over the F columns of an event,  query = W_q c of the
    candidate. A learnt null event stands before each history, so that an empty one is no special case. Without biases.
    With `recency`, event t weighs (1 + age)^a more or less, a learnt for each head, 0 at first, and age being the
    number of later events.
    Source: target attention over keys and values shared by the candidates, M-FALCON, arXiv 2402.17152.

    Args:
        event_dim: floats of an event, all columns side by side.
        candidate_dim: floats of a candidate's query input.
        embedding_dim: D, floats of the result.
        num_heads: H; must divide D.
        recency: whether the place of an event in the history counts.

    Raises:
        ValueError: `num_heads` does not divide `embedding_dim`.
    """

    def __init__(
        self, event_dim: int, candidate_dim: int, embedding_dim: int, num_heads: int, recency: bool = False
    ) -> None:
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
        self.recency_H = nn.Parameter(torch.zeros(num_heads)) if recency else None

    def forward(self, candidate_BQ: Tensor, columns: list[JaggedTensor], candidate_to_request: Tensor) -> Tensor:
        """Attend.

        Args:
            candidate_BQ: (B, candidate_dim) floats.
            columns: of the history; each (T, ...) values with the same lengths (R,).
            candidate_to_request: (B,) integer, ascending.

        Returns:
            (B, D).
        """
        events_TE, lengths_R = side_by_side(columns)
        heads = (self.num_heads, self.null_key_HD.shape[1])
        recency_TH = None
        if self.recency_H is not None:
            recency_TH = torch.log1p(event_ages(lengths_R).to(events_TE.dtype)).unsqueeze(1) * self.recency_H
        out_BHD = broadcast_attention(
            self.query(candidate_BQ).unflatten(1, heads),
            self.key(events_TE).unflatten(1, heads),
            self.value(events_TE).unflatten(1, heads),
            lengths_R,
            candidate_to_request,
            self.null_key_HD,
            self.null_value_HD,
            recency_TH,
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
        events_TE, lengths_R = side_by_side(columns)
        rows_T = torch.repeat_interleave(torch.arange(lengths_R.shape[0], device=lengths_R.device), lengths_R.long())
        total_RE = events_TE.new_zeros(lengths_R.shape[0], events_TE.shape[1]).index_add(0, rows_T, events_TE)
        return self.projection(total_RE / lengths_R.clamp(min=1).unsqueeze(1))
