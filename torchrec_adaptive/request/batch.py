"""A batch of requests: what a ranking model reads, in training and in serving."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from torchrec_adaptive.request.broadcast import Broadcast
from torchrec_adaptive.request.features import RequestFeatures
from torchrec_adaptive.request.index import check_candidate_to_request
from torchrec_adaptive.request.schema import Feature, FeatureSchema


@dataclass
class RequestBatch(Pipelineable):
    """R requests with B candidates in all; a request without candidates is legal.

    Args:
        features: sparse inputs of both sides, and the histories.
        request_dense: (R, Dr) float32, columns in schema order.
        candidate_dense: (B, Dc) float32, columns in schema order.
        labels: (B, T) float32, a column a task; zeros in serving.
        weights: (B,) float32, the weight of each candidate in the loss.
    """

    features: RequestFeatures
    request_dense: Tensor
    candidate_dense: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def num_requests(self) -> int:
        """R."""
        return self.features.num_requests

    @property
    def num_candidates(self) -> int:
        """B."""
        return self.features.num_candidates

    @property
    def candidate_to_request(self) -> Tensor:
        """(B,) int32, ascending: the request of each candidate."""
        return self.features.candidate_to_request

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.features.device

    def to(self, device: torch.device, non_blocking: bool = False) -> RequestBatch:
        """A copy on that device."""
        return RequestBatch(
            self.features.to(device, non_blocking=non_blocking),
            self.request_dense.to(device, non_blocking=non_blocking),
            self.candidate_dense.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.weights.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until that stream is done with it."""
        for part in (self.features, self.request_dense, self.candidate_dense, self.labels, self.weights):
            part.record_stream(stream)  # pyrefly: ignore[bad-argument-type]

    def pin_memory(self) -> RequestBatch:
        """A copy in page-locked memory."""
        return RequestBatch(
            self.features.pin_memory(),
            self.request_dense.pin_memory(),
            self.candidate_dense.pin_memory(),
            self.labels.pin_memory(),
            self.weights.pin_memory(),
        )

    def to_impressions(self) -> Batch:
        """TorchRec's own batch, one row a candidate, every request-side value repeated.

        Histories have no place in that batch and are left out; a batch with one task gives labels of shape (B,).

        Returns:
            Batch with dense_features (B, Dr + Dc), sparse_features at stride B, labels (B,) or (B, T).
        """
        request_dense = Broadcast(self.request_dense, self.candidate_to_request).expand()
        labels = self.labels.squeeze(1) if self.labels.shape[1] == 1 else self.labels
        return Batch(torch.cat([request_dense, self.candidate_dense], dim=1), self.features.expand(), labels)

    def validate(self, schema: FeatureSchema) -> None:
        """Check the batch against a schema, value by value.

        Args:
            schema: what the model was built for.

        Raises:
            ValueError: keys, shapes, dtypes, index, lengths or ids that the schema does not allow; the message names
                the first such value, the rule and the way out.
        """
        requests, candidates = self.num_requests, self.num_candidates
        _check_index(self.candidate_to_request, requests)
        features = self.features
        for name, part, specs, rows in (
            ("request", features.request, schema.request_bags, requests),
            ("candidate", features.candidate, schema.candidate_bags, candidates),
            ("history", features.history, schema.sequences, requests),
        ):
            _check_kjt(name, part, specs, rows)
        lengths = features.history.lengths().view(len(schema.sequences), requests)
        for row, spec in zip(lengths, schema.sequences, strict=True):
            if not torch.equal(row, lengths[0]):
                raise ValueError(
                    f"history columns {schema.sequences[0].name!r} and {spec.name!r} have different lengths; every "
                    "event has one id in each column"
                )
        for name, tensor, shape in (
            ("request_dense", self.request_dense, (requests, schema.request_dense_width)),
            ("candidate_dense", self.candidate_dense, (candidates, schema.candidate_dense_width)),
            ("labels", self.labels, (candidates, len(schema.tasks))),
            ("weights", self.weights, (candidates,)),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; it must be {shape} of float32"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} holds NaN or infinity; every value must be finite: clean or clip it")


def _check_index(index: Tensor, num_requests: int) -> None:
    if index.dim() != 1 or index.dtype != torch.int32:
        raise ValueError(
            f"candidate_to_request has shape {tuple(index.shape)} and dtype {index.dtype}; it must be (B,) of int32"
        )
    check_candidate_to_request(index, num_requests)


def _check_kjt(part: str, kjt: KeyedJaggedTensor, specs: tuple[Feature, ...], rows: int) -> None:
    names = [spec.name for spec in specs]
    if sorted(kjt.keys()) != sorted(names):
        raise ValueError(f"the {part} part has the features {sorted(kjt.keys())}; the schema has {sorted(names)} there")
    if kjt.stride() != rows:
        raise ValueError(f"the {part} part has {kjt.stride()} rows; it must have {rows}")
    for spec in specs:
        jagged = kjt[spec.name]
        values, lengths = jagged.values(), jagged.lengths()
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"feature {spec.name!r} has a length of {int(lengths.min())}; lengths are 0 or more")
        if int(lengths.sum()) != values.numel():
            raise ValueError(
                f"lengths of feature {spec.name!r} sum to {int(lengths.sum())}, but it has {values.numel()} ids; "
                "they must agree"
            )
        if spec.max_length and lengths.numel() and int(lengths.max()) > spec.max_length:
            raise ValueError(
                f"feature {spec.name!r} has {int(lengths.max())} ids in one row; its max_length is "
                f"{spec.max_length}: truncate it"
            )
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < spec.num_embeddings:
            worst = int(values.min()) if int(values.min()) < 0 else int(values.max())
            raise ValueError(
                f"feature {spec.name!r} holds the id {worst}; its table has {spec.num_embeddings} rows: use ids 0 to "
                f"{spec.num_embeddings - 1}, by hashing if need be"
            )
        if values.numel() and any(s.weighted for s in specs) != (jagged.weights_or_none() is not None):
            raise ValueError(
                f"the {part} part {'lacks' if spec.weighted else 'has'} weights, and of its features "
                f"{[s.name for s in specs if s.weighted]} are weighted; give one float32 for each id of a part with a "
                "weighted feature (1.0 for the others'), none elsewhere"
            )
