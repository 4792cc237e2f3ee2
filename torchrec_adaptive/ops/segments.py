"""Candidates sorted by request: their segments, and jagged rows as padded ones and back.

Shape letters: R requests, B candidates, T elements of a jagged tensor.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchrec_adaptive.request import Broadcast


def segments_of(candidate_to_request: Tensor, num_requests: int) -> list[tuple[int, int, int]]:
    """Which candidates each request has: those of one request stand side by side.

    Args:
        candidate_to_request: (B,) integer, ascending, each below R.
        num_requests: R.

    Returns:
        (request, first candidate, one past its last), requests without candidates left out.

    Example:
        >>> segments_of(torch.tensor([0, 0, 2]), 3)
        [(0, 0, 2), (2, 2, 3)]
    """
    rows = torch.arange(num_requests + 1, device=candidate_to_request.device, dtype=candidate_to_request.dtype)
    bounds = torch.searchsorted(candidate_to_request.contiguous(), rows).tolist()
    return [(r, low, high) for r, (low, high) in enumerate(itertools.pairwise(bounds)) if high > low]


def segment_sum(values: Tensor, candidate_to_request: Tensor, num_requests: int) -> Tensor:
    """Sum of the rows of each request's candidates: the gradient of a broadcast.

    Args:
        values: (B, ...) floats.
        candidate_to_request: (B,) integer.
        num_requests: R.

    Returns:
        (R, ...), zeros for a request without candidates; summed in float32 where the dtype is lower.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros((num_requests, *values.shape[1:]), dtype=wide, device=values.device)
    return total.index_add(0, candidate_to_request, values.to(wide)).to(values.dtype)


def positions_in_rows(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place in its row of each element of a jagged tensor.

    Args:
        lengths: (R,) integer.

    Returns:
        (T,) int64 rows and (T,) int64 places, T being the sum of the lengths.

    Example:
        >>> [part.tolist() for part in positions_in_rows(torch.tensor([2, 0, 1]))]
        [[0, 0, 2], [0, 1, 0]]
    """
    lengths = lengths.long()
    rows = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return rows, torch.arange(rows.shape[0], device=lengths.device) - starts[rows]


def pad_rows(values: Tensor, rows: Tensor, places: Tensor, num_rows: int, width: int) -> Tensor:
    """A jagged tensor as a dense one, zeros where a row is short.

    Args:
        values: (T, ...).
        rows: (T,) int64, as `positions_in_rows` gives them.
        places: (T,) int64, likewise.
        num_rows: R.
        width: places a row, at least the longest.

    Returns:
        (R, width, ...) of the dtype of `values`; differentiable.
    """
    padded = values.new_zeros((num_rows, width, *values.shape[1:]))
    return padded.index_put((rows, places), values)


def num_request_tokens(size: int, what: str, candidate: Tensor, request: Broadcast | None) -> int:
    """How many of a matrix's columns or rows belong to the request, the rest being the candidate's.

    Args:
        size: columns or rows of the matrix, one a token of either side.
        what: the matrix and what is counted, for the message: "the weight columns".
        candidate: (B, K_c, ...).
        request: values (R, K_r, ...), or None where the candidate has all the tokens.

    Returns:
        K_r; 0 without a request.

    Raises:
        ValueError: the sides have different dims, or `size` is not K_r + K_c.
    """
    if request is not None and request.values.shape[2:] != candidate.shape[2:]:
        raise ValueError(
            f"the candidate's tokens are of shape {tuple(candidate.shape)}, the request's "
            f"{tuple(request.values.shape)}; both must have the same dims behind the tokens"
        )
    num_tokens = 0 if request is None else request.values.shape[1]
    if size != num_tokens + candidate.shape[1]:
        matrix, lines = what.rsplit(" ", 1)
        raise ValueError(
            f"{matrix} has {size} {lines}, but the request has {num_tokens} tokens and the candidate "
            f"{candidate.shape[1]}; {lines} and tokens must agree"
        )
    return num_tokens
