"""Attention of candidates over the history of their request as a Triton kernel, keys and values read once a tile.

out[b] = softmax(q[b] K[r(b)]^T / sqrt(D) + s[r(b)]) V[r(b)]

over the events of the request alone; there is no null event here, and the logsumexp lets the caller add one. A tile is
a run of candidates of one request: its queries stay on the chip while the events pass by, with a running maximum and
sum.
Sources: FlashAttention-2, arXiv 2307.08691, section 3.1; HSTU / M-FALCON, arXiv 2402.17152.

Shape letters: R requests, B candidates, T events of all requests, H heads, D dim a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_adaptive.ops.triton_blocks import check_kernel_dtypes, power_of_two, product_precision

MAX_HEAD_DIM = 256
_NUM_PROGRAMS = 132  # multiprocessors of an H100 or H200: with fewer programs a smaller tile keeps more of them busy


@dataclass(frozen=True)
class AttentionBlocks:
    """Block sizes of one launch.

    Args:
        block_c: candidates of one request a program.
        block_l: events a step.
        num_warps: warps a program.
        num_stages: steps in flight.
    """

    block_c: int
    block_l: int
    num_warps: int
    num_stages: int


def attention_blocks(
    num_candidates: int, num_requests: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionBlocks:
    """Block sizes from the sizes alone.

    Args:
        num_candidates: B.
        num_requests: R.
        num_heads: H.
        head_dim: D.
        dtype: of the operands.

    Returns:
        The blocks, a tile for the candidates of an average request.

    Example:
        >>> attention_blocks(1024, 16, 8, 64, torch.bfloat16)
        AttentionBlocks(block_c=64, block_l=64, num_warps=4, num_stages=3)
    """
    average = triton.cdiv(num_candidates, max(num_requests, 1))
    # beyond a head dim of 128, and of 64 in float32, larger blocks or fewer warps spill registers
    if dtype == torch.float32:
        if head_dim > 128:
            return AttentionBlocks(16, 16, num_warps=8, num_stages=2)
        return AttentionBlocks(power_of_two(average, 16, 32), 32, num_warps=4 if head_dim <= 64 else 8, num_stages=2)
    if head_dim > 128:
        return AttentionBlocks(power_of_two(average, 16, 64), 32, num_warps=4, num_stages=2)
    block_c = power_of_two(average, 16, 128)
    if block_c == 128 and triton.cdiv(num_candidates, 128) * num_heads < _NUM_PROGRAMS:
        block_c = 64
    return AttentionBlocks(block_c, 64, num_warps=8 if block_c == 128 else 4, num_stages=3)


def request_tiles(
    candidate_to_request: Tensor, num_requests: int, rows_a_tile: int, rows_a_candidate: int = 1
) -> tuple[Tensor, int]:
    """Runs of rows that belong to one request, found on the device without waiting for it.

    For candidate_to_request = [0, 0, 0, 2] and two rows a tile, request 0 has tiles 0 and 1, and request 2 has tile 2:

        first row     0  3  3  4
        first tile    0  2  2  3

    Args:
        candidate_to_request: (B,) integer, ascending, each below R.
        num_requests: R.
        rows_a_tile: the most rows of a tile.
        rows_a_candidate: rows that each candidate has, one candidate after the other.

    Returns:
        (2, R + 1) int64: first row and first tile of each request, and the number of both at the end; and how many
        programs hold all tiles, which depends on the sizes alone, so that the last programs may have none.
    """
    num_candidates = len(candidate_to_request)
    tiles_2R = torch.empty(2, num_requests + 1, dtype=torch.int64, device=candidate_to_request.device)
    with torch.cuda.device_of(tiles_2R):
        tiles_kernel[(1,)](
            candidate_to_request.contiguous(),
            tiles_2R,
            num_candidates,
            num_requests,
            num_candidates.bit_length(),
            rows_a_tile,
            rows_a_candidate,
            BLOCK_R=256,
        )
    return tiles_2R, triton.cdiv(num_candidates * rows_a_candidate, rows_a_tile) + min(num_requests, num_candidates)


def broadcast_attention_triton(
    query_BHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    lengths_R: Tensor,
    candidate_to_request: Tensor,
    event_logits_TH: Tensor | None = None,
    blocks: AttentionBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from each candidate over its request's events; forward only.

    For lengths_R = [2, 0, 1] and candidate_to_request = [0, 0, 1, 2] the pairs are:

        events        e0 e1 |    | e2
        candidates    c0 c1 | c2 | c3      c2 has no event: out 0, logsumexp -inf

    Args:
        query_BHD: (B, H, D) floats, D at most 256.
        key_THD: (T, H, D) of the same dtype, events of all requests, one request after the other.
        value_THD: (T, H, D) likewise.
        lengths_R: (R,) integer, events of each request, T in sum; 0 is legal.
        candidate_to_request: (B,) integer, ascending, each below R.
        event_logits_TH: (T, H) floats, added to the scaled logits of each event for every candidate; None for zeros.
        blocks: None for `attention_blocks`.

    Returns:
        (B, H, D) of the query's dtype, and (B, H) float32: the natural logarithm of the softmax's denominator. Both are
        accumulated in float32.

    Raises:
        ValueError: dtypes differ or are none that the kernel takes, shapes disagree, or D is above 256.
    """
    check_kernel_dtypes(query=query_BHD, key=key_THD, value=value_THD)
    _check_shapes(query_BHD, key_THD, value_THD, event_logits_TH)
    num_candidates, num_heads, dim = query_BHD.shape
    out_BHD = torch.empty_like(query_BHD, memory_format=torch.contiguous_format)
    logsumexp_BH = query_BHD.new_empty((num_candidates, num_heads), dtype=torch.float32)
    if out_BHD.numel() == 0:
        return out_BHD, logsumexp_BH
    num_requests, dtype = lengths_R.shape[0], query_BHD.dtype
    blocks = blocks or attention_blocks(num_candidates, num_requests, num_heads, dim, dtype)
    tiles_2R, num_programs = request_tiles(candidate_to_request, num_requests, blocks.block_c)
    event_ends = lengths_R.cumsum(0, dtype=torch.int64)
    with torch.cuda.device_of(query_BHD):
        attention_kernel[(num_programs, num_heads)](
            query_BHD,
            key_THD,
            value_THD,
            event_logits_TH,
            event_ends,
            lengths_R.contiguous(),
            tiles_2R,
            out_BHD,
            logsumexp_BH,
            math.log2(math.e) / math.sqrt(dim),
            num_requests,
            num_heads,
            dim,
            *query_BHD.stride(),
            *key_THD.stride(),
            *value_THD.stride(),
            *((0, 0) if event_logits_TH is None else event_logits_TH.stride()),
            BLOCK_C=blocks.block_c,
            BLOCK_L=blocks.block_l,
            BLOCK_D=power_of_two(dim, 16, MAX_HEAD_DIM),
            PRECISION=product_precision(dtype),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    return out_BHD, logsumexp_BH


def _check_shapes(query_BHD: Tensor, key_THD: Tensor, value_THD: Tensor, event_logits_TH: Tensor | None) -> None:
    heads = {
        name: tuple(part.shape[1:]) for name, part in (("query", query_BHD), ("key", key_THD), ("value", value_THD))
    }
    if len(set(heads.values())) > 1:
        raise ValueError(f"(heads, head dim) are {heads}; make them equal")
    if query_BHD.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim={query_BHD.shape[2]} must be at most {MAX_HEAD_DIM}; use more heads, or the plain operator"
        )
    if value_THD.shape[0] != key_THD.shape[0]:
        raise ValueError(f"{key_THD.shape[0]} keys and {value_THD.shape[0]} values; give one of each for every event")
    if event_logits_TH is not None:
        check_kernel_dtypes(event_logits=event_logits_TH)
        if event_logits_TH.shape != key_THD.shape[:2]:
            raise ValueError(
                f"event_logits are of shape {tuple(event_logits_TH.shape)}, events and heads are "
                f"{tuple(key_THD.shape[:2])}; give one logit for each of both"
            )


@triton.jit
def tiles_kernel(
    index,
    tiles,
    num_candidates,
    num_requests,
    num_steps,
    rows_a_tile,
    rows_a_candidate,
    BLOCK_R: tl.constexpr,
):
    """One program for all requests, a lane for each."""
    lane = tl.arange(0, BLOCK_R)
    tiles_before = tl.sum(tl.zeros((BLOCK_R,), dtype=tl.int64), 0)
    for start in range(0, num_requests + 1, BLOCK_R):
        request = start + lane
        first = _first_candidate(index, request, num_candidates, num_steps).to(tl.int64) * rows_a_candidate
        end = _first_candidate(index, request + 1, num_candidates, num_steps).to(tl.int64) * rows_a_candidate
        num_tiles = (end - first + (rows_a_tile - 1)) // rows_a_tile
        mask = request <= num_requests
        tl.store(tiles + request, first, mask=mask)
        first_tile = tiles_before + tl.cumsum(num_tiles, 0) - num_tiles
        tl.store(tiles + num_requests + 1 + request, first_tile, mask=mask)
        tiles_before += tl.sum(num_tiles, 0)


@triton.jit
def _first_candidate(index, request, num_candidates, num_steps):
    """Candidates of the requests before this one, by binary search."""
    low = tl.zeros_like(request)
    high = low + num_candidates
    for _ in range(num_steps):
        middle = (low + high) // 2
        within = low < high
        before = within & (tl.load(index + middle, mask=within, other=0) < request)
        high = tl.where(within & ~before, middle, high)
        low = tl.where(before, middle + 1, low)
    return low


@triton.jit
def find_tile(tiles, num_requests, rows_a_tile):
    """Request, first row and rows of this program's tile; 0 rows or fewer for a program beyond the last tile."""
    tile = tl.program_id(0)
    first_tiles = tiles + num_requests + 1
    low = tile * 0
    high = low + num_requests
    while low < high:  # the last request whose first tile is this one or before it
        middle = (low + high + 1) // 2
        reached = tl.load(first_tiles + middle) <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    first_row = tl.load(tiles + low) + (tile - tl.load(first_tiles + low)) * rows_a_tile
    end = tl.load(tiles + low + 1, mask=low < num_requests, other=0)
    return low, first_row, tl.minimum(end - first_row, rows_a_tile)


@triton.jit
def attention_kernel(
    query,
    key,
    value,
    logits,
    event_ends,
    lengths,
    tiles,
    out,
    logsumexp,
    scale,
    num_requests,
    num_heads,
    dim,
    query_row_stride,
    query_head_stride,
    query_dim_stride,
    key_row_stride,
    key_head_stride,
    key_dim_stride,
    value_row_stride,
    value_head_stride,
    value_dim_stride,
    logits_row_stride,
    logits_head_stride,
    BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of candidates, one head; `scale` has the log2(e) that turns exp into exp2."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    request, first_row, num_rows = find_tile(tiles, num_requests, BLOCK_C)
    if num_rows <= 0:
        return
    head = tl.program_id(1).to(tl.int64)
    num_events = tl.load(lengths + request).to(tl.int32)
    first_event = tl.load(event_ends + request) - num_events
    c = tl.arange(0, BLOCK_C)
    event = tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    row_mask = c < num_rows
    d_mask = d < dim
    mask = row_mask[:, None] & d_mask[None, :]
    # scalar bases are 64 bits wide, so that offsets within a tile can stay 32
    queries = query + first_row * query_row_stride + head * query_head_stride
    queries += (c * query_row_stride)[:, None] + (d * query_dim_stride)[None, :]
    q = tl.load(queries, mask=mask, other=0.0)
    keys = key + head * key_head_stride + (event * key_row_stride)[None, :] + (d * key_dim_stride)[:, None]
    values = value + head * value_head_stride + (event * value_row_stride)[:, None] + (d * value_dim_stride)[None, :]
    maximum = tl.full((BLOCK_C,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_C, BLOCK_D), dtype=tl.float32)
    for start in range(0, num_events, BLOCK_L):
        event_mask = start + event < num_events
        first = first_event + start
        k = tl.load(keys + first * key_row_stride, mask=d_mask[:, None] & event_mask[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if logits is not None:
            extra = logits + first * logits_row_stride + head * logits_head_stride + event * logits_row_stride
            scores += (tl.load(extra, mask=event_mask, other=0.0).to(tl.float32) * LOG2_E)[None, :]
        scores = tl.where(event_mask[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        # where every logit so far is -inf, -inf - -inf would be NaN
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - reference[:, None])
        rescale = tl.exp2(maximum - reference)
        total = total * rescale + tl.sum(p, 1)
        v = tl.load(values + first * value_row_stride, mask=event_mask[:, None] & d_mask[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        maximum = higher
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    log_total = tl.where(empty, float("-inf"), (maximum + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    first_place = first_row * num_heads + head
    tl.store(logsumexp + first_place + c * num_heads, log_total, mask=row_mask)
    places = out + first_place * dim + (c * (num_heads * dim))[:, None] + d[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=mask)
