"""The rule of every index from candidates to requests: ascending, and in range."""

from __future__ import annotations

import torch
from torch import Tensor


def check_candidate_to_request(index: Tensor, num_requests: int) -> None:
    """Refuse an index that is unsorted or out of range.

    Reads values, so on a GPU it waits for the device.

    Args:
        index: (B,) integer.
        num_requests: R.

    Raises:
        ValueError: it is no integer vector, falls somewhere, or names a request that there is not; the message has the
            first such value and its position.

    Example:
        >>> check_candidate_to_request(torch.tensor([0, 2, 1]), 3)
        Traceback (most recent call last):
        ...
        ValueError: candidate_to_request falls from 2 to 1 at position 2; it must be sorted: put the candidates of one \
request beside each other, in the order of the requests
    """
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(
            f"candidate_to_request has shape {tuple(index.shape)} and dtype {index.dtype}; it must be (B,) of int32"
        )
    if index.numel() == 0:
        return
    falls = index[1:] < index[:-1]
    if bool(falls.any()):
        place = int(falls.nonzero()[0]) + 1
        raise ValueError(
            f"candidate_to_request falls from {int(index[place - 1])} to {int(index[place])} at position {place}; "
            "it must be sorted: put the candidates of one request beside each other, in the order of the requests"
        )
    for value in (int(index[0]), int(index[-1])):
        if not 0 <= value < num_requests:
            allowed = f"use 0 to {num_requests - 1}" if num_requests else "use no candidates"
            raise ValueError(f"candidate_to_request holds {value}, but there are {num_requests} requests; {allowed}")
