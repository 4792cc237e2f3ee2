"""A user's history, encoded once a request: self-attention over its own events.

Shape letters: R requests, T events, H heads, D dim of an encoded event.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_adaptive.ops import RMSNorm, broadcast_attention
from torchrec_adaptive.sequence.history_attention import event_ages, side_by_side


class HistoryEncoderLayer(nn.Module):
    """x + W_o attend(norm(x)), then x + W_2 relu(W_1 norm(x)), pre-norm and without biases.

    Every event attends to all events of its own request, through the operator that candidates attend with. With
    `recency`, event t weighs (1 + age)^a more or less, a learnt for each head.

    Args:
        dim: D.
        num_heads: H; must divide D.
        hidden_width: of the layer's MLP.
        recency: whether the place of an event counts.
    """

    def __init__(self, dim: int, num_heads: int, hidden_width: int, recency: bool) -> None:
        super().__init__()
        self.heads = (num_heads, dim // num_heads)
        self.attention_norm, self.mlp_norm = RMSNorm(dim, eps=1e-6), RMSNorm(dim, eps=1e-6)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden_width, bias=False), nn.Linear(hidden_width, dim, bias=False)
        self.recency_H = nn.Parameter(torch.zeros(num_heads)) if recency else None

    def forward(self, events_TD: Tensor, lengths_R: Tensor, rows_T: Tensor, log_ages_T: Tensor) -> Tensor:
        """Encode once more.

        Args:
            events_TD: (T, D) floats, events of all requests, one request after the other.
            lengths_R: (R,) integer.
            rows_T: (T,) integer, the request of each event.
            log_ages_T: (T,) floats, log(1 + number of later events).

        Returns:
            (T, D).
        """
        query, key, value = (
            self.query_key_value(self.attention_norm(events_TD)).unflatten(1, (3, *self.heads)).unbind(1)
        )
        recency_TH = None if self.recency_H is None else log_ages_T.unsqueeze(1) * self.recency_H
        attended_THD = broadcast_attention(query, key, value, lengths_R, rows_T, event_logits_TH=recency_TH)
        events_TD = events_TD + self.out(attended_THD.flatten(1))
        return events_TD + self.down(self.up(self.mlp_norm(events_TD)).relu_())


class HistoryEncoder(nn.Module):
    """Columns of a history to encoded events, each aware of all others of its request.

    Costs what one request costs, however many candidates read the result.

    Args:
        event_dim: floats of an event, all columns side by side.
        dim: D, floats of an encoded event.
        num_layers: 1 or more.
        num_heads: H; must divide D.
        hidden_width: of each layer's MLP; 0 for 4 D.
        recency: whether the place of an event counts.

    Raises:
        ValueError: a size below 1, or heads that do not divide D.

    Example:
        >>> encoder = HistoryEncoder(event_dim=6, dim=8, num_layers=2, num_heads=2)
        >>> encoder([JaggedTensor(torch.randn(5, 6), lengths=torch.tensor([3, 0, 2]))])[0].shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        event_dim: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        hidden_width: int = 0,
        recency: bool = False,
    ) -> None:
        super().__init__()
        for name, size in (
            ("event_dim", event_dim),
            ("dim", dim),
            ("num_layers", num_layers),
            ("num_heads", num_heads),
        ):
            if size < 1:
                raise ValueError(f"{name}={size} must be 1 or more")
        if dim % num_heads:
            raise ValueError(
                f"dim={dim} must divide by num_heads={num_heads}; use {num_heads * max(1, dim // num_heads)}"
            )
        self.dim = dim
        self.projection = nn.Linear(event_dim, dim, bias=False)
        self.layers = nn.ModuleList(
            HistoryEncoderLayer(dim, num_heads, hidden_width or 4 * dim, recency) for _ in range(num_layers)
        )
        self.norm = RMSNorm(dim, eps=1e-6)

    def forward(self, columns: list[JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Encode.

        Args:
            columns: of the history; each (T, ...) values with the same lengths (R,).

        Returns:
            (T, D) encoded events, and their lengths (R,).
        """
        events_TE, lengths_R = side_by_side(columns)
        num_requests = lengths_R.shape[0]
        rows_T = torch.repeat_interleave(torch.arange(num_requests, device=lengths_R.device), lengths_R.long())
        log_ages_T = torch.log1p(event_ages(lengths_R).to(events_TE.dtype))
        encoded_TD = self.projection(events_TE)
        for layer in self.layers:
            encoded_TD = layer(encoded_TD, lengths_R, rows_T, log_ages_T)
        return self.norm(encoded_TD), lengths_R
