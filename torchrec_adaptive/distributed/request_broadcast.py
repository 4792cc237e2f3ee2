"""RequestBroadcastEBC over several ranks.

All sides go through one variable-batch look-up of TorchRec's: each key has its own number of rows (R, B or T), so that
nothing is repeated on the wire either. Data-parallel tables are looked up on the rank itself, as ordinary dense
parameters, because TorchRec's data-parallel look-up does not take a variable batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_adaptive.distributed.host_lookup import HostLookup
from torchrec_adaptive.distributed.uneven_reduce_scatter import UnevenRowWiseDist
from torchrec_adaptive.embeddings import BroadcastKeyedTensor, RequestBroadcastEBC, check_features
from torchrec_adaptive.request import RequestFeatures, empty_kjt


@dataclass
class RequestBroadcastContext(EmbeddingBagCollectionContext):
    """What the output needs to know of the input: the features, kept for index, lengths and local look-ups."""

    request_features: RequestFeatures | None = field(default=None)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until that stream is done with it."""
        super().record_stream(stream)
        if self.request_features is not None:
            self.request_features.record_stream(stream)


class _RequestBroadcastAwaitable(LazyGetItemMixin[str, Tensor], LazyAwaitable[BroadcastKeyedTensor]):
    """Waits for the flat outputs of every sharding type and cuts them into features."""

    def __init__(
        self, owner: ShardedRequestBroadcastEBC, awaitables: list[Awaitable[Tensor]], ctx: RequestBroadcastContext
    ) -> None:
        super().__init__()
        self._owner, self._outputs, self._ctx = owner, awaitables, ctx

    def _wait_impl(self) -> BroadcastKeyedTensor:
        return self._owner.assemble([output.wait() for output in self._outputs], self._ctx)


class ShardedRequestBroadcastEBC(ShardedEmbeddingBagCollection):
    """The sharded form of RequestBroadcastEBC; state-dict keys as the unsharded one has them.

    Args:
        module: the unsharded collection.
        table_name_to_parameter_sharding: the plan of each table.
        env: process group.
        fused_params: optimizer of the sharded tables.
        device: of the shards.
        qcomm_codecs_registry: quantised communication.
        module_fqn: name of the module in the model.
    """

    def __init__(
        self,
        module: RequestBroadcastEBC,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        configs = module.embedding_bag_configs()
        local = {
            name
            for name, parameter in table_name_to_parameter_sharding.items()
            if parameter.sharding_type == ShardingType.DATA_PARALLEL.value
        }
        # Mean pooling is a sum here and a division in `assemble`: each side knows its own lengths.
        summed = [_summed(config) for config in configs if config.name not in local]
        super().__init__(
            _tables_alone(summed, module.is_weighted(), module.device),
            {name: p for name, p in table_name_to_parameter_sharding.items() if name not in local},
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
            module_fqn,
        )
        if env.process_group is not None and dist.get_backend(env.process_group) == "gloo":
            self._output_dists = [
                UnevenRowWiseDist(output) if isinstance(output, RwPooledEmbeddingDist) else output
                for output in self._output_dists
            ]
        on_host = device is None or device.type == "cpu"
        self._host_lookups = [HostLookup(lookup) for lookup in self._lookups] if on_host else []  # pyrefly: ignore[bad-argument-type]
        self.all_configs = configs
        self.request_features = module.request_features
        self.sequence_features = module.sequence_features
        self._keys = [
            name for config in configs for name in config.feature_names if name not in module.sequence_features
        ]
        self._means = {
            name
            for config in configs
            if config.pooling == PoolingType.MEAN and config.name not in local
            for name in config.feature_names
            if name not in module.sequence_features
        }
        self._sharded_features = [name for config in summed for name in config.feature_names]
        self._local = local
        for config in configs:
            if config.name in local:
                bag = nn.EmbeddingBag(
                    config.num_embeddings,
                    config.embedding_dim,
                    mode=config.pooling.value.lower(),
                    device=device,
                    include_last_offset=True,
                )
                with torch.no_grad():
                    bag.weight.copy_(module.embedding_bags[config.name].weight)  # pyrefly: ignore[bad-argument-type]
                self.embedding_bags[config.name] = bag
        self._column_starts = self._shard_column_starts()

    def _shard_column_starts(self) -> list[int]:
        """First column of each piece that the output dists give, in their order."""
        metadata = [meta for sharding in self._embedding_shardings for meta in sharding.embedding_shard_metadata()]
        return [meta.shard_offsets[1] if meta is not None else 0 for meta in metadata]

    def create_context(self) -> RequestBroadcastContext:
        """A context for one batch."""
        return RequestBroadcastContext()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names that the data-parallel wrapper must leave alone; local tables are not among them."""
        for name in super().sharded_parameter_names(prefix):
            if not any(name.endswith(f"embedding_bags.{table}.weight") for table in self._local):
                yield name

    def input_dist(  # pyrefly: ignore[bad-override]
        self, ctx: RequestBroadcastContext, features: RequestFeatures | KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that hold their rows, each key at its own stride.

        Args:
            ctx: of this batch.
            features: of both sides; a KeyedJaggedTensor counts as all candidates.

        Returns:
            What TorchRec's input dist returns.
        """
        if not isinstance(features, RequestFeatures):
            features = _all_candidates(features)
            names, request, sequences = [[*self._keys]], (), ()
        else:
            names = [config.feature_names for config in self.all_configs]
            request, sequences = self.request_features, self.sequence_features
        check_features(features, names, request, sequences)
        ctx.request_features = features
        return super().input_dist(ctx, self._variable_batch(features))

    def _create_inverse_indices_permute_indices(self, inverse_indices: object) -> None:
        """Nothing: `assemble` never expands to one stride, so there is no inverse to prepare."""

    def _variable_batch(self, features: RequestFeatures) -> KeyedJaggedTensor:
        values, lengths, weights, strides = [], [], [], []
        names = []
        for name in self._sharded_features:
            side = self._side(name, features)
            if side is None:
                continue
            names.append(name)
            ids = side[name]
            values.append(ids.values())
            if side is features.history:
                lengths.append(torch.ones_like(ids.values(), dtype=torch.int32))
            else:
                lengths.append(ids.lengths().to(torch.int32))
            strides.append([lengths[-1].numel()])
            if self._is_weighted:
                given = ids.weights_or_none()
                weights.append(torch.ones_like(ids.values(), dtype=torch.float32) if given is None else given)
        if not names:
            return empty_kjt(0, features.device)
        return KeyedJaggedTensor(
            keys=names,
            values=torch.cat(values),
            lengths=torch.cat(lengths),
            weights=torch.cat(weights) if self._is_weighted else None,
            stride_per_key_per_rank=strides,
        )

    @staticmethod
    def _side(name: str, features: RequestFeatures) -> KeyedJaggedTensor | None:
        for side in (features.request, features.candidate, features.history):
            if name in side.keys():  # noqa: SIM118  (a KeyedJaggedTensor is no mapping)
                return side
        return None

    def compute(self, ctx: RequestBroadcastContext, dist_input: KJTList) -> list[Tensor]:  # pyrefly: ignore[bad-override]
        """Look up what this rank's tables were asked for."""
        return [look_up(features) for look_up, features in zip(self._host_lookups or self._lookups, dist_input)]

    def output_dist(  # pyrefly: ignore[bad-override]
        self, ctx: RequestBroadcastContext, output: list[Tensor]
    ) -> LazyAwaitable[BroadcastKeyedTensor]:
        """Bring rows back to the rank that asked; awaits lazily."""
        sent = zip(self._output_dists, ctx.sharding_contexts, output, strict=True)
        return _RequestBroadcastAwaitable(
            self, [output_dist(rows, sharding) for output_dist, sharding, rows in sent], ctx
        )

    def compute_and_output_dist(  # pyrefly: ignore[bad-override]
        self, ctx: RequestBroadcastContext, input: KJTList
    ) -> LazyAwaitable[BroadcastKeyedTensor]:
        """Look up and bring back."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def assemble(self, outputs: list[Tensor], ctx: RequestBroadcastContext) -> BroadcastKeyedTensor:
        """Cut the flat outputs into features, join column shards, look local tables up.

        Args:
            outputs: of each sharding type, flat.
            ctx: of this batch.

        Returns:
            As the unsharded module does.
        """
        features = ctx.request_features
        assert features is not None
        contexts = [sharding for sharding in ctx.sharding_contexts if sharding is not None]
        rows_of = [rows for sharding in contexts for rows in sharding.batch_size_per_feature_pre_a2a]
        shapes = list(zip(rows_of, self._uncombined_embedding_dims, strict=True))
        flat = torch.cat([output.flatten() for output in outputs]) if outputs else torch.empty(0)
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        flat_pieces = flat.split([rows * dim for rows, dim in shapes])
        described = zip(self._uncombined_embedding_names, self._column_starts, shapes, flat_pieces, strict=True)
        for name, start, shape, piece in described:
            pieces.setdefault(name, []).append((start, piece.view(shape)))
        found = {
            name: torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])], dim=1)
            for name, parts in pieces.items()
        }
        found |= self._look_up_locally(features)
        request: dict[str, Tensor] = {}
        candidate: dict[str, Tensor] = {}
        sequences: dict[str, JaggedTensor] = {}
        for name, rows in found.items():
            side = self._side(name, features)
            assert side is not None
            if side is features.history:
                sequences[name] = JaggedTensor(rows, lengths=side[name].lengths())
                continue
            if name in self._means:
                rows = rows / side[name].lengths().clamp(min=1).unsqueeze(1)
            (request if side is features.request else candidate)[name] = rows
        return BroadcastKeyedTensor(self._keys, request, candidate, features.candidate_to_request, sequences)

    def _look_up_locally(self, features: RequestFeatures) -> dict[str, Tensor]:
        found = {}
        for config in self.all_configs:
            if config.name not in self._local:
                continue
            bag = self.embedding_bags[config.name]
            assert isinstance(bag, nn.EmbeddingBag)
            for name in config.feature_names:
                side = self._side(name, features)
                if side is None:
                    continue
                ids = side[name]
                if side is features.history:
                    found[name] = nn.functional.embedding(ids.values(), bag.weight)
                    continue
                weights = ids.weights_or_none() if self._is_weighted else None
                found[name] = bag(input=ids.values(), offsets=ids.offsets(), per_sample_weights=weights)
        return found


class RequestBroadcastEBCSharder(BaseEmbeddingSharder[RequestBroadcastEBC]):
    """Shards RequestBroadcastEBC, row-wise on a CPU too, which TorchRec's own sharder does not offer there."""

    def shard(  # pyrefly: ignore[bad-override]
        self,
        module: RequestBroadcastEBC,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedRequestBroadcastEBC:
        """The sharded module of a plan."""
        return ShardedRequestBroadcastEBC(
            module, params, env, self.fused_params, device, self.qcomm_codecs_registry, module_fqn
        )

    def shardable_parameters(self, module: RequestBroadcastEBC) -> dict[str, nn.Parameter]:
        """Table name to weight."""
        return {name: bag.weight for name, bag in module.embedding_bags.items()}  # pyrefly: ignore[bad-return]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Types that the planner may choose from."""
        types = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL]
        return [sharding_type.value for sharding_type in types]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Dense for data-parallel tables, fused (optimizer in the backward) for the others."""
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def module_type(self) -> type[RequestBroadcastEBC]:
        """What this shards."""
        return RequestBroadcastEBC


def _summed(config: EmbeddingBagConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        feature_names=list(config.feature_names),
        pooling=PoolingType.SUM,
        data_type=config.data_type,
        init_fn=config.init_fn,
        weight_init_max=config.weight_init_max,
        weight_init_min=config.weight_init_min,
    )


def _tables_alone(configs: list[EmbeddingBagConfig], is_weighted: bool, device: torch.device) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=configs, is_weighted=is_weighted, device=device)


def _all_candidates(features: KeyedJaggedTensor) -> RequestFeatures:
    rows = features.stride()
    device = features.device()
    return RequestFeatures(
        empty_kjt(rows, device), features, empty_kjt(rows, device), torch.arange(rows, dtype=torch.int32, device=device)
    )
