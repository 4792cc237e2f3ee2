"""Candidates sorted by request, as padded rows and back.

Shape letters: R requests, B candidates, C most candidates of one request, L most events of one request, T events.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.request import Broadcast


def candidate_counts(candidate_to_request: Tensor, num_requests: int) -> Tensor:
    """How many candidates each request has.

    Args:
        candidate_to_request: (B,) integer, each below R.
        num_requests: R.

    Returns:
        (R,) int64.

    Example:
        >>> candidate_counts(torch.tensor([0, 0, 2]), 3).tolist()
        [2, 0, 1]
    """
    return torch.bincount(candidate_to_request.long(), minlength=num_requests)


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


def add_request_share(candidate: Tensor, request: Tensor, candidate_to_request: Tensor) -> Tensor:
    """Add to each candidate's rows those of its request, in float32 where the inputs are of lower precision.

    Args:
        candidate: (B, ...) floats.
        request: (R, ...) floats, of the same inner shape.
        candidate_to_request: (B,) integer.

    Returns:
        (B, ...) float32, or float64 where the candidate's is.
    """
    wide = torch.promote_types(candidate.dtype, torch.float32)
    return candidate.to(wide) + request.to(wide).index_select(0, candidate_to_request)


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
        ValueError: `size` is not K_r + K_c.
    """
    num_tokens = 0 if request is None else request.values.shape[1]
    if size != num_tokens + candidate.shape[1]:
        matrix, lines = what.rsplit(" ", 1)
        raise ValueError(
            f"{matrix} has {size} {lines}, but the request has {num_tokens} tokens and the candidate "
            f"{candidate.shape[1]}; {lines} and tokens must agree"
        )
    return num_tokens
