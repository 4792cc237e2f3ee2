"""`broadcast_linear` as a Triton GEMM whose epilogue adds the request's share.

out[b] = W_c X_c[b] + (W_r X_r)[r(b)]

The candidates' tokens are one matrix of B * D columns, so that one kernel serves every D, down to 1 (a plain linear
over concatenated features). It runs twice: at R rows for the request's share, which stays in float32, and at B rows.
Source: PyTorch blog "In-Kernel Broadcast Optimization", linear compression embedding.

Shape letters: R requests, B candidates, K tokens of a side, M output tokens, D embedding dim; N = B * D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_adaptive.ops.triton_blocks import check_kernel_dtypes, power_of_two, product_precision

_ALIGNMENT = 16  # elements: what Triton specialises on, and at least what a 16-byte load needs


@dataclass(frozen=True)
class LinearBlocks:
    """Block sizes of one launch.

    Args:
        block_m: output tokens a program.
        block_n: columns (candidate, dim) a program.
        block_k: input tokens a step.
        num_warps: warps a program.
        num_stages: steps in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def linear_blocks(num_outputs: int, num_columns: int, dtype: torch.dtype) -> LinearBlocks:
    """Block sizes from the sizes alone.

    Args:
        num_outputs: M.
        num_columns: N.
        dtype: of the operands.

    Returns:
        The blocks, M padded as little as possible.

    Example:
        >>> linear_blocks(433, 262144, torch.bfloat16)
        LinearBlocks(block_m=64, block_n=256, block_k=64, num_warps=8, num_stages=3)
    """
    if dtype == torch.float32:
        block_m, block_n = power_of_two(num_outputs, 16, 64), power_of_two(num_columns, 16, 64)
        return LinearBlocks(block_m, block_n, 32, num_warps=4, num_stages=2)
    block_m = power_of_two(num_outputs, 16, 128)
    if block_m == 128 and 0 < num_outputs % 128 <= 64:
        block_m = 64
    block_n = power_of_two(num_columns, 16, 128 if block_m == 128 else 256)
    return LinearBlocks(block_m, block_n, 64, num_warps=4 if block_m * block_n <= 64 * 128 else 8, num_stages=3)


def broadcast_linear_triton(
    weight_MK: Tensor,
    candidate_BKD: Tensor,
    request_RKD: Tensor,
    candidate_to_request: Tensor,
    blocks: LinearBlocks | None = None,
) -> Tensor:
    """Mix tokens of the request and of the candidate into M tokens.

    Args:
        weight_MK: (M, K_r + K_c) floats, the request's columns first.
        candidate_BKD: (B, K_c, D) of the same dtype.
        request_RKD: (R, K_r, D) likewise.
        candidate_to_request: (B,) integer, each below R.
        blocks: of the product at B rows; None for `linear_blocks`.

    Returns:
        (B, M, D) of the candidate's dtype. The two halves are added in float32.

    Raises:
        ValueError: dtypes differ or are none that the kernel takes, or the weight's columns are not K_r + K_c.
    """
    check_kernel_dtypes(weight=weight_MK, candidate=candidate_BKD, request=request_RKD)
    split = request_RKD.shape[1]
    if weight_MK.shape[1] != split + candidate_BKD.shape[1]:
        raise ValueError(
            f"weight has {weight_MK.shape[1]} columns, but the request has {split} tokens and the candidate "
            f"{candidate_BKD.shape[1]}; columns and tokens must agree"
        )
    share_RMD = request_share_triton(weight_MK[:, :split], request_RKD) if split and len(candidate_BKD) else None
    weight_c, dtype = weight_MK[:, split:], candidate_BKD.dtype
    return _launch(weight_c, candidate_BKD, share_RMD, candidate_to_request, dtype, blocks)


def request_share_triton(weight_MK: Tensor, request_RKD: Tensor, blocks: LinearBlocks | None = None) -> Tensor:
    """The request's term, once a request.

    Args:
        weight_MK: (M, K_r) floats.
        request_RKD: (R, K_r, D) of the same dtype.
        blocks: None for `linear_blocks`.

    Returns:
        (R, M, D) float32: products of the given dtype, summed and kept in float32.
    """
    return _launch(weight_MK, request_RKD, None, None, torch.float32, blocks)


def _launch(
    weight_MK: Tensor,
    inputs_BKD: Tensor,
    share_RMD: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype,
    blocks: LinearBlocks | None,
) -> Tensor:
    num_rows, num_tokens, dim = inputs_BKD.shape
    num_outputs = weight_MK.shape[0]
    out_BMD = inputs_BKD.new_empty((num_rows, num_outputs, dim), dtype=out_dtype)
    if out_BMD.numel() == 0:
        return out_BMD
    weight_MK = _aligned(weight_MK)
    blocks = blocks or linear_blocks(num_outputs, num_rows * dim, inputs_BKD.dtype)
    grid = (triton.cdiv(num_outputs, blocks.block_m) * triton.cdiv(num_rows * dim, blocks.block_n),)
    with torch.cuda.device_of(inputs_BKD):
        linear_kernel[grid](
            weight_MK,
            inputs_BKD,
            share_RMD,
            None if index is None else index.contiguous(),
            out_BMD,
            num_outputs,
            num_rows * dim,
            num_tokens,
            weight_MK.shape[1],
            dim,
            weight_MK.stride(0),
            *inputs_BKD.stride(),
            BLOCK_M=blocks.block_m,
            BLOCK_N=blocks.block_n,
            BLOCK_K=blocks.block_k,
            PRECISION=product_precision(inputs_BKD.dtype),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
    return out_BMD


def _aligned(weight_MK: Tensor) -> Tensor:
    """Rows of a multiple of 16 elements that start at 16 bytes, zeros at their end; a copy only where they are not so.

    A half of the weight starts anywhere in a row of any length; unaligned, each element would be a load of its own.
    """
    num_columns = weight_MK.shape[1]
    fits = num_columns % _ALIGNMENT == 0 and weight_MK.stride(0) % _ALIGNMENT == 0 and weight_MK.stride(1) == 1
    if fits and weight_MK.data_ptr() % 16 == 0:
        return weight_MK
    padded = weight_MK.new_zeros(weight_MK.shape[0], triton.cdiv(num_columns, _ALIGNMENT) * _ALIGNMENT)
    padded[:, :num_columns] = weight_MK
    return padded


@triton.jit
def linear_kernel(
    weight,
    inputs,
    share,
    index,
    out,
    num_outputs,
    num_columns,
    num_tokens,
    num_padded_tokens,
    dim,
    weight_stride,
    row_stride,
    token_stride,
    dim_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of M x N; tiles that read the same inputs are neighbours, so that those are read from memory once."""
    num_tiles_m = tl.cdiv(num_outputs, BLOCK_M)
    m = (tl.program_id(0) % num_tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // num_tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < num_outputs
    n_mask = n < num_columns
    row = n // dim
    column = n % dim
    weight_rows = weight + m.to(tl.int64)[:, None] * weight_stride
    input_columns = inputs + (row.to(tl.int64) * row_stride + column * dim_stride)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, num_padded_tokens, BLOCK_K):
        token = start + k
        w = tl.load(
            weight_rows + token[None, :], mask=m_mask[:, None] & (token < num_padded_tokens)[None, :], other=0.0
        )
        x_mask = (token < num_tokens)[:, None] & n_mask[None, :]
        x = tl.load(input_columns + token[:, None] * token_stride, mask=x_mask, other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    mask = m_mask[:, None] & n_mask[None, :]
    place = m[:, None] * dim + column[None, :]
    if share is not None:
        request = tl.load(index + row, mask=n_mask, other=0).to(tl.int64)
        acc += tl.load(share + (request * num_outputs * dim)[None, :] + place, mask=mask, other=0.0)
    out_columns = out + (row.to(tl.int64) * num_outputs * dim)[None, :]
    tl.store(out_columns + place, acc.to(out.dtype.element_ty), mask=mask)
