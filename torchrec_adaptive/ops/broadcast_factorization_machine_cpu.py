"""`broadcast_factorization_machine` on a CPU: two linear maps a candidate, the request's tokens read in place.

(X^T Y)^T = Y^T X is a linear compression of the tokens. Its product with the request's tokens is one matrix product a
request, over all ranks of all its candidates, written into its columns of the result.

Shape letters: R requests, B candidates, N tokens, D embedding dim, K rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.ops.broadcast_linear_cpu import broadcast_linear_cpu
from torchrec_adaptive.ops.segments import segments_of

_FEW_CANDIDATES = 8  # a request, on average; below, one call over all candidates costs less than one a request


def broadcast_factorization_machine_cpu(
    projection_NK: Tensor, candidate_BND: Tensor, request_RND: Tensor, candidate_to_request: Tensor
) -> Tensor:
    """Products of every token with K learnt combinations of all tokens.

    bfloat16 and float16 are multiplied and added in float32.

    Args:
        projection_NK: (N_r + N_c, K) floats, the request's rows first.
        candidate_BND: (B, N_c, D) of the same dtype.
        request_RND: (R, N_r, D) likewise.
        candidate_to_request: (B,) integer, ascending, each below R.

    Returns:
        (B, K, N_r + N_c) of the candidate's dtype, the request's columns first.
    """
    dtype = candidate_BND.dtype
    if dtype in (torch.bfloat16, torch.float16):
        projection_NK, candidate_BND, request_RND = (projection_NK.float(), candidate_BND.float(), request_RND.float())
        return broadcast_factorization_machine_cpu(projection_NK, candidate_BND, request_RND, candidate_to_request).to(
            dtype
        )
    num_candidates = candidate_BND.shape[0]
    num_requests, split, dim = request_RND.shape
    num_tokens, rank = projection_NK.shape
    out_BKN = candidate_BND.new_empty(num_candidates, rank, num_tokens)
    combined_BKD = broadcast_linear_cpu(projection_NK.mT, candidate_BND, request_RND, candidate_to_request)
    if out_BKN.numel() == 0:
        return out_BKN
    if num_candidates < _FEW_CANDIDATES * num_requests:
        copied_BDN = request_RND.mT.index_select(0, candidate_to_request)
        out_BKN[:, :, :split] = torch.bmm(combined_BKD, copied_BDN)
    else:
        combined_rows, out_rows = combined_BKD.view(-1, dim), out_BKN.view(-1, num_tokens)[:, :split]
        for request, low, high in segments_of(candidate_to_request, num_requests):
            rows = slice(low * rank, high * rank)
            torch.mm(combined_rows[rows], request_RND[request].mT, out=out_rows[rows])
    out_BKN[:, :, split:] = torch.bmm(combined_BKD, candidate_BND.mT)
    return out_BKN
