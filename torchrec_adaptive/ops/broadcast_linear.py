"""Linear compression over tokens of both sides, the request's share done once a request.

out[b] = W_c X_c[b] + (W_r X_r)[r(b)]

which is W [X_r[r(b)]; X_c[b]] with W = [W_r, W_c], without the copy of X_r for each candidate.
Source: PyTorch blog "In-Kernel Broadcast Optimization", linear compression embedding. The two halves are added in
float32, as there, so that low precision matches the undivided product.

Shape letters: R requests, B candidates, K tokens of a side, M output tokens, D embedding dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.ops.segments import add_request_share, num_request_tokens
from torchrec_adaptive.request import Broadcast


def broadcast_linear(weight_MK: Tensor, candidate_BKD: Tensor, request: Broadcast | None) -> Tensor:
    """Mix tokens of the request and of the candidate into M tokens.

    Args:
        weight_MK: (M, K_r + K_c) floats, the request's columns first.
        candidate_BKD: (B, K_c, D).
        request: values (R, K_r, D), or None where the candidate has all the tokens.

    Returns:
        (B, M, D) of the candidate's dtype.

    Raises:
        ValueError: the weight's columns are not the sum of both sides' tokens.

    Example:
        >>> user = Broadcast(torch.ones(1, 1, 2), torch.tensor([0, 0]))
        >>> broadcast_linear(torch.tensor([[10.0, 1.0]]), torch.arange(4.0).view(2, 1, 2), user).tolist()
        [[[10.0, 11.0]], [[12.0, 13.0]]]
    """
    split = num_request_tokens(weight_MK.shape[1], "the weight columns", candidate_BKD, request)
    if request is None:
        return torch.matmul(weight_MK, candidate_BKD)
    share_BMD = torch.matmul(weight_MK[:, split:], candidate_BKD)
    once_RMD = torch.matmul(weight_MK[:, :split], request.values)
    return add_request_share(share_BMD, once_RMD, request.candidate_to_request).to(candidate_BKD.dtype)
