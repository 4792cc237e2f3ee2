"""Reduce-scatter of unequal parts on gloo.

TorchRec's variable-batch row-wise output uses NCCL's uneven reduce-scatter, whose backward, an uneven all-gather, gloo
refuses. gloo does have an uneven all-to-all, and a reduce-scatter is an all-to-all and a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, NoWait


class _SumOfParts(torch.autograd.Function):
    """Forward: part r of every rank's input, summed on rank r. Backward: rank r's gradient, to every rank, averaged."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        world_size, own = len(sizes), sizes[dist.get_rank(group)]
        ctx.sizes, ctx.group = sizes, group
        received = parts.new_empty(world_size * own)
        dist.all_to_all_single(received, parts.contiguous(), [own] * world_size, sizes, group=group)
        return received.view(world_size, own).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        world_size = len(ctx.sizes)
        gathered = grad.new_empty(sum(ctx.sizes))
        dist.all_to_all_single(
            gathered, grad.contiguous().repeat(world_size), ctx.sizes, [grad.numel()] * world_size, group=ctx.group
        )
        return gathered / world_size, None, None


class UnevenRowWiseDist(nn.Module):
    """In place of TorchRec's RwPooledEmbeddingDist, on gloo, for batches whose sides differ in rows.

    Args:
        replaced: the output dist that TorchRec made.
    """

    def __init__(self, replaced: RwPooledEmbeddingDist) -> None:
        super().__init__()
        self.group, self.embedding_dims = replaced._pg, replaced._embedding_dims

    def forward(self, local_rows: Tensor, sharding_context: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """Flat partial rows of all ranks, rank by rank, to the flat whole rows of this one."""
        sizes = [
            sum(rows * dim for rows, dim in zip(per_feature, self.embedding_dims, strict=True))
            for per_feature in sharding_context.batch_size_per_rank_per_feature
        ]
        return NoWait(_SumOfParts.apply(local_rows.flatten(), sizes, self.group))
