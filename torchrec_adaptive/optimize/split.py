"""The operators that a rewritten graph calls where both sides meet.

Shape letters: R requests, B candidates, K columns of a side, M outputs, N tokens of a side, D token dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_adaptive.ops import broadcast_linear, broadcast_matmul
from torchrec_adaptive.request import Broadcast


class SplitLinear(nn.Module):
    """A linear layer over columns of both sides, the request's share computed once a request.

    The weight stays the model's own parameter. For inference a copy with the columns in order (the bias first, as a
    column of the request's) is kept, and made again when the parameter was replaced or changed in place; a change
    through `parameter.data` is not seen, call `forget` after one.

    Args:
        request_columns: (K_r) places of the request's columns in the weight.
        candidate_columns: (K_c) places of the candidate's.
    """

    def __init__(self, request_columns: Sequence[int], candidate_columns: Sequence[int]) -> None:
        super().__init__()
        self._columns = torch.tensor([*request_columns, *candidate_columns])
        self._kept: tuple[tuple[int, ...], Tensor] | None = None

    def forget(self) -> None:
        """Drop the kept copy of the weight."""
        self._kept = None

    def forward(
        self,
        candidate_BK: Tensor,
        request_RK: Tensor,
        candidate_to_request: Tensor,
        weight_MK: Tensor,
        bias_M: Tensor | None,
    ) -> Tensor:
        """The layer's output.

        Args:
            candidate_BK: (B, K_c) floats.
            request_RK: (R, K_r) floats.
            candidate_to_request: (B,) integer, ascending.
            weight_MK: (M, K_r + K_c), columns in the model's order.
            bias_M: (M,) or None.

        Returns:
            (B, M).
        """
        if bias_M is not None:
            request_RK = torch.cat([request_RK.new_ones(request_RK.shape[0], 1), request_RK], dim=1)
        weight = self._ordered(weight_MK, bias_M)
        return broadcast_linear(weight, candidate_BK, Broadcast(request_RK, candidate_to_request))

    def _ordered(self, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        parameters = [weight_MK] if bias_M is None else [bias_M, weight_MK]
        if torch.is_grad_enabled() or any(parameter.is_inference() for parameter in parameters):
            return self._copy(weight_MK, bias_M)
        state = tuple(number for p in parameters for number in (p.data_ptr(), p._version))
        if self._kept is None or self._kept[0] != state:
            self._kept = (state, self._copy(weight_MK, bias_M))
        return self._kept[1]

    def _copy(self, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        ordered = weight_MK.index_select(1, self._columns.to(weight_MK.device))
        return ordered if bias_M is None else torch.cat([bias_M.unsqueeze(1), ordered], dim=1)


class SplitGram(nn.Module):
    """Chosen entries of X Xᵀ over tokens of both sides, those of two request tokens computed once a request.

    Args:
        num_request_tokens: N_r.
        num_candidate_tokens: N_c.
        rows: of the entries, as numbers of the tokens [X_r; X_c].
        columns: of the entries, likewise.
    """

    def __init__(
        self, num_request_tokens: int, num_candidate_tokens: int, rows: Sequence[int], columns: Sequence[int]
    ) -> None:
        super().__init__()
        shared, own = [], []
        self.request_entries: list[int] = []
        self.candidate_entries: list[int] = []
        crossed_width = num_request_tokens * num_candidate_tokens
        for entry, (row, column) in enumerate(zip(rows, columns, strict=True)):
            low, high = min(row, column), max(row, column)
            if high < num_request_tokens:
                shared.append(low * num_request_tokens + high)
                self.request_entries.append(entry)
                continue
            self.candidate_entries.append(entry)
            high -= num_request_tokens
            if low < num_request_tokens:
                own.append(high * num_request_tokens + low)
            else:
                own.append(crossed_width + (low - num_request_tokens) * num_candidate_tokens + high)
        # The candidate's entries in the order in which they lie, so that they are read in one sweep.
        order = sorted(range(len(own)), key=own.__getitem__)
        self.candidate_entries = [self.candidate_entries[place] for place in order]
        self._shared, self._own = torch.tensor(shared, dtype=torch.long), torch.tensor(sorted(own), dtype=torch.long)

    def forward(
        self, candidate_BND: Tensor, request_RND: Tensor, candidate_to_request: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both sides' entries.

        Args:
            candidate_BND: (B, N_c, D) floats.
            request_RND: (R, N_r, D) floats.
            candidate_to_request: (B,) integer, ascending.

        Returns:
            (R, len(request_entries)) and (B, len(candidate_entries)).
        """
        shared_RNN = torch.matmul(request_RND, request_RND.mT)
        crossed_BNN = broadcast_matmul(candidate_BND, Broadcast(request_RND.mT, candidate_to_request))
        own_BNN = torch.matmul(candidate_BND, candidate_BND.mT)
        both = torch.cat([crossed_BNN.flatten(1), own_BNN.flatten(1)], dim=1)
        device = both.device
        return (
            shared_RNN.flatten(1).index_select(1, self._shared.to(device)),
            both.index_select(1, self._own.to(device)),
        )


class Undivided(nn.Module):
    """The tensor that both halves stand for, with a copy of the request's columns for each candidate.

    Args:
        axis: along which they are divided.
        request_columns: (K_r) places of the request's columns in the undivided tensor.
        candidate_columns: (K_c) places of the candidate's.
    """

    def __init__(self, axis: int, request_columns: Sequence[int], candidate_columns: Sequence[int]) -> None:
        super().__init__()
        self.axis = axis
        placed = [(place, True, own) for own, place in enumerate(request_columns)]
        placed += [(place, False, own) for own, place in enumerate(candidate_columns)]
        self._pieces: list[tuple[bool, int, int]] = []  # (of the request, first of its columns, how many), in order
        for _, is_request, own in sorted(placed):
            last = self._pieces[-1] if self._pieces else None
            if last is not None and last[0] == is_request and last[1] + last[2] == own:
                self._pieces[-1] = (is_request, last[1], last[2] + 1)
            else:
                self._pieces.append((is_request, own, 1))

    def forward(self, candidate: Tensor, request: Tensor, candidate_to_request: Tensor) -> Tensor:
        """Put them together.

        Args:
            candidate: (B, ...).
            request: (R, ...).
            candidate_to_request: (B,) integer.

        Returns:
            (B, ...).
        """
        halves = {True: request.index_select(0, candidate_to_request), False: candidate}
        pieces = [halves[is_request].narrow(self.axis, first, width) for is_request, first, width in self._pieces]
        return torch.cat(pieces, dim=self.axis)


def with_row_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """(N, *shape), whatever N is."""
    return tensor.reshape(tensor.shape[0], *shape)
