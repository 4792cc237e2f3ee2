"""The optimised factorization machine over tokens of both sides, the request's share done once a request.

FM(X) = X (X^T Y),  X = [X_r; X_c] (n, d), Y (n, k):  O(n d k) in place of the O(n^2 d) of X X^T.
X^T Y = X_r^T Y_r + X_c^T Y_c, and its first term belongs to the request. The two terms are added in float32.
Source: Wukong, arXiv 2403.02545, section 3.3.

| device | file |
| --- | --- |
| CPU | broadcast_factorization_machine_cpu.py |
| CUDA | broadcast_factorization_machine_triton.py |
| any, with the copy | broadcast_factorization_machine_reference.py |

Shape letters: R requests, B candidates, N tokens, D embedding dim, K rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchrec_adaptive.ops.broadcast_factorization_machine_cpu import broadcast_factorization_machine_cpu
from torchrec_adaptive.ops.broadcast_linear import linear_flops, linear_gradients
from torchrec_adaptive.ops.operands import check_sides, left_product, one_dtype, plain_region
from torchrec_adaptive.ops.segments import num_request_tokens, segment_sum
from torchrec_adaptive.request import Broadcast


def broadcast_factorization_machine(projection_NK: Tensor, candidate_BND: Tensor, request: Broadcast | None) -> Tensor:
    """Products of every token with K learnt combinations of all tokens.

    Args:
        projection_NK: (N_r + N_c, K) floats, Y; the request's rows first.
        candidate_BND: (B, N_c, D).
        request: values (R, N_r, D), or None where the candidate has all the tokens.

    Returns:
        (B, N_r + N_c, K), the request's rows first. In memory K comes before N, so that `.mT.flatten(1)` is a view and
        `.flatten(1)` a copy.

    Raises:
        ValueError: the projection's rows are not the sum of both sides' tokens, the dims of the sides differ, operands
            lie on different devices, or the index is unsorted or out of range (seen on the CPU only).
    """
    num_request_tokens(projection_NK.shape[0], "the projection rows", candidate_BND, request)
    if request is None:
        return torch.matmul(left_product(projection_NK.mT, candidate_BND), candidate_BND.mT).mT
    values, index = request.values, request.candidate_to_request
    num_candidates, num_requests = candidate_BND.shape[0], values.shape[0]
    check_sides(index, num_candidates, num_requests, projection=projection_NK, candidate=candidate_BND, request=values)
    projection_NK, candidate_BND, values = one_dtype(projection_NK, candidate_BND, values)
    with plain_region(candidate_BND):
        return broadcast_factorization_machine_op(projection_NK, candidate_BND, values, index).mT


@torch.library.custom_op("torchrec_adaptive::broadcast_factorization_machine", mutates_args=(), device_types="cpu")
def broadcast_factorization_machine_op(
    projection_NK: Tensor, candidate_BND: Tensor, request_RND: Tensor, candidate_to_request: Tensor
) -> Tensor:
    """The operator behind `broadcast_factorization_machine`: (B, K, N), operands checked and of one dtype."""
    return broadcast_factorization_machine_cpu(projection_NK, candidate_BND, request_RND, candidate_to_request)


@broadcast_factorization_machine_op.register_kernel("cuda")
def _cuda(projection_NK: Tensor, candidate_BND: Tensor, request_RND: Tensor, candidate_to_request: Tensor) -> Tensor:
    if candidate_BND.dtype == torch.float64:
        copied_BND = torch.cat([request_RND.index_select(0, candidate_to_request), candidate_BND], dim=1)
        return torch.matmul(torch.matmul(projection_NK.mT, copied_BND), copied_BND.mT)
    from torchrec_adaptive.ops.broadcast_factorization_machine_triton import (  # loads Triton
        broadcast_factorization_machine_triton,
    )

    return broadcast_factorization_machine_triton(projection_NK, candidate_BND, request_RND, candidate_to_request)


@broadcast_factorization_machine_op.register_fake
def _fake(projection_NK: Tensor, candidate_BND: Tensor, request_RND: Tensor, candidate_to_request: Tensor) -> Tensor:
    return candidate_BND.new_empty(candidate_BND.shape[0], projection_NK.shape[1], projection_NK.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BKN: Tensor) -> tuple[Tensor | None, ...]:
    """Through Z X^T with Z = Y^T X: Z is made again, which costs less than to keep it."""
    projection_NK, candidate_BND, request_RND, index = ctx.saved_tensors
    split = request_RND.shape[1]
    once_RKD = torch.matmul(projection_NK[:split].mT, request_RND)
    combined_BKD = torch.matmul(projection_NK[split:].mT, candidate_BND) + once_RKD.index_select(0, index)
    grad_r, grad_c = grad_BKN[:, :, :split], grad_BKN[:, :, split:]
    grad_BKD = torch.matmul(grad_c, candidate_BND) + torch.matmul(grad_r, request_RND.index_select(0, index))
    needed = ctx.needs_input_grad
    grad_weight, grad_candidate, grad_request = linear_gradients(
        projection_NK.mT, candidate_BND, request_RND, index, grad_BKD, needed
    )
    if grad_candidate is not None:
        grad_candidate = grad_candidate + torch.matmul(grad_c.mT, combined_BKD)
    if grad_request is not None:
        grad_request = grad_request + segment_sum(torch.matmul(grad_r.mT, combined_BKD), index, request_RND.shape[0])
    return None if grad_weight is None else grad_weight.mT, grad_candidate, grad_request, None


broadcast_factorization_machine_op.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.torchrec_adaptive.broadcast_factorization_machine)
def _flops(projection: torch.Size, candidate: torch.Size, request: torch.Size, *_: Any, **__: Any) -> int:
    num_tokens, rank = projection
    products = 2 * candidate[0] * rank * num_tokens * candidate[2]
    return products + linear_flops(torch.Size((rank, num_tokens)), candidate, request)
