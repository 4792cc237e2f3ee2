"""The sparse inputs of several requests, each side at its own number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


def empty_kjt(stride: int, device: torch.device | None = None) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor with no keys that still knows its number of rows.

    Args:
        stride: rows.
        device: of its (empty) tensors.

    Returns:
        A KeyedJaggedTensor without keys.
    """
    return KeyedJaggedTensor(
        keys=[],
        values=torch.empty(0, dtype=torch.int64, device=device),
        lengths=torch.empty(0, dtype=torch.int32, device=device),
        stride=stride,
    )


def expand_kjt(features: KeyedJaggedTensor, rows: Tensor) -> KeyedJaggedTensor:
    """Rows of every key picked by index, in order, repeated as often as the index names them.

    Args:
        features: F keys at stride R.
        rows: (B,) integer, each below R.

    Returns:
        The same keys at stride B; weights follow their ids.
    """
    num_keys, stride = len(features.keys()), features.stride()
    if num_keys == 0:
        return empty_kjt(rows.shape[0], rows.device)
    rows = rows.long()
    lengths_FR = features.lengths().view(num_keys, stride)
    starts_FR = (features.offsets()[:-1]).view(num_keys, stride)
    lengths = lengths_FR.index_select(1, rows).flatten()
    starts = starts_FR.index_select(1, rows).flatten()
    first = torch.cumsum(lengths, 0) - lengths
    positions = torch.repeat_interleave((starts - first).long(), lengths.long())
    positions = positions + torch.arange(positions.shape[0], device=rows.device)
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().index_select(0, positions),
        lengths=lengths,
        weights=None if weights is None else weights.index_select(0, positions),
        stride=rows.shape[0],
    )


@dataclass
class RequestFeatures(Pipelineable):
    """Sparse features of R requests with B candidates in all.

    Drawn for R=2 requests with 2 and 1 candidates (B=3):

    | part | rows | request 0 | request 1 |
    | --- | --- | --- | --- |
    | request["user_id"] | R | [7] | [9] |
    | history["seen_item"] | R | [3, 5, 8] | [] |
    | candidate["item_id"] | B | [4], [6] | [4] |
    | candidate_to_request | B | 0, 0 | 1 |

    Args:
        request: bags of the requests, stride R.
        candidate: bags of the candidates, stride B.
        history: columns of the histories, stride R; all keys have the same lengths.
        candidate_to_request: (B,) int32, ascending, each below R.
    """

    request: KeyedJaggedTensor
    candidate: KeyedJaggedTensor
    history: KeyedJaggedTensor
    candidate_to_request: Tensor

    @property
    def num_requests(self) -> int:
        """R."""
        return self.request.stride()

    @property
    def num_candidates(self) -> int:
        """B."""
        return self.candidate_to_request.shape[0]

    def keys(self) -> list[str]:
        """Names of the bags, request side first."""
        return [*self.request.keys(), *self.candidate.keys()]

    def stride(self) -> int:
        """B, the rows of what an embedding module returns, as code written for a KeyedJaggedTensor expects."""
        return self.num_candidates

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.candidate_to_request.device

    def expand(self) -> KeyedJaggedTensor:
        """All bags at one stride: what TorchRec would have been given.

        Returns:
            A KeyedJaggedTensor at stride B with the keys of `keys()`, request rows repeated for each candidate.
        """
        request = expand_kjt(self.request, self.candidate_to_request)
        return concat_kjts([request, self.candidate], self.num_candidates)

    def to(self, device: torch.device, non_blocking: bool = False) -> RequestFeatures:
        """A copy on that device."""
        return RequestFeatures(
            self.request.to(device, non_blocking=non_blocking),
            self.candidate.to(device, non_blocking=non_blocking),
            self.history.to(device, non_blocking=non_blocking),
            self.candidate_to_request.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until that stream is done with it."""
        for part in (self.request, self.candidate, self.history, self.candidate_to_request):
            part.record_stream(stream)  # pyrefly: ignore[bad-argument-type]

    def pin_memory(self) -> RequestFeatures:
        """A copy in page-locked memory."""
        return RequestFeatures(
            self.request.pin_memory(),
            self.candidate.pin_memory(),
            self.history.pin_memory(),
            self.candidate_to_request.pin_memory(),
        )


def concat_kjts(parts: Sequence[KeyedJaggedTensor], stride: int) -> KeyedJaggedTensor:
    """Keys of several tensors of one stride beside each other.

    Args:
        parts: all at that stride; where one is weighted, the ids of the others weigh 1.
        stride: rows.

    Returns:
        One KeyedJaggedTensor; parts without keys are left out.
    """
    parts = [part for part in parts if part.keys()]
    if not parts:
        return empty_kjt(stride)
    weights = None
    if any(part.weights_or_none() is not None for part in parts):
        weights = torch.cat(
            [
                w if (w := part.weights_or_none()) is not None else torch.ones_like(part.values(), dtype=torch.float32)
                for part in parts
            ]
        )
    return KeyedJaggedTensor(
        keys=[key for part in parts for key in part.keys()],  # noqa: SIM118  (a KeyedJaggedTensor is no mapping)
        values=torch.cat([part.values() for part in parts]),
        lengths=torch.cat([part.lengths() for part in parts]),
        weights=weights,
        stride=stride,
    )
