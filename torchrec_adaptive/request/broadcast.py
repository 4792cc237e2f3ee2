"""A tensor of the request that every candidate reads and nobody copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Broadcast:
    """A request-level tensor and the index that says which candidate reads which row.

    Materialised only where somebody calls `expand`.

    Args:
        values: (R, ...) one row a request.
        candidate_to_request: (B,) integer, the row of each candidate, ascending.

    Example:
        >>> user = Broadcast(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0, 1]))
        >>> user.shape, user.expand().flatten().tolist()
        (torch.Size([3, 1]), [1.0, 1.0, 2.0])
    """

    values: Tensor
    candidate_to_request: Tensor

    @property
    def num_requests(self) -> int:
        """R."""
        return self.values.shape[0]

    @property
    def num_candidates(self) -> int:
        """B."""
        return self.candidate_to_request.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape that `expand` would give."""
        return torch.Size((self.num_candidates, *self.values.shape[1:]))

    def expand(self) -> Tensor:
        """(B, ...) a copy of each request's row for each of its candidates."""
        return self.values.index_select(0, self.candidate_to_request)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Broadcast:
        """The broadcast of `fn(values)`; `fn` works row by row, so it runs at R rows, not B.

        Raises:
            ValueError: `fn` changed the number of rows.
        """
        values = fn(self.values)
        if values.shape[0] != self.num_requests:
            raise ValueError(
                f"fn turned {self.num_requests} rows into {values.shape[0]}; it must keep one row a request"
            )
        return Broadcast(values, self.candidate_to_request)
