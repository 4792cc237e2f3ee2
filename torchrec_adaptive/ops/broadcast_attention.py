"""Attention of candidates over the history of their request, keys and values shared and never copied.

out[b] = softmax(q[b] K[r(b)]^T / sqrt(d)) V[r(b)], with one learnt null event before each history, so that a user
without a history has something to attend to. Candidates never see each other.
Source: HSTU / M-FALCON, arXiv 2402.17152 (keys and values of a history computed once for all candidates).

Shape letters: R requests, B candidates, T events, H heads, D dim a head, C most candidates, L most events of a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.ops.segments import candidate_counts, pad_rows, positions_in_rows


def broadcast_attention(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    null_key_HD: Tensor,
    null_value_HD: Tensor,
) -> Tensor:
    """Attend from each candidate over its request's events.

    Args:
        query_BHD: (B, H, D) floats.
        key_THD: (T, H, D), events of all requests, one request after the other.
        value_THD: (T, H, D).
        lengths_R: (R,) integer, events of each request; 0 is legal.
        candidate_to_request: (B,) integer, ascending.
        null_key_HD: (H, D) key of the null event.
        null_value_HD: (H, D) value of the null event.

    Returns:
        (B, H, D).
    """
    num_requests, num_candidates = lengths_R.shape[0], query_BHD.shape[0]
    if num_candidates == 0:
        return torch.zeros_like(query_BHD) + 0 * (null_key_HD + null_value_HD)
    event_rows, event_places = positions_in_rows(lengths_R)
    longest = int(lengths_R.max()) + 1
    key = _with_null(key_THD, null_key_HD, event_rows, event_places, num_requests, longest)
    value = _with_null(value_THD, null_value_HD, event_rows, event_places, num_requests, longest)
    counts = candidate_counts(candidate_to_request, num_requests)
    rows, places = positions_in_rows(counts)
    query = pad_rows(query_BHD, rows, places, num_requests, int(counts.max()))  # (R, C, H, D)
    present_RL = torch.arange(longest, device=lengths_R.device) <= lengths_R.long().unsqueeze(1)
    out_RHCD = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=present_RL[:, None, None, :]
    )
    return out_RHCD.transpose(1, 2)[rows, places]


def _with_null(
    values_THD: Tensor, null_HD: Tensor, rows: Tensor, places: Tensor, num_requests: int, width: int
) -> Tensor:
    """(R, L, H, D): the null event at place 0, the events after it."""
    padded = pad_rows(values_THD, rows, places + 1, num_requests, width)
    first = torch.zeros(width, device=padded.device, dtype=padded.dtype)
    first[0] = 1.0
    return padded + first[None, :, None, None] * null_HD
