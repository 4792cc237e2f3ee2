"""`broadcast_factorization_machine` written plainly, the request's rows copied for each candidate: the kernels' oracle.

Shape letters: R requests, B candidates, N tokens, D embedding dim, K rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def broadcast_factorization_machine_reference(
    projection_NK: Tensor, candidate_BND: Tensor, request_RND: Tensor, candidate_to_request: Tensor
) -> Tensor:
    """(X (X^T Y))^T over the rows X = [X_r[r(b)]; X_c[b]].

    Args:
        projection_NK: (N_r + N_c, K) floats, the request's rows first.
        candidate_BND: (B, N_c, D).
        request_RND: (R, N_r, D).
        candidate_to_request: (B,) integer.

    Returns:
        (B, K, N_r + N_c), the request's columns first.
    """
    tokens_BND = torch.cat([request_RND.index_select(0, candidate_to_request), candidate_BND], dim=1)
    return torch.matmul(tokens_BND, torch.matmul(tokens_BND.mT, projection_NK)).mT
