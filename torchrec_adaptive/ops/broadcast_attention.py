"""Attention of candidates over the history of their request, keys and values shared and never copied.

out[b] = softmax([q[b] k_0 / sqrt(d), q[b] K[r(b)]^T / sqrt(d) + s[r(b)]]) [v_0; V[r(b)]]

s is a logit of each event alone, its recency for one. (k_0, v_0) is one more event, either learnt and the same for all,
so that a user without a history has something to attend to; or the candidate's own, so that a candidate sees the
history and itself. No candidate ever sees another, whichever it is.
Source: HSTU / M-FALCON, arXiv 2402.17152 (keys and values of a history computed once for all candidates).

| device | file |
| --- | --- |
| CPU | broadcast_attention_cpu.py |
| CUDA | broadcast_attention_triton.py; the backward is PyTorch's own operators, of broadcast_attention_cpu.py |
| any, with the copy | broadcast_attention_reference.py |

Shape letters: R requests, B candidates, T events, H heads, D dim a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchrec_adaptive.ops.broadcast_attention_cpu import broadcast_attention_cpu, broadcast_attention_gradients
from torchrec_adaptive.ops.operands import check_sides, one_dtype, plain_region


def broadcast_attention(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    null_key_HD: Tensor | None = None,
    null_value_HD: Tensor | None = None,
    event_logits_TH: Tensor | None = None,
) -> Tensor:
    """Attend from each candidate over its request's events.

    Args:
        query_BHD: (B, H, D) floats.
        key_THD: (T, H, D), events of all requests, one request after the other.
        value_THD: (T, H, D).
        lengths_R: (R,) integer, events of each request; 0 is legal.
        candidate_to_request: (B,) integer, ascending.
        null_key_HD: (H, D) key of the null event, or (B, H, D) of each candidate itself; None for no such event.
        null_value_HD: its value, of the same shape.
        event_logits_TH: (T, H), added to the logits of each event for every candidate; None for zeros.

    Returns:
        (B, H, D); without a null event, zeros where the history is empty.

    Raises:
        ValueError: heads or head dims of the inputs differ, an event lacks its key, value or logit, there is a null key
            without a value, operands lie on different devices, or the index is unsorted or out of range (seen on the
            CPU only).
    """
    _check_shapes(query_BHD, key_THD, value_THD, lengths_R, null_key_HD, null_value_HD, event_logits_TH)
    check_sides(
        candidate_to_request,
        query_BHD.shape[0],
        lengths_R.shape[0],
        query=query_BHD,
        key=key_THD,
        value=value_THD,
        lengths=lengths_R,
        null_key=null_key_HD,
        event_logits=event_logits_TH,
    )
    query_BHD, key_THD, value_THD = one_dtype(query_BHD, key_THD, value_THD)
    with plain_region(query_BHD):
        out_BHD, sums_BH = broadcast_attention_op(
            query_BHD, key_THD, value_THD, lengths_R, candidate_to_request, event_logits_TH
        )
        if null_key_HD is None or null_value_HD is None:
            return out_BHD
        # softmax over both is a convex combination: the share of the history is sigmoid(lse - null logit)
        wide = sums_BH.dtype
        null_logit_BH = (query_BHD.to(wide) * null_key_HD.to(wide)).sum(2) / math.sqrt(query_BHD.shape[2])
        share_BH1 = torch.sigmoid(sums_BH - null_logit_BH).unsqueeze(2)
        return torch.lerp(null_value_HD.to(wide).expand_as(out_BHD), out_BHD.to(wide), share_BH1).to(out_BHD.dtype)


def _check_shapes(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    null_key_HD: Tensor | None,
    null_value_HD: Tensor | None,
    event_logits_TH: Tensor | None,
) -> None:
    if (null_key_HD is None) != (null_value_HD is None):
        raise ValueError("a null event has a key and a value; give both, or neither")
    nulls = () if null_key_HD is None or null_value_HD is None else (null_key_HD, null_value_HD)
    heads = {tuple(part.shape[-2:]) for part in (query_BHD, key_THD, value_THD, *nulls)}
    if len(heads) > 1:
        raise ValueError(
            f"query, keys, values and null event have (heads, head dim) of {sorted(heads)}; make them equal"
        )
    for null in nulls:
        if null.dim() == 3 and null.shape[0] != query_BHD.shape[0]:
            raise ValueError(
                f"the null event is given for {null.shape[0]} candidates, of which there are {query_BHD.shape[0]}; "
                "give one a candidate, or one for all"
            )
    events = {key_THD.shape[0], value_THD.shape[0]} | (set() if event_logits_TH is None else {event_logits_TH.shape[0]})
    if len(events) > 1:
        raise ValueError(f"keys, values and logits are of {sorted(events)} events; give one of each for every event")
    if lengths_R.device.type == "cpu" and not torch.compiler.is_compiling():
        total, least = int(lengths_R.sum()), int(lengths_R.min()) if lengths_R.numel() else 0
        if least < 0 or total != key_THD.shape[0]:
            raise ValueError(
                f"lengths_R sums to {total}, its least is {least}, and there are {key_THD.shape[0]} events; lengths "
                "are 0 or more and sum to the number of events"
            )


@torch.library.custom_op("torchrec_adaptive::broadcast_attention", mutates_args=(), device_types="cpu")
def broadcast_attention_op(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The operator behind `broadcast_attention`, without the null event: (B, H, D) and (B, H) logarithms of sums."""
    return broadcast_attention_cpu(query_BHD, key_THD, value_THD, lengths_R, candidate_to_request, event_logits_TH)


@broadcast_attention_op.register_kernel("cuda")
def _cuda(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if query_BHD.dtype == torch.float64 or query_BHD.shape[2] > 256:  # beyond what the kernel takes
        from torchrec_adaptive.ops.broadcast_attention_reference import broadcast_attention_reference as attend
    else:
        # loads Triton
        from torchrec_adaptive.ops.broadcast_attention_triton import broadcast_attention_triton as attend
    return attend(query_BHD, key_THD, value_THD, lengths_R, candidate_to_request, event_logits_TH)


@broadcast_attention_op.register_fake
def _fake(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query_BHD.dtype, torch.float32)
    return query_BHD.new_empty(query_BHD.shape), query_BHD.new_empty(query_BHD.shape[:2], dtype=wide)


@torch.library.custom_op("torchrec_adaptive::broadcast_attention_backward", mutates_args=())
def broadcast_attention_backward_op(
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
    """Gradients of query, key, value and event logits (of no elements where there are none)."""
    return broadcast_attention_gradients(
        grad_out_BHD,
        grad_sums_BH,
        query_BHD,
        key_THD,
        value_THD,
        out_BHD,
        sums_BH,
        lengths_R,
        candidate_to_request,
        event_logits_TH,
    )


@broadcast_attention_backward_op.register_fake
def _fake_backward(
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
    logits = key_THD.new_empty(0, key_THD.shape[1], dtype=sums_BH.dtype)
    if event_logits_TH is not None:
        logits = event_logits_TH.new_empty(event_logits_TH.shape)
    return tuple(x.new_empty(x.shape) for x in (query_BHD, key_THD, value_THD)) + (logits,)  # pyrefly: ignore[bad-return]


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_out_BHD: Tensor | None, grad_sums_BH: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, lengths, index, logits, out, sums = ctx.saved_tensors
    grads = broadcast_attention_backward_op(
        torch.zeros_like(out) if grad_out_BHD is None else grad_out_BHD,
        torch.zeros_like(sums) if grad_sums_BH is None else grad_sums_BH,
        query,
        key,
        value,
        out,
        sums,
        lengths,
        index,
        logits,
    )
    return (*grads[:3], None, None, None if logits is None else grads[3])


broadcast_attention_op.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.torchrec_adaptive.broadcast_attention, get_raw=True)
def _flops(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Two products for every pair of a candidate and an event of its request."""
    pairs = int(lengths_R.long().index_select(0, candidate_to_request.long()).sum())
    return 4 * pairs * query_BHD.shape[1] * query_BHD.shape[2]
