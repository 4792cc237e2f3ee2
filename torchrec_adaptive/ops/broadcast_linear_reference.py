"""`broadcast_linear` written plainly, the request's rows copied for each candidate: the oracle of the kernels.

Shape letters: R requests, B candidates, K tokens of a side, M output tokens, D embedding dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def broadcast_linear_reference(
    weight_MK: Tensor, candidate_BKD: Tensor, request_RKD: Tensor, candidate_to_request: Tensor
) -> Tensor:
    """W [X_r[r(b)]; X_c[b]].

    Args:
        weight_MK: (M, K_r + K_c) floats, the request's columns first.
        candidate_BKD: (B, K_c, D).
        request_RKD: (R, K_r, D).
        candidate_to_request: (B,) integer.

    Returns:
        (B, M, D).
    """
    copied_BKD = request_RKD.index_select(0, candidate_to_request)
    return torch.matmul(weight_MK, torch.cat([copied_BKD, candidate_BKD], dim=1))
