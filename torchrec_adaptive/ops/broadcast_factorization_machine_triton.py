"""The optimised factorization machine over tokens of both sides as Triton kernels.

out[b] = Z[b]^T X[b]^T,  Z[b] = X_r[r(b)]^T Y_r + X_c[b]^T Y_c,  X[b] = [X_r[r(b)]; X_c[b]]

Z^T is a broadcast linear with the weight Y^T, so that its request's term is done once a request. Then one kernel runs
twice: rows (candidate, k) of one request against the tokens of the request, which are read once a tile, and those of
one candidate against its own tokens. Z is rounded to the inputs' dtype once, after its terms are added in float32.
Source: Wukong, arXiv 2403.02545, section 3.3.

Shape letters: R requests, B candidates, N tokens, D embedding dim, K rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_adaptive.ops.broadcast_attention_triton import find_tile, request_tiles
from torchrec_adaptive.ops.broadcast_linear_triton import broadcast_linear_triton
from torchrec_adaptive.ops.triton_blocks import check_kernel_dtypes, power_of_two, product_precision


@dataclass(frozen=True)
class ProductBlocks:
    """Block sizes of one launch.

    Args:
        block_m: rows (candidate, k) a program, all of one request or of one candidate.
        block_n: tokens a program.
        block_d: of the embedding dim, a step.
        num_warps: warps a program.
        num_stages: steps in flight.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def product_blocks(num_rows: int, num_tokens: int, dim: int, dtype: torch.dtype) -> ProductBlocks:
    """Block sizes from the sizes alone.

    Args:
        num_rows: rows that share their tokens: about K * B / R for a request's, K for a candidate's.
        num_tokens: N of the side.
        dim: D.
        dtype: of the operands.

    Returns:
        The blocks.

    Example:
        >>> product_blocks(32, 40, 128, torch.bfloat16)
        ProductBlocks(block_m=32, block_n=64, block_d=64, num_warps=4, num_stages=3)
    """
    if dtype == torch.float32:
        block_m, block_n = power_of_two(num_rows, 16, 64), power_of_two(num_tokens, 16, 64)
        return ProductBlocks(block_m, block_n, power_of_two(dim, 16, 32), num_warps=4, num_stages=2)
    block_m, block_n = power_of_two(num_rows, 16, 128), power_of_two(num_tokens, 16, 128)
    num_warps = 4 if block_m * block_n <= 64 * 128 else 8
    return ProductBlocks(block_m, block_n, power_of_two(dim, 16, 64), num_warps, num_stages=3)


def broadcast_factorization_machine_triton(
    projection_NK: Tensor,
    candidate_BND: Tensor,
    request_RND: Tensor,
    candidate_to_request: Tensor,
    blocks: ProductBlocks | None = None,
) -> Tensor:
    """Products of K learnt combinations of all tokens with every token; forward only.

    Args:
        projection_NK: (N_r + N_c, K) floats, Y; the request's rows first.
        candidate_BND: (B, N_c, D) of the same dtype.
        request_RND: (R, N_r, D) likewise.
        candidate_to_request: (B,) integer, ascending, each below R.
        blocks: of the products with the tokens; None for `product_blocks` of each side.

    Returns:
        (B, K, N_r + N_c) of the candidate's dtype, the request's tokens first.

    Raises:
        ValueError: dtypes differ or are none that the kernels take, the projection's rows are not N_r + N_c, or the
            sides differ in D.
    """
    check_kernel_dtypes(projection=projection_NK, candidate=candidate_BND, request=request_RND)
    num_candidates, num_own, dim = candidate_BND.shape
    num_requests, num_shared, request_dim = request_RND.shape
    num_tokens, rank = projection_NK.shape
    if num_tokens != num_shared + num_own:
        raise ValueError(
            f"projection has {num_tokens} rows, but the request has {num_shared} tokens and the candidate {num_own}; "
            f"rows and tokens must agree"
        )
    if request_dim != dim:
        raise ValueError(f"tokens of the request have dim {request_dim}, those of the candidate {dim}; make them equal")
    out_BKN = candidate_BND.new_empty((num_candidates, rank, num_tokens))
    if out_BKN.numel() == 0:
        return out_BKN
    combined_BKD = broadcast_linear_triton(projection_NK.mT, candidate_BND, request_RND, candidate_to_request)
    if num_shared:
        rows_a_request = triton.cdiv(num_candidates * rank, num_requests)
        shared = blocks or product_blocks(rows_a_request, num_shared, dim, candidate_BND.dtype)
        tiles = request_tiles(candidate_to_request, num_requests, shared.block_m, rank)
        _launch(combined_BKD, request_RND, tiles, out_BKN[..., :num_shared], shared)
    if num_own:
        own = blocks or product_blocks(rank, num_own, dim, candidate_BND.dtype)
        _launch(combined_BKD, candidate_BND, None, out_BKN[..., num_shared:], own)
    return out_BKN


def _launch(
    combined_BKD: Tensor, tokens_OND: Tensor, tiles: tuple[Tensor, int] | None, out_BKN: Tensor, blocks: ProductBlocks
) -> None:
    """Fill the columns of one side. O, the owners of the tokens, are requests with tiles and candidates without."""
    num_candidates, rank, dim = combined_BKD.shape
    tiles_a_candidate = triton.cdiv(rank, blocks.block_m)
    tiles_2R, num_programs = (None, num_candidates * tiles_a_candidate) if tiles is None else tiles
    num_owners, num_tokens, _ = tokens_OND.shape
    grid = (num_programs, triton.cdiv(num_tokens, blocks.block_n))
    with torch.cuda.device_of(combined_BKD):
        product_kernel[grid](
            combined_BKD,
            tokens_OND,
            tiles_2R,
            out_BKN,
            num_owners,
            tiles_a_candidate,
            rank,
            num_tokens,
            dim,
            out_BKN.stride(1),
            *tokens_OND.stride(),
            BLOCK_M=blocks.block_m,
            BLOCK_N=blocks.block_n,
            BLOCK_D=blocks.block_d,
            PRECISION=product_precision(combined_BKD.dtype),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )


@triton.jit
def product_kernel(
    combined,
    tokens,
    tiles,
    out,
    num_owners,
    tiles_a_candidate,
    rank,
    num_tokens,
    dim,
    out_stride,
    owner_stride,
    token_stride,
    dim_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of one owner times its tokens; the owner comes from `tiles`, or is the candidate itself without them."""
    if tiles is not None:
        owner, first_row, num_rows = find_tile(tiles, num_owners, BLOCK_M)
        if num_rows <= 0:
            return
    else:
        tile = tl.program_id(0)
        owner = tile // tiles_a_candidate
        place = (tile % tiles_a_candidate) * BLOCK_M
        num_rows = rank - place
        first_row = owner.to(tl.int64) * rank + place
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    m_mask = m < num_rows
    n_mask = n < num_tokens
    # scalar bases are 64 bits wide, so that offsets within a tile can stay 32
    combined_rows = combined + first_row * dim + (m * dim)[:, None]
    token_columns = tokens + owner.to(tl.int64) * owner_stride + (n * token_stride)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, dim, BLOCK_D):
        step = start + d
        step_mask = step < dim
        z = tl.load(combined_rows + step[None, :], mask=m_mask[:, None] & step_mask[None, :], other=0.0)
        x = tl.load(token_columns + (step * dim_stride)[:, None], mask=step_mask[:, None] & n_mask[None, :], other=0.0)
        acc = tl.dot(z, x, acc, input_precision=PRECISION)
    places = out + first_row * out_stride + (m * out_stride)[:, None] + n[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])
