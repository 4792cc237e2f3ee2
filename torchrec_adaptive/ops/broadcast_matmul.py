"""Product of each candidate's rows with a matrix of its request, read where it lies.

Composed of PyTorch's own operators, so that autograd and every device follow.

Shape letters: R requests, B candidates, P rows of a candidate, D inner dim, Q columns of a request's matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.ops.operands import check_sides
from torchrec_adaptive.ops.segments import segments_of
from torchrec_adaptive.request import Broadcast

_FEW_CANDIDATES = 8  # a request, on average; below, one call with a copy costs less than one a request


def broadcast_matmul(candidate_BPD: Tensor, request: Broadcast) -> Tensor:
    """out[b] = X_c[b] M[r(b)].

    Args:
        candidate_BPD: (B, P, D) floats.
        request: values (R, D, Q).

    Returns:
        (B, P, Q). On a GPU, and in a compiled graph, where a loop over requests would wait for the device, each
        candidate gets a copy of its request's matrix.

    Raises:
        ValueError: the inner dims differ, operands lie on different devices, or the index is unsorted or out of range
            (seen on the CPU only).

    Example:
        >>> broadcast_matmul(torch.ones(2, 1, 3), Broadcast(torch.ones(1, 3, 4), torch.tensor([0, 0]))).shape
        torch.Size([2, 1, 4])
    """
    values, index = request.values, request.candidate_to_request
    num_candidates, num_rows, dim = candidate_BPD.shape
    num_requests, inner, width = values.shape
    if inner != dim:
        raise ValueError(f"candidate rows have {dim} columns, the request's matrices {inner} rows; they must be equal")
    check_sides(index, num_candidates, num_requests, candidate=candidate_BPD, request=values)
    looped = num_candidates >= _FEW_CANDIDATES * num_requests and index.device.type == "cpu"
    if not looped or num_candidates == 0 or torch.compiler.is_compiling():
        return torch.matmul(candidate_BPD, values.index_select(0, index))
    parts = [
        torch.mm(candidate_BPD[low:high].reshape(-1, dim), values[request])
        for request, low, high in segments_of(index, num_requests)
    ]
    return (
        torch.cat(parts).view(num_candidates, num_rows, width) if len(parts) > 1 else parts[0].view(-1, num_rows, width)
    )
