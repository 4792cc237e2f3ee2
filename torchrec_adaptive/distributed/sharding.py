"""A model over several ranks: plan, shard, and carry the weights over.

TorchRec leaves three traps, and this closes them: a table that no sharder matches is trained as a plain copy, in
silence; weights of a module on a CPU are not copied into the shards; and a plan made on rank 0 alone hangs the others
when it fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    get_default_sharders,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from torchrec_adaptive.distributed.request_broadcast import RequestBroadcastEBCSharder
from torchrec_adaptive.request import nearest_name

# Both keep their optimizer state through a checkpoint on another number of ranks; the others lose it or fail.
RESUMABLE_SHARDING_TYPES = ("table_wise", "row_wise")


@dataclass(frozen=True)
class SparseOptimizerConfig:
    """Row-wise Adagrad of the tables, fused into the backward pass.

    Args:
        learning_rate: of the rows.
        eps: added to the root of the accumulated squares.
        weight_decay: L2 on the rows that a batch touches.
    """

    learning_rate: float = 0.05
    eps: float = 1e-8
    weight_decay: float = 0.0

    def fused_params(self) -> dict[str, Any]:
        """As TorchRec's sharders take them."""
        fused: dict[str, Any] = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": self.learning_rate,
            "eps": self.eps,
        }
        if self.weight_decay:  # without a mode, fbgemm ignores the weight decay in silence
            fused |= {"weight_decay": self.weight_decay, "weight_decay_mode": WeightDecayMode.L2}
        return fused


def sharders(optimizer: SparseOptimizerConfig | None = None) -> list[ModuleSharder[nn.Module]]:
    """Sharders for DistributedModelParallel: ours first, then TorchRec's.

    Args:
        optimizer: of the tables; None for the default one.

    Returns:
        A list for `DistributedModelParallel(sharders=...)`.
    """
    fused = (optimizer or SparseOptimizerConfig()).fused_params()
    ours = [RequestBroadcastEBCSharder(fused_params=fused), EmbeddingBagCollectionSharder(fused_params=fused)]
    kinds = {sharder.module_type for sharder in ours}
    return [*ours, *(s for s in get_default_sharders() if s.module_type not in kinds)]  # pyrefly: ignore[bad-return]


def plan_model(
    model: nn.Module,
    device: torch.device,
    process_group: dist.ProcessGroup,
    model_sharders: Sequence[ModuleSharder[nn.Module]],
    sharding_types: Mapping[str, str] | None = None,
    batch_size: int = 512,
) -> ShardingPlan:
    """Plan on this rank, from the same inputs on every rank.

    Args:
        model: unsharded.
        device: of the shards.
        process_group: of the ranks.
        model_sharders: as `sharders` gives them.
        sharding_types: table name to sharding type, for tables whose type is not the planner's to choose.
        batch_size: candidates a rank, for the planner's costs.

    Returns:
        A plan in which every table stands.

    Raises:
        ValueError: `sharding_types` names an unknown table, or a table is in no plan.
    """
    tables = [
        config.name
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollectionInterface)
        for config in module.embedding_bag_configs()
    ]
    chosen = dict(sharding_types or {})
    for name in chosen:
        if name not in tables:
            raise ValueError(f"sharding_types names the table {name!r}; {nearest_name(name, tables)}")
    constraints = {
        name: ParameterConstraints(sharding_types=[chosen[name]] if name in chosen else [*RESUMABLE_SHARDING_TYPES])
        for name in tables
    }
    world_size = dist.get_world_size(process_group)
    memory = _memory_bytes(device) // (world_size if device.type == "cpu" else 1)
    topology = Topology(
        world_size=world_size,
        compute_device=device.type,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        hbm_cap=memory if device.type == "cuda" else 0,
        ddr_cap=memory,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
        debug=False,
    )
    plan = planner.plan(model, list(model_sharders))
    planned = {table for module_plan in plan.plan.values() for table in module_plan}  # pyrefly: ignore[not-iterable]
    if missing := sorted(set(tables) - planned):
        raise ValueError(
            f"the tables {missing} are in no sharding plan, so each rank would train a copy of its own; pass a sharder "
            "whose module_type is exactly their module's class"
        )
    return plan


def shard_model(
    model: nn.Module,
    device: torch.device | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: SparseOptimizerConfig | None = None,
    sharding_types: Mapping[str, str] | None = None,
    batch_size: int = 512,
) -> DistributedModelParallel:
    """Wrap a model in DistributedModelParallel, its tables sharded, its weights carried over.

    Args:
        model: unsharded, with the same weights on every rank.
        device: of the shards, by default the CPU.
        process_group: of the ranks, by default the default one.
        optimizer: fused into the backward pass of the tables (data-parallel tables take a dense optimizer instead).
        sharding_types: table name to "table_wise", "row_wise", "column_wise" or "data_parallel"; the planner chooses
            the first or the second where nothing is said.
        batch_size: candidates a rank, for the planner's costs.

    Returns:
        The wrapped model; a world of one is wrapped the same way.

    Raises:
        ValueError: no process group; an unknown table; a table in no plan.
    """
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None:
        raise ValueError("no process group is initialised; call init_process_group() first, also for one process")
    device = device or torch.device("cpu")
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model_sharders = sharders(optimizer)
    plan = plan_model(model, device, group, model_sharders, sharding_types, batch_size)
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=model_sharders,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    load_full_state_dict(sharded, weights)
    return sharded


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole, under the names that the unsharded model has. Collective: call it on every rank.

    Args:
        model: sharded or not.

    Returns:
        Name to a CPU tensor of its own memory; on ranks other than 0 sharded tables are left out.
    """
    full = {}
    for name, value in model.state_dict().items():
        if _is_sharded(value):
            out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
            value.gather(dst=0, out=out)
            if out is not None:
                full[name] = out
        else:
            full[name] = value.detach().to("cpu", copy=True)
    return full


def load_full_state_dict(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole weights into a model, each rank taking its shards.

    Args:
        model: sharded or not.
        weights: as `full_state_dict` gives them on rank 0; every rank must pass all of them.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; nothing is copied then.
    """
    targets = model.state_dict()
    if missing := sorted(set(targets) - set(weights)):
        raise ValueError(f"weights are missing for {missing}; pass all {len(targets)} of the model's")
    if unknown := sorted(set(weights) - set(targets)):
        raise ValueError(f"weights {unknown} are none of the model's; {nearest_name(unknown[0], list(targets))}")
    for name, target in targets.items():
        if tuple(target.size()) != tuple(weights[name].shape):
            raise ValueError(
                f"weight {name!r} has shape {tuple(weights[name].shape)}; the model's is {tuple(target.size())}"
            )
    with torch.no_grad():
        for name, target in targets.items():
            if _is_sharded(target):
                for shard in target.local_shards():
                    rows, columns = shard.metadata.shard_offsets
                    height, width = shard.metadata.shard_sizes
                    shard.tensor.copy_(weights[name][rows : rows + height, columns : columns + width])
            else:
                target.copy_(weights[name])


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "local_shards")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
