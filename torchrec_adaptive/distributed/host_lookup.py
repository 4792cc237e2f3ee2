"""Look-ups of a variable batch in host memory, with the same fused row-wise Adagrad.

fbgemm's CPU kernel walks a variable batch row by row: 1.3 s for two features of 25,000 rows, where its fixed-batch form
takes 1.6 ms (fbgemm-gpu-cpu 1.8.0, one core). So on a CPU the look-up and the optimizer's update are done here, on
fbgemm's own storage of weights and momenta: state dicts, checkpoints and learning rates stay its.

Exact row-wise Adagrad, g being a row's gradient summed over the batch:
    g += weight_decay * w;  m += mean(g^2);  w -= learning_rate * g / (sqrt(m) + eps)
Source: fbgemm EXACT_ROWWISE_ADAGRAD with WeightDecayMode.L2.

Shape letters: F features of this rank's tables, N rows of a feature over all ranks, D its embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class _Feature:
    """A feature's table: fbgemm's module and its number in it."""

    kernel: SplitTableBatchedEmbeddingBagsCodegen
    table: int


@dataclass(frozen=True)
class _Ids:
    """What one feature looks up."""

    values: Tensor
    lengths: Tensor
    weights: Tensor | None
    rows_per_rank: Sequence[int]


class HostLookup:
    """In place of a GroupedPooledEmbeddingsLookup, for a variable batch on a CPU.

    Args:
        lookup: TorchRec's, whose weights and momenta are read and written.

    Raises:
        ValueError: its optimizer is not row-wise Adagrad.
    """

    def __init__(self, lookup: GroupedPooledEmbeddingsLookup) -> None:
        self.features: list[_Feature] = []
        self._dummy = torch.zeros(1, requires_grad=True)  # what makes autograd call the backward
        for module in lookup._emb_modules:
            kernel = module.emb_module
            assert isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
            if kernel.optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
                raise ValueError(f"the tables' optimizer is {kernel.optimizer}; on a CPU use row-wise Adagrad")
            self.features += [_Feature(kernel, table) for table in kernel.feature_table_map]

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up.

        Args:
            features: F keys, each with rows of every rank, rank by rank.

        Returns:
            Flat float32: for each rank, for each feature, its rows.
        """
        values = features.values().split(features.length_per_key())
        lengths = features.lengths().split(features.stride_per_key())
        weights = features.weights_or_none()
        per_feature = weights.split(features.length_per_key()) if weights is not None else [None] * len(values)
        per_rank = features.stride_per_key_per_rank()
        inputs = [_Ids(*each) for each in zip(values, lengths, per_feature, per_rank, strict=True)]
        out = _LookUp.apply(self._dummy, self.features, inputs)
        assert isinstance(out, Tensor)
        return out


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, features: list[_Feature], inputs: list[_Ids]) -> Tensor:
        ctx.features, ctx.inputs = features, inputs
        pooled = []
        tables = {feature.kernel: feature.kernel.split_embedding_weights() for feature in features}
        for feature, ids in zip(features, inputs, strict=True):
            table = tables[feature.kernel][feature.table]
            if _is_bag_of_one(ids):
                pooled.append(table.index_select(0, ids.values))
                continue
            starts = torch.cumsum(ids.lengths, 0) - ids.lengths
            pooled.append(
                nn.functional.embedding_bag(
                    ids.values.long(), table, starts.long(), mode="sum", per_sample_weights=ids.weights
                )
            )
        ctx.dims = [part.shape[1] for part in pooled]
        if not pooled:
            return dummy.new_zeros(0)
        by_rank = [part.split(list(ids.rows_per_rank)) for part, ids in zip(pooled, inputs, strict=True)]
        return torch.cat([part.flatten() for rank in zip(*by_rank, strict=True) for part in rank])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (flat,) = grads
        sizes = [
            rows * dim
            for rank in zip(*(ids.rows_per_rank for ids in ctx.inputs), strict=True)
            for rows, dim in zip(rank, ctx.dims, strict=True)
        ]
        pieces, num_features = flat.split(sizes), len(ctx.inputs)
        by_table: dict[_Feature, list[tuple[Tensor, Tensor]]] = {}
        for place, (feature, ids) in enumerate(zip(ctx.features, ctx.inputs, strict=True)):
            grad_ND = torch.cat([piece.view(-1, ctx.dims[place]) for piece in pieces[place::num_features]])
            if not _is_bag_of_one(ids):
                grad_ND = torch.repeat_interleave(grad_ND, ids.lengths.long(), dim=0)
                if ids.weights is not None:
                    grad_ND = grad_ND * ids.weights.unsqueeze(1)
            by_table.setdefault(feature, []).append((ids.values, grad_ND))
        for feature, parts in by_table.items():
            ids, grads_of = zip(*parts, strict=True)
            update_rows(feature.kernel, feature.table, torch.cat(ids), torch.cat(grads_of))
        return None, None, None


def _is_bag_of_one(ids: _Ids) -> bool:
    return ids.weights is None and ids.lengths.numel() == ids.values.numel() and bool((ids.lengths == 1).all())


@torch.no_grad()
def update_rows(kernel: SplitTableBatchedEmbeddingBagsCodegen, table: int, ids: Tensor, grads: Tensor) -> None:
    """Row-wise Adagrad of the rows that a batch read.

    Args:
        kernel: fbgemm's module; its weights and momenta are written.
        table: number of the table in it.
        ids: (N,) integer, repeats allowed.
        grads: (N, D) float32.
    """
    if not ids.numel():
        return
    weights, momenta = kernel.split_embedding_weights()[table], kernel.split_optimizer_states()[table][0]
    rows, places = torch.unique(ids.long(), return_inverse=True)
    grad = grads.new_zeros(rows.shape[0], grads.shape[1]).index_add_(0, places, grads)
    row = weights.index_select(0, rows)
    arguments = kernel.optimizer_args
    if arguments.weight_decay and arguments.weight_decay_mode == WeightDecayMode.L2.value:
        grad = grad + arguments.weight_decay * row
    momentum = momenta.index_select(0, rows) + grad.square().mean(1)
    momenta.index_copy_(0, rows, momentum)
    step = kernel.get_learning_rate() / (momentum.sqrt() + arguments.eps)
    weights.index_copy_(0, rows, row - step.unsqueeze(1) * grad)
