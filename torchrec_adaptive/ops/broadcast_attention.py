"""Attention of candidates over the history of their request, keys and values shared and never copied.

out[b] = softmax(q[b] K[r(b)]^T / sqrt(d) + s[r(b)]) V[r(b)], with one learnt null event before each history, so that a
user without a history has something to attend to. s is a logit of each event alone, its recency for one (0 for the
null event). Candidates never see each other.
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
    event_logits_TH: Tensor | None = None,
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
        event_logits_TH: (T, H), added to the logits of each event for every candidate; None for zeros.

    Returns:
        (B, H, D).

    Raises:
        ValueError: heads or head dims of the inputs differ, or an event lacks its key, value or logit.
    """
    _check_shapes(query_BHD, key_THD, value_THD, null_key_HD, null_value_HD, event_logits_TH)
    num_requests, num_candidates = lengths_R.shape[0], query_BHD.shape[0]
    if num_candidates == 0:  # nothing to compute, but every input stays in the graph: its gradient is 0, not None
        unread = key_THD.sum() + value_THD.sum() + null_key_HD.sum() + null_value_HD.sum()
        return query_BHD + (unread if event_logits_TH is None else unread + event_logits_TH.sum())
    event_rows, event_places = positions_in_rows(lengths_R)
    longest = int(lengths_R.max()) + 1
    key = _with_null(key_THD, null_key_HD, event_rows, event_places, num_requests, longest)
    value = _with_null(value_THD, null_value_HD, event_rows, event_places, num_requests, longest)
    counts = candidate_counts(candidate_to_request, num_requests)
    rows, places = positions_in_rows(counts)
    query = pad_rows(query_BHD, rows, places, num_requests, int(counts.max()))  # (R, C, H, D)
    mask = torch.arange(longest, device=lengths_R.device) <= lengths_R.long().unsqueeze(1)  # (R, L)
    mask = mask[:, None, None, :]
    if event_logits_TH is not None:
        logits_RLH = pad_rows(event_logits_TH, event_rows, event_places + 1, num_requests, longest)
        mask = logits_RLH.mT.unsqueeze(2).masked_fill(~mask, float("-inf"))  # (R, H, 1, L)
    out_RHCD = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
    )
    return out_RHCD.transpose(1, 2)[rows, places]


def _check_shapes(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    null_key_HD: Tensor,
    null_value_HD: Tensor,
    event_logits_TH: Tensor | None,
) -> None:
    heads = {tuple(part.shape[-2:]) for part in (query_BHD, key_THD, value_THD, null_key_HD, null_value_HD)}
    if len(heads) > 1:
        raise ValueError(
            f"query, keys, values and null event have (heads, head dim) of {sorted(heads)}; make them equal"
        )
    events = {key_THD.shape[0], value_THD.shape[0]} | (set() if event_logits_TH is None else {event_logits_TH.shape[0]})
    if len(events) > 1:
        raise ValueError(f"keys, values and logits are of {sorted(events)} events; give one of each for every event")


def _with_null(
    values_THD: Tensor, null_HD: Tensor, rows: Tensor, places: Tensor, num_requests: int, width: int
) -> Tensor:
    """(R, L, H, D): the null event at place 0, the events after it."""
    padded = pad_rows(values_THD, rows, places + 1, num_requests, width)
    first = torch.zeros(width, device=padded.device, dtype=padded.dtype)
    first[0] = 1.0
    return padded + first[None, :, None, None] * null_HD
