"""Linear compression over tokens of both sides, the request's share done once a request.

out[b] = W_c X_c[b] + (W_r X_r)[r(b)]

which is W [X_r[r(b)]; X_c[b]] with W = [W_r, W_c], without the copy of X_r for each candidate.
Source: PyTorch blog "In-Kernel Broadcast Optimization", linear compression embedding. The two halves are added in
float32, as there, so that low precision matches the undivided product.

| device | file |
| --- | --- |
| CPU | broadcast_linear_cpu.py |
| CUDA | broadcast_linear_triton.py |
| any, with the copy | broadcast_linear_reference.py |

Shape letters: R requests, B candidates, K tokens of a side, M output tokens, D embedding dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchrec_adaptive.ops.broadcast_linear_cpu import broadcast_linear_cpu
from torchrec_adaptive.ops.operands import check_sides, left_product, one_dtype, plain_region
from torchrec_adaptive.ops.segments import num_request_tokens, segment_sum
from torchrec_adaptive.request import Broadcast


def broadcast_linear(weight_MK: Tensor, candidate_BKD: Tensor, request: Broadcast | None) -> Tensor:
    """Mix tokens of the request and of the candidate into M tokens.

    Without D, it is the linear layer over concatenated features [x_r; x_c].

    Args:
        weight_MK: (M, K_r + K_c) floats, the request's columns first.
        candidate_BKD: (B, K_c, D), or (B, K_c).
        request: values (R, K_r, D), or (R, K_r); None where the candidate has all the tokens.

    Returns:
        (B, M, D), or (B, M), of the operands' dtype.

    Raises:
        ValueError: the weight's columns are not the sum of both sides' tokens, the dims of the sides differ, operands
            lie on different devices, or the index is unsorted or out of range (seen on the CPU only).

    Example:
        >>> user = Broadcast(torch.ones(1, 1, 2), torch.tensor([0, 0]))
        >>> broadcast_linear(torch.tensor([[10.0, 1.0]]), torch.arange(4.0).view(2, 1, 2), user).tolist()
        [[[10.0, 11.0]], [[12.0, 13.0]]]
    """
    num_request_tokens(weight_MK.shape[1], "the weight columns", candidate_BKD, request)
    if request is None:
        if candidate_BKD.dim() == 2:
            return torch.nn.functional.linear(candidate_BKD, weight_MK)
        return left_product(weight_MK, candidate_BKD)
    values, index = request.values, request.candidate_to_request
    check_sides(
        index, candidate_BKD.shape[0], values.shape[0], weight=weight_MK, candidate=candidate_BKD, request=values
    )
    weight_MK, candidate_BKD, values = one_dtype(weight_MK, candidate_BKD, values)
    with plain_region(candidate_BKD):
        if candidate_BKD.dim() == 2:
            return broadcast_linear_op(weight_MK, candidate_BKD.unsqueeze(2), values.unsqueeze(2), index).squeeze(2)
        return broadcast_linear_op(weight_MK, candidate_BKD, values, index)


@torch.library.custom_op("torchrec_adaptive::broadcast_linear", mutates_args=(), device_types="cpu")
def broadcast_linear_op(
    weight_MK: Tensor, candidate_BKD: Tensor, request_RKD: Tensor, candidate_to_request: Tensor
) -> Tensor:
    """The operator behind `broadcast_linear`, operands checked and of one dtype."""
    return broadcast_linear_cpu(weight_MK, candidate_BKD, request_RKD, candidate_to_request)


@broadcast_linear_op.register_kernel("cuda")
def _cuda(weight_MK: Tensor, candidate_BKD: Tensor, request_RKD: Tensor, candidate_to_request: Tensor) -> Tensor:
    if candidate_BKD.dtype == torch.float64:
        once_RMD = torch.matmul(weight_MK[:, : request_RKD.shape[1]], request_RKD)
        share_BMD = torch.matmul(weight_MK[:, request_RKD.shape[1] :], candidate_BKD)
        return share_BMD + once_RMD.index_select(0, candidate_to_request)
    from torchrec_adaptive.ops.broadcast_linear_triton import broadcast_linear_triton  # loads Triton

    return broadcast_linear_triton(weight_MK, candidate_BKD, request_RKD, candidate_to_request)


@broadcast_linear_op.register_fake
def _fake(weight_MK: Tensor, candidate_BKD: Tensor, request_RKD: Tensor, candidate_to_request: Tensor) -> Tensor:
    return candidate_BKD.new_empty(candidate_BKD.shape[0], weight_MK.shape[0], candidate_BKD.shape[2])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BMD: Tensor) -> tuple[Tensor | None, ...]:
    weight, candidate, request, index = ctx.saved_tensors
    return (*linear_gradients(weight, candidate, request, index, grad_BMD, ctx.needs_input_grad), None)


def linear_gradients(
    weight_MK: Tensor,
    candidate_BKD: Tensor,
    request_RKD: Tensor,
    candidate_to_request: Tensor,
    grad_BMD: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the operands; the request's are of R rows, the candidates' of a request summed first.

    Args:
        weight_MK: as given to the operator.
        candidate_BKD: likewise.
        request_RKD: likewise.
        candidate_to_request: likewise.
        grad_BMD: (B, M, D), the gradient of the result.
        needed: which of the first three are wanted.

    Returns:
        Gradients of weight, candidate and request; None where not wanted.
    """
    split = request_RKD.shape[1]
    weight_r, weight_c = weight_MK[:, :split], weight_MK[:, split:]
    grad_weight = grad_candidate = grad_request = None
    if needed[1]:
        grad_candidate = torch.matmul(weight_c.mT, grad_BMD)
    if needed[0] or needed[2]:
        grad_RMD = segment_sum(grad_BMD, candidate_to_request, request_RKD.shape[0])
        if needed[2]:
            grad_request = torch.matmul(weight_r.mT, grad_RMD)
        if needed[0]:
            grad_weight = torch.cat(
                [
                    torch.einsum("rmd,rkd->mk", grad_RMD, request_RKD),
                    torch.einsum("bmd,bkd->mk", grad_BMD, candidate_BKD),
                ],
                dim=1,
            )
    return grad_weight, grad_candidate, grad_request


broadcast_linear_op.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.torchrec_adaptive.broadcast_linear)
def linear_flops(weight: torch.Size, candidate: torch.Size, request: torch.Size, *_: Any, **__: Any) -> int:
    """Multiplications and additions: the request's tokens count once a request.

    Args:
        weight: shape (M, K).
        candidate: shape (B, K_c, D).
        request: shape (R, K_r, D).

    Returns:
        FLOPs.
    """
    num_outputs = weight[0]
    return 2 * num_outputs * (candidate[0] * candidate[1] * candidate[2] + request[0] * request[1] * request[2])
