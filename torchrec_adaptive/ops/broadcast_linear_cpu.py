"""`broadcast_linear` on a CPU: each request's share is the addend of its candidates' product.

Candidates of one request stand side by side, so that one library call a request writes them in place, the share being
added in the product's own epilogue: nothing is gathered, and the result is written once.
Where the requests have few candidates, one call over all of them, with the shares gathered, is faster than many.

Shape letters: R requests, B candidates, K tokens of a side, M output tokens, D embedding dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.ops.segments import segments_of

_LEAST_FLOPS = 2_000_000  # of a call a request; below, a call over all requests costs less


def broadcast_linear_cpu(
    weight_MK: Tensor, candidate_BKD: Tensor, request_RKD: Tensor, candidate_to_request: Tensor
) -> Tensor:
    """Mix tokens of the request and of the candidate into M tokens.

    bfloat16 and float16 are multiplied and added in float32, which is faster on CPUs without instructions for them.

    Args:
        weight_MK: (M, K_r + K_c) floats, the request's columns first.
        candidate_BKD: (B, K_c, D) of the same dtype.
        request_RKD: (R, K_r, D) likewise.
        candidate_to_request: (B,) integer, ascending, each below R.

    Returns:
        (B, M, D) of the candidate's dtype.
    """
    dtype = candidate_BKD.dtype
    if dtype in (torch.bfloat16, torch.float16):
        weight_MK, candidate_BKD, request_RKD = (weight_MK.float(), candidate_BKD.float(), request_RKD.float())
        return broadcast_linear_cpu(weight_MK, candidate_BKD, request_RKD, candidate_to_request).to(dtype)
    num_candidates, num_tokens, dim = candidate_BKD.shape
    num_outputs, split = weight_MK.shape[0], request_RKD.shape[1]
    weight_r, weight_c = weight_MK[:, :split], weight_MK[:, split:]
    out_BMD = candidate_BKD.new_empty(num_candidates, num_outputs, dim)
    if out_BMD.numel() == 0:
        return out_BMD
    if dim == 1:
        return _columns(weight_c, candidate_BKD, request_RKD.squeeze(2) @ weight_r.mT, candidate_to_request, out_BMD)
    once_RMD = torch.matmul(weight_r, request_RKD)
    num_requests = request_RKD.shape[0]
    if 2 * num_outputs * num_tokens * dim * num_candidates < _LEAST_FLOPS * num_requests:
        shares_BMD = once_RMD.index_select(0, candidate_to_request)
        weight = weight_c.expand(num_candidates, num_outputs, num_tokens)
        return torch.baddbmm(shares_BMD, weight, candidate_BKD, out=out_BMD)
    for request, low, high in segments_of(candidate_to_request, num_requests):
        torch.baddbmm(
            once_RMD[request : request + 1].expand(high - low, num_outputs, dim),
            weight_c.expand(high - low, num_outputs, num_tokens),
            candidate_BKD[low:high],
            out=out_BMD[low:high],
        )
    return out_BMD


def _columns(weight_c: Tensor, candidate_BKD: Tensor, once_RM: Tensor, index: Tensor, out_BMD: Tensor) -> Tensor:
    """A dim of 1: rows of concatenated features, and one matrix product."""
    candidate_BK, out_BM = candidate_BKD.squeeze(2), out_BMD.squeeze(2)
    num_requests = once_RM.shape[0]
    if 2 * weight_c.numel() * candidate_BK.shape[0] < _LEAST_FLOPS * num_requests:
        torch.addmm(once_RM.index_select(0, index), candidate_BK, weight_c.mT, out=out_BM)
        return out_BMD
    for request, low, high in segments_of(index, num_requests):
        torch.addmm(once_RM[request], candidate_BK[low:high], weight_c.mT, out=out_BM[low:high])
    return out_BMD
