"""`broadcast_attention` on a CPU: PyTorch's flash attention over groups of requests, in place, and its backward.

A group is a request by itself where that is work enough for a call, else requests beside each other, padded to the
longest history and the most candidates among them, as far as that wastes little.

Shape letters: R requests, B candidates, T events, H heads, D dim a head; of a group: G requests, C most candidates,
L most events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_adaptive.ops.segments import pad_rows, positions_in_rows, segments_of

_ENOUGH = 1 << 15  # (candidate, event) pairs: a call of its own
_MOST_PROBABILITIES = 1 << 24  # elements that the backward holds at a time


@dataclass(frozen=True)
class AttentionGroup:
    """Requests that are attended to in one call, all with candidates and events.

    Args:
        candidates: (first, one past the last) of each request.
        events: likewise.
    """

    candidates: list[tuple[int, int]]
    events: list[tuple[int, int]]

    @property
    def alone(self) -> bool:
        """One request: nothing is padded."""
        return len(self.candidates) == 1


def attention_groups(lengths_R: Tensor, candidate_to_request: Tensor) -> list[AttentionGroup]:
    """Which requests go together.

    Args:
        lengths_R: (R,) integer, events of each request.
        candidate_to_request: (B,) integer, ascending, each below R.

    Returns:
        Groups in order; requests without candidates or without events are in none.
    """
    lengths = lengths_R.tolist()
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    groups: list[AttentionGroup] = []
    pairs = most_candidates = most_events = 0
    for request, low, high in segments_of(candidate_to_request, len(lengths)):
        count, length = high - low, lengths[request]
        if not length:
            continue
        joined = len(groups[-1].candidates) + 1 if groups else 0
        widest = joined * max(most_candidates, count) * max(most_events, length)
        if not groups or pairs >= _ENOUGH or count * length >= _ENOUGH or 2 * widest > 3 * (pairs + count * length):
            groups.append(AttentionGroup([], []))
            pairs = most_candidates = most_events = 0
        groups[-1].candidates.append((low, high))
        groups[-1].events.append((ends[request], ends[request + 1]))
        pairs += count * length
        most_candidates, most_events = max(most_candidates, count), max(most_events, length)
    return groups


def broadcast_attention_cpu(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from each candidate over its request's events.

    Args:
        query_BHD: (B, H, D) floats.
        key_THD: (T, H, D) of the same dtype, events of all requests, one request after the other.
        value_THD: (T, H, D) likewise.
        lengths_R: (R,) integer, events of each request.
        candidate_to_request: (B,) integer, ascending, each below R.
        event_logits_TH: (T, H), added to the logits of each event for every candidate; None for zeros.

    Returns:
        (B, H, D), zeros for an empty history; and (B, H) the logarithm of the sum of the exponentials, float32 or
        wider, minus infinity for an empty history.
    """
    out_BHD = torch.zeros_like(query_BHD, memory_format=torch.contiguous_format)
    wide = torch.promote_types(query_BHD.dtype, torch.float32)
    sums_BH = torch.full(query_BHD.shape[:2], -math.inf, dtype=wide)
    for group in attention_groups(lengths_R, candidate_to_request):
        query, key, value, bias, index = _padded(group, query_BHD, key_THD, value_THD, event_logits_TH)
        out_GHCD, sums_GHC = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias
        )
        if index is None:
            first, last = group.candidates[0]
            out_BHD[first:last], sums_BH[first:last] = out_GHCD[0].transpose(0, 1), sums_GHC[0].mT
        else:
            rows, places, candidates = index
            out_BHD[candidates] = out_GHCD.transpose(1, 2)[rows, places]
            sums_BH[candidates] = sums_GHC.mT[rows, places]
    return out_BHD, sums_BH


def broadcast_attention_gradients(
    grad_out_BHD: Tensor,
    grad_sums_BH: Tensor,
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    out_BHD: Tensor,
    sums_BH: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `broadcast_attention_cpu`, on any device, the probabilities made again from the logarithms.

    With P = exp(S - lse):  dV = P^T dO,  dS = P (dO V^T - sum(dO O) + dlse),  dQ = dS K / sqrt(D),
    dK = dS^T Q / sqrt(D).
    Source: FlashAttention, arXiv 2205.14135, algorithm 4, and a gradient of the logarithms beside it.

    Args:
        grad_out_BHD: gradient of the first result.
        grad_sums_BH: gradient of the second.
        query_BHD: as given forward.
        key_THD: likewise.
        value_THD: likewise.
        out_BHD: the first result.
        sums_BH: the second.
        lengths_R: as given forward.
        candidate_to_request: likewise.
        event_logits_TH: likewise.

    Returns:
        Gradients of query, key, value and event logits (of no elements where there are none), each of its dtype.
    """
    wide = sums_BH.dtype
    scale = 1.0 / math.sqrt(query_BHD.shape[2])
    grad_query = torch.zeros(query_BHD.shape, dtype=wide, device=query_BHD.device)
    grad_key = torch.zeros(key_THD.shape, dtype=wide, device=query_BHD.device)
    grad_value = torch.zeros_like(grad_key)
    grad_logits = torch.zeros((key_THD.shape[0], key_THD.shape[1]), dtype=wide, device=query_BHD.device)
    delta_BH = grad_sums_BH.to(wide) - (grad_out_BHD.to(wide) * out_BHD.to(wide)).sum(2)
    for group in attention_groups(lengths_R, candidate_to_request):
        for part in _candidate_blocks(group, query_BHD.shape[1]):
            query, key, value, bias, index = _padded(part, query_BHD, key_THD, value_THD, event_logits_TH)
            query, key, value = query.to(wide), key.to(wide), value.to(wide)
            grad_out, delta, sums = (
                _laid_out(part, x, index) for x in (grad_out_BHD.to(wide), delta_BH[..., None], sums_BH[..., None])
            )
            logits = torch.matmul(query * scale, key.mT)
            if bias is not None:
                logits = logits + bias.to(wide)
            probabilities = torch.exp(logits - sums)
            grad_s = probabilities * (torch.matmul(grad_out, value.mT) + delta)
            results = (
                torch.matmul(grad_s, key) * scale,
                torch.matmul(grad_s.mT, query) * scale,
                torch.matmul(probabilities.mT, grad_out),
                grad_s.sum(2).unsqueeze(3),
            )
            _add_back(part, index, results, (grad_query, grad_key, grad_value, grad_logits.unsqueeze(2)))
    if event_logits_TH is None:
        grad_logits = grad_logits[:0]
    else:
        grad_logits = grad_logits.to(event_logits_TH.dtype)
    return grad_query.to(query_BHD.dtype), grad_key.to(key_THD.dtype), grad_value.to(value_THD.dtype), grad_logits


_Index = tuple[Tensor, Tensor, Tensor] | None


def _padded(
    group: AttentionGroup, query_BHD: Tensor, key_THD: Tensor, value_THD: Tensor, event_logits_TH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, _Index]:
    """(G, H, C, D), (G, H, L, D) twice, an additive (G, H or 1, 1, L) or None, and where the candidates lie."""
    if group.alone:
        (first, last), (start, end) = group.candidates[0], group.events[0]
        parts = [x[None].transpose(1, 2) for x in (query_BHD[first:last], key_THD[start:end], value_THD[start:end])]
        bias = None if event_logits_TH is None else event_logits_TH[start:end].mT[None, :, None, :]
        return parts[0], parts[1], parts[2], None if bias is None else bias.to(query_BHD.dtype).contiguous(), None
    index = _flat(group.candidates, query_BHD.device)
    rows, places, events = _flat(group.events, query_BHD.device)
    size, width = len(group.events), max(end - start for start, end in group.events)
    key, value = (pad_rows(x[events], rows, places, size, width).transpose(1, 2) for x in (key_THD, value_THD))
    bias = torch.full((size, width), -math.inf, dtype=query_BHD.dtype, device=query_BHD.device)
    bias[rows, places] = 0.0
    bias = bias[:, None, None, :]
    if event_logits_TH is not None:
        bias = bias + pad_rows(event_logits_TH[events].to(query_BHD.dtype), rows, places, size, width).mT.unsqueeze(2)
    return _laid_out(group, query_BHD, index), key, value, bias, index


def _flat(spans: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row, place in the row, and number of each element of the spans."""
    starts = torch.tensor([start for start, _ in spans], device=device)
    rows, places = positions_in_rows(torch.tensor([end - start for start, end in spans], device=device))
    return rows, places, starts[rows] + places


def _laid_out(group: AttentionGroup, values_BHX: Tensor, index: _Index) -> Tensor:
    """(G, H, C, X) of the group's candidates."""
    if index is None:
        return values_BHX[None, group.candidates[0][0] : group.candidates[0][1]].transpose(1, 2)
    rows, places, candidates = index
    width = max(last - first for first, last in group.candidates)
    return pad_rows(values_BHX[candidates], rows, places, len(group.candidates), width).transpose(1, 2)


def _add_back(group: AttentionGroup, index: _Index, results: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
    """Gradients of the query to the candidates' rows, the others to the events' rows."""
    query, *others = results
    if index is None:
        (first, last), (start, end) = group.candidates[0], group.events[0]
        totals[0][first:last] += query[0].transpose(0, 1)
        for total, other in zip(totals[1:], others, strict=True):
            total[start:end] += other[0].transpose(0, 1).reshape(total[start:end].shape)
        return
    rows, places, candidates = index
    totals[0][candidates] = query.transpose(1, 2)[rows, places]
    rows, places, events = _flat(group.events, query.device)
    for total, other in zip(totals[1:], others, strict=True):
        total[events] = other.transpose(1, 2)[rows, places].reshape(total[events].shape)


def _candidate_blocks(group: AttentionGroup, num_heads: int) -> list[AttentionGroup]:
    """The group, or a large request's candidates in blocks, so that the backward's memory has a bound."""
    if not group.alone:
        return [group]
    (first, last), (start, end) = group.candidates[0], group.events[0]
    step = max(1, _MOST_PROBABILITIES // ((end - start) * num_heads))
    return [AttentionGroup([(low, min(low + step, last))], group.events) for low in range(first, last, step)]
