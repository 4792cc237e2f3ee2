"""Dot products of all pairs of tokens, those of two request tokens done once a request.

Source: DLRM, arXiv 1906.00091, section 2.

Shape letters: R requests, B candidates, N tokens of a side, D embedding dim, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_adaptive.ops import broadcast_matmul
from torchrec_adaptive.request import Broadcast


class DotInteraction(nn.Module):
    """x_i . x_j for i < j over the tokens X = [X_r; X_c], each pair on the side that it belongs to.

    Pairs of request tokens stay at R rows, for a layer that takes a `Broadcast`, as BroadcastMLP does; the others, at
    B rows, are those of a request token with a candidate token, then those of two candidate tokens.

    Args:
        num_request_tokens: N_r; 0 for none.
        num_candidate_tokens: N_c, 1 or more.

    Raises:
        ValueError: a count too small.

    Example:
        >>> dots = DotInteraction(3, 2)
        >>> shared, own = dots(torch.randn(4, 2, 8), Broadcast(torch.randn(1, 3, 8), torch.zeros(4, dtype=torch.int32)))
        >>> shared.values.shape, own.shape
        (torch.Size([1, 3]), torch.Size([4, 7]))
    """

    def __init__(self, num_request_tokens: int, num_candidate_tokens: int) -> None:
        super().__init__()
        if num_request_tokens < 0 or num_candidate_tokens < 1:
            raise ValueError(
                f"num_request_tokens={num_request_tokens}, num_candidate_tokens={num_candidate_tokens}; use 0 or more "
                "and 1 or more"
            )
        self.num_request_tokens, self.num_candidate_tokens = num_request_tokens, num_candidate_tokens

    @property
    def request_width(self) -> int:
        """P of the request's own pairs."""
        return self.num_request_tokens * (self.num_request_tokens - 1) // 2

    @property
    def candidate_width(self) -> int:
        """P of the pairs that a candidate's token is in."""
        own = self.num_candidate_tokens * (self.num_candidate_tokens - 1) // 2
        return self.num_request_tokens * self.num_candidate_tokens + own

    def forward(self, candidate_BND: Tensor, request: Broadcast | None = None) -> tuple[Broadcast | None, Tensor]:
        """Multiply all pairs.

        Args:
            candidate_BND: (B, N_c, D) floats.
            request: values (R, N_r, D); None where N_r is 0.

        Returns:
            The request's pairs, values (R, request_width), or None; and (B, candidate_width).

        Raises:
            ValueError: other numbers of tokens than the module was made for.
        """
        given = (0 if request is None else request.values.shape[1], candidate_BND.shape[1])
        if given != (self.num_request_tokens, self.num_candidate_tokens):
            raise ValueError(
                f"the request has {given[0]} tokens and the candidate {given[1]}; the interaction was made for "
                f"{self.num_request_tokens} and {self.num_candidate_tokens}"
            )
        own_BP = _pairs(candidate_BND)
        if request is None:
            return None, own_BP
        shared = request.map(_pairs)
        crossed_BNN = broadcast_matmul(candidate_BND, request.map(lambda values_RND: values_RND.mT))
        return shared, torch.cat([crossed_BNN.flatten(1), own_BP], dim=1)


def _pairs(tokens_XND: Tensor) -> Tensor:
    """(X, N, D) to the products of i < j, (X, P)."""
    rows, columns = torch.triu_indices(*(2 * tokens_XND.shape[1:2]), offset=1, device=tokens_XND.device).unbind()
    return torch.matmul(tokens_XND, tokens_XND.mT)[:, rows, columns]
