"""What a request-oriented look-up returns: a KeyedTensor that copies nothing until it is asked to.

Shape letters: R requests, B candidates, T events, D embedding dim of one feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_adaptive.request import Broadcast, nearest_name


class BroadcastKeyedTensor(KeyedTensor):
    """Pooled embeddings of both sides, each at its own number of rows, and unpooled ones of the histories.

    Code written for a KeyedTensor sees one at B rows (`keys`, `values`, `["f"]`, `to_dict`, `regroup`); what it asks
    for is materialised then, once. Request-aware code asks for `broadcast`, `candidate` and `sequence`.

    Args:
        keys: names of the pooled features, in the order of their columns.
        request: feature to (R, D).
        candidate: feature to (B, D).
        candidate_to_request: (B,) integer, ascending.
        sequences: feature to JaggedTensor of values (T, D) and lengths (R,).
    """

    def __init__(
        self,
        keys: Sequence[str],
        request: Mapping[str, Tensor],
        candidate: Mapping[str, Tensor],
        candidate_to_request: Tensor,
        sequences: Mapping[str, JaggedTensor] | None = None,
    ) -> None:
        self._request = dict(request)
        self._candidate = dict(candidate)
        self._sequences = dict(sequences or {})
        self.candidate_to_request = candidate_to_request
        self._materialised: Tensor | None = None
        lengths = [(request[k] if k in request else candidate[k]).shape[1] for k in keys]
        super().__init__(list(keys), lengths, candidate_to_request.new_empty(0, dtype=torch.float32))

    @property
    def _values(self) -> Tensor:  # pyrefly: ignore[bad-override]
        if self._materialised is None:
            parts = [self._expanded(key) for key in self._keys]
            num_candidates = self.candidate_to_request.shape[0]
            self._materialised = (
                torch.cat(parts, dim=1)
                if parts
                else torch.empty(num_candidates, 0, device=self.candidate_to_request.device)
            )
        return self._materialised

    @_values.setter
    def _values(self, _: Tensor) -> None:
        """KeyedTensor's constructor assigns this; ours is computed on demand."""

    def _expanded(self, key: str) -> Tensor:
        return self._candidate[key] if key in self._candidate else self.broadcast(key).expand()

    def __getitem__(self, key: str) -> Tensor:
        """(B, D): the candidates' own tensor, or a copy of the request's row for each of its candidates."""
        if self._materialised is None:
            self._known(key, self._keys, "pooled feature")
            return self._expanded(key)
        return super().__getitem__(key)

    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.candidate_to_request.device

    def broadcast(self, key: str) -> Broadcast:
        """A request-side feature, nothing copied: values (R, D).

        Raises:
            ValueError: the feature is unknown, or on the candidate side.
        """
        self._known(key, list(self._request), "request-side feature")
        return Broadcast(self._request[key], self.candidate_to_request)

    def candidate(self, key: str) -> Tensor:
        """(B, D) of a candidate-side feature.

        Raises:
            ValueError: the feature is unknown, or on the request side.
        """
        self._known(key, list(self._candidate), "candidate-side feature")
        return self._candidate[key]

    def sequence(self, key: str) -> JaggedTensor:
        """A column of the histories: values (T, D), lengths (R,).

        Raises:
            ValueError: no sequence has that name.
        """
        self._known(key, list(self._sequences), "sequence")
        return self._sequences[key]

    def request_keys(self) -> list[str]:
        """Names of the request-side features, in order."""
        return list(self._request)

    def candidate_keys(self) -> list[str]:
        """Names of the candidate-side features, in order."""
        return list(self._candidate)

    def sequence_keys(self) -> list[str]:
        """Names of the sequences, in order."""
        return list(self._sequences)

    @staticmethod
    def _known(key: str, names: Sequence[str], what: str) -> None:
        if key not in names:
            raise ValueError(f"{key!r} is no {what} of this look-up; {nearest_name(key, names)}")
