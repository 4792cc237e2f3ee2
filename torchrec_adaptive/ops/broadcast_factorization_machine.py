"""The optimised factorization machine over tokens of both sides, the request's share done once a request.

FM(X) = X (X^T Y),  X = [X_r; X_c] (n, d), Y (n, k):  O(n d k) in place of the O(n^2 d) of X X^T.
X^T Y = X_r^T Y_r + X_c^T Y_c, and its first term belongs to the request. The two terms are added in float32.
Source: Wukong, arXiv 2403.02545, section 3.3.

Shape letters: R requests, B candidates, N tokens, D embedding dim, K rank, C most candidates of one request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.ops.segments import (
    add_request_share,
    candidate_counts,
    num_request_tokens,
    pad_rows,
    positions_in_rows,
)
from torchrec_adaptive.request import Broadcast


def broadcast_factorization_machine(projection_NK: Tensor, candidate_BND: Tensor, request: Broadcast | None) -> Tensor:
    """Products of every token with K learnt combinations of all tokens.

    Args:
        projection_NK: (N_r + N_c, K) floats, Y; the request's rows first.
        candidate_BND: (B, N_c, D).
        request: values (R, N_r, D), or None where the candidate has all the tokens.

    Returns:
        (B, N_r + N_c, K), the request's rows first.

    Raises:
        ValueError: the projection's rows are not the sum of both sides' tokens.
    """
    split = num_request_tokens(projection_NK.shape[0], "the projection rows", candidate_BND, request)
    if request is None:
        return torch.matmul(candidate_BND, torch.matmul(candidate_BND.mT, projection_NK))
    request_RND, index = request.values, request.candidate_to_request
    once_RDK = torch.matmul(request_RND.mT, projection_NK[:split])
    share_BDK = torch.matmul(candidate_BND.mT, projection_NK[split:])
    combined_BDK = add_request_share(share_BDK, once_RDK, index).to(candidate_BND.dtype)
    candidate_rows_BNK = torch.matmul(candidate_BND, combined_BDK)
    return torch.cat([_request_rows(request_RND, combined_BDK, index), candidate_rows_BNK], dim=1)


def _request_rows(request_RND: Tensor, combined_BDK: Tensor, index: Tensor) -> Tensor:
    """X_r[r(b)] (X^T Y)[b] with X_r read once a request: candidates of a request lie side by side in one product."""
    num_requests, num_tokens, _ = request_RND.shape
    num_candidates, dim, rank = combined_BDK.shape
    if num_candidates == 0:
        return combined_BDK.new_zeros(0, num_tokens, rank)
    counts = candidate_counts(index, num_requests)
    width = int(counts.max())
    if width * num_requests > 2 * num_candidates:  # requests of very different sizes: padding would cost more
        return torch.matmul(request_RND.index_select(0, index), combined_BDK)
    rows, places = positions_in_rows(counts)
    side_by_side = pad_rows(combined_BDK, rows, places, num_requests, width)  # (R, C, D, K)
    side_by_side = side_by_side.permute(0, 2, 1, 3).reshape(num_requests, dim, width * rank)
    product = torch.matmul(request_RND, side_by_side).view(num_requests, num_tokens, width, rank)
    return product.permute(0, 2, 1, 3)[rows, places]
