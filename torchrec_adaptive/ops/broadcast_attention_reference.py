"""`broadcast_attention` written plainly, keys and values copied for each candidate: the oracle of the kernels.

Shape letters: R requests, B candidates, T events, H heads, D dim a head, L most events of a request.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrec_adaptive.ops.segments import pad_rows, positions_in_rows


def broadcast_attention_reference(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q[b] K[r(b)]^T / sqrt(D) + s[r(b)]) V[r(b)].

    Args:
        query_BHD: (B, H, D) floats.
        key_THD: (T, H, D), events of all requests, one request after the other.
        value_THD: (T, H, D).
        lengths_R: (R,) integer, events of each request.
        candidate_to_request: (B,) integer.
        event_logits_TH: (T, H), added to the logits; None for zeros.

    Returns:
        (B, H, D), zeros for an empty history; and (B, H) the logarithm of the sum of the exponentials, float32 or
        wider, minus infinity for an empty history.
    """
    wide = torch.promote_types(query_BHD.dtype, torch.float32)
    rows, places = positions_in_rows(lengths_R)
    num_requests = lengths_R.shape[0]
    width = int(lengths_R.max()) if num_requests else 0
    parts = [key_THD, value_THD] + ([] if event_logits_TH is None else [event_logits_TH])
    padded = [pad_rows(part, rows, places, num_requests, width)[candidate_to_request.long()].to(wide) for part in parts]
    logits_BHL = torch.einsum("bhd,blhd->bhl", query_BHD.to(wide), padded[0]) / math.sqrt(query_BHD.shape[2])
    if event_logits_TH is not None:
        logits_BHL = logits_BHL + padded[2].mT
    seen_BL = torch.arange(width, device=lengths_R.device) < lengths_R.long()[candidate_to_request.long()].unsqueeze(1)
    logits_BHL = logits_BHL.masked_fill(~seen_BL.unsqueeze(1), -math.inf)
    sums_BH = torch.logsumexp(logits_BHL, dim=2)
    weights_BHL = torch.where(seen_BL.unsqueeze(1), torch.exp(logits_BHL - sums_BH.unsqueeze(2)), 0.0)
    return torch.einsum("bhl,blhd->bhd", weights_BHL, padded[1]).to(query_BHD.dtype), sums_BH
