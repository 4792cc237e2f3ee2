"""Embedding look-ups once a request, from tables of 8 or 4 bits.

The numbers are those of TorchRec's quantized EmbeddingBagCollection on expanded rows, bit for bit: the same fbgemm
kernel reads the same bytes, at R, B and T rows. One storage holds every table, whichever sides read it.

Shape letters: R requests, B candidates, T events, D embedding dim of one feature, N rows of an update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import align_to_cacheline
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_adaptive.embeddings.broadcast_keyed_tensor import BroadcastKeyedTensor
from torchrec_adaptive.embeddings.quantized_rows import (
    TableDtype,
    check_embedding_dim,
    packed_row_bytes,
    parse_table_dtype,
    quantize_rows,
)
from torchrec_adaptive.embeddings.quantized_table_batch import QuantizedTableBatch, TableReader
from torchrec_adaptive.embeddings.request_broadcast import RequestBroadcastEBC, check_features
from torchrec_adaptive.request import RequestFeatures, nearest_name

_ROWS_A_STEP = 1 << 16  # bounds the float and packed copies that quantizing a table needs


class QuantizedRequestBroadcastEBC(EmbeddingBagCollectionInterface):
    """A RequestBroadcastEBC for inference, its tables quantized row by row.

    One call of fbgemm's kernel looks up all features of a side that pool alike. State-dict keys are those of the float
    collection; the tensors are uint8, (num_embeddings, bytes of a row). Rows lie without padding; TorchRec's quantized
    collection pads its own to 16 bytes, and its state dict is refused where that makes a difference.

    Scoring may run in several threads at once. An update is not atomic for them: let a lock keep it apart from scoring.

    Args:
        tables: as for RequestBroadcastEBC; all rows are zeros until rows or a state dict are loaded.
        dtype: "int8" or "int4", or any name that `parse_table_dtype` knows.
        request_features: bags that belong to the request; every other bag is the candidate's.
        sequence_features: columns of the history, looked up unpooled.
        is_weighted: whether ids carry weights; ids without any then weigh 1.
        device: of the tables; only the CPU.

    Raises:
        ValueError: what RequestBroadcastEBC refuses, an unknown dtype, an embedding_dim that the dtype can't hold, or
            a device other than the CPU.

    Example:
        >>> tables = [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["user", "item"])]
        >>> ebc = RequestBroadcastEBC(tables, request_features=["user"])
        >>> quantized = QuantizedRequestBroadcastEBC.from_float(ebc, "int4")
        >>> {name: (tuple(weight.shape), weight.dtype) for name, weight in quantized.state_dict().items()}
        {'embedding_bags.t.weight': ((9, 6), torch.uint8)}
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        dtype: TableDtype,
        request_features: Sequence[str] = (),
        sequence_features: Sequence[str] = (),
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = device or torch.device("cpu")
        _check_device(self._device)
        self.data_type: DataType = parse_table_dtype(dtype)
        configs = copy.deepcopy(list(tables))
        for config in configs:
            check_embedding_dim(config.name, config.embedding_dim, self.data_type)
            config.data_type = DataType.FP32
        RequestBroadcastEBC(configs, request_features, sequence_features, is_weighted, torch.device("meta"))  # checks
        for config in configs:
            config.data_type = self.data_type
        self._embedding_bag_configs = configs
        self._is_weighted = is_weighted
        self.request_features = tuple(request_features)
        self.sequence_features = tuple(sequence_features)
        self._feature_names = [list(config.feature_names) for config in configs]
        self._offsets_bytes: dict[str, int] = {}
        num_bytes = 0
        for config in configs:
            self._offsets_bytes[config.name] = num_bytes
            num_bytes += align_to_cacheline(config.num_embeddings * self._row_bytes(config))
        self._storage = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._batches = self._make_batches()
        self.embedding_bags = nn.ModuleDict({config.name: nn.Module() for config in configs})
        self._attach()
        self.register_load_state_dict_pre_hook(_refuse_float_weights)
        self.register_load_state_dict_post_hook(_take_assigned_weights)

    @classmethod
    def from_float(
        cls,
        ebc: EmbeddingBagCollection,
        dtype: TableDtype,
        request_features: Sequence[str] | None = None,
        sequence_features: Sequence[str] | None = None,
    ) -> QuantizedRequestBroadcastEBC:
        """Quantize the tables of a float collection, which stays as it is.

        Args:
            ebc: an unsharded RequestBroadcastEBC or EmbeddingBagCollection.
            dtype: as for the constructor.
            request_features: as for the constructor; by default those of a RequestBroadcastEBC, else none.
            sequence_features: likewise.

        Returns:
            A collection on the CPU with the sides, order and configs of `ebc`.

        Raises:
            ValueError: as the constructor, or a table holds NaN, infinity, or numbers too large to be quantized.
        """
        if request_features is None:
            request_features = ebc.request_features if isinstance(ebc, RequestBroadcastEBC) else ()
        if sequence_features is None:
            sequence_features = ebc.sequence_features if isinstance(ebc, RequestBroadcastEBC) else ()
        made = cls(ebc.embedding_bag_configs(), dtype, request_features, sequence_features, ebc.is_weighted())
        for name, bag in ebc.embedding_bags.items():
            weight = cast(Tensor, bag.weight).detach()
            packed = made._packed(name)
            for start in range(0, weight.shape[0], _ROWS_A_STEP):
                ids = range(start, min(start + _ROWS_A_STEP, weight.shape[0]))
                packed[ids.start : ids.stop] = quantize_rows(
                    name, ids, weight[ids.start : ids.stop].cpu(), made.data_type
                )
        return made.train(ebc.training)

    def forward(self, features: RequestFeatures | KeyedJaggedTensor) -> KeyedTensor:  # pyrefly: ignore[bad-override]
        """Look up.

        Args:
            features: of both sides; or a KeyedJaggedTensor, all at one stride, for which this is TorchRec's quantized
                collection with the keys in the order of the tables.

        Returns:
            BroadcastKeyedTensor for RequestFeatures, KeyedTensor for a KeyedJaggedTensor; float32, without gradients.

        Raises:
            ValueError: a feature is missing, or stands on the other side; columns of the history differ in their
                events; an id is outside its table.
        """
        if not isinstance(features, RequestFeatures):
            return self._forward_at_one_stride(features)
        check_features(features, self._feature_names, self.request_features, self.sequence_features)
        request, candidate = self._pooled("request", features.request), self._pooled("candidate", features.candidate)
        keys = [name for names in self._feature_names for name in names if name not in self.sequence_features]
        sequences = self._unpooled(features.history)
        return BroadcastKeyedTensor(
            keys,
            {name: request[name] for name in keys if name in request},
            {name: candidate[name] for name in keys if name in candidate},
            features.candidate_to_request,
            sequences,
        )

    def update_rows(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Quantize float rows and write them in place, as if the whole updated table had been quantized.

        Nothing is written where anything is refused.

        Args:
            table: its name.
            ids: (N,) integer, each once, the rows to replace.
            rows: (N, D) float32, float16 or bfloat16.

        Raises:
            ValueError: the table is unknown; ids are outside it or come twice; rows have another shape or dtype, or
                hold NaN, infinity, or numbers too large to be quantized.
        """
        if table not in self._offsets_bytes:
            raise ValueError(f"unknown table {table!r}; {nearest_name(table, list(self._offsets_bytes))}")
        config = self._config(table)
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ids of table {table!r} have shape {tuple(ids.shape)} and dtype {ids.dtype}; give (N,) of int64"
            )
        if tuple(rows.shape) != (ids.shape[0], config.embedding_dim) or not rows.is_floating_point():
            raise ValueError(
                f"rows of table {table!r} have shape {tuple(rows.shape)} and dtype {rows.dtype}; give "
                f"{(ids.shape[0], config.embedding_dim)} of float32"
            )
        if not ids.numel():
            return
        ids = ids.to(self._device, torch.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.num_embeddings:
            raise ValueError(
                f"ids of table {table!r} are {low} to {high}; its rows are 0 to {config.num_embeddings - 1}: drop the "
                "others"
            )
        if ids.unique().numel() != ids.numel():
            raise ValueError(f"ids of table {table!r} name a row more than once; keep the last of each")
        packed = quantize_rows(table, ids, rows.to(self._device), self.data_type)
        with torch.no_grad():
            self._packed(table).index_copy_(0, ids, packed)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tables, with scales, biases and the padding between tables."""
        return self._storage.numel()

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self._device

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, their data_type that of the quantized rows."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    def extra_repr(self) -> str:
        """The dtype and the bytes, for print."""
        return f"{self.data_type.value.lower()}, memory_bytes={self.memory_bytes}"

    def _forward_at_one_stride(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if features.variable_stride_per_key():
            raise ValueError(
                f"a KeyedJaggedTensor of strides {features.stride_per_key()}, which fbgemm's quantized kernel would "
                "take for one stride; give RequestFeatures, each side at its own"
            )
        keys = [name for names in self._feature_names for name in names]
        given = features.keys()
        for name in keys:
            if name not in given:
                raise ValueError(f"feature {name!r} is missing; {nearest_name(name, given)}")
        pooled = self._pooled("all", features)
        return KeyedTensor.from_tensor_list(keys, [pooled[name] for name in keys])

    def _pooled(self, side: str, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        pooled: dict[str, Tensor] = {}
        for batch in self._batches[side]:
            part = _pick(features, batch.features)
            pooled |= batch.look_up(part.values(), part.offsets(), self._weights(part))
        return pooled

    def _unpooled(self, history: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        sequences: dict[str, JaggedTensor] = {}
        for batch in self._batches["history"]:
            columns = _pick(history, batch.features)
            lengths_FR = columns.lengths().view(len(batch.features), -1)
            num_events = lengths_FR.sum(dim=1).tolist()
            if min(num_events) != max(num_events):
                raise ValueError(
                    f"history columns {batch.features} hold {num_events} events; every event has one id in each: give "
                    "all columns the same lengths"
                )
            ids = columns.values()
            bags_of_one = torch.arange(ids.shape[0] + 1, dtype=ids.dtype, device=ids.device)
            rows = batch.look_up(ids, bags_of_one, None)
            for name, lengths_R in zip(batch.features, lengths_FR, strict=True):
                sequences[name] = JaggedTensor(rows[name], lengths=lengths_R)
        return sequences

    def _weights(self, ids: KeyedJaggedTensor) -> Tensor | None:
        if not self._is_weighted:
            return None
        weights = ids.weights_or_none()
        return torch.ones_like(ids.values(), dtype=torch.float32) if weights is None else weights.float()

    def _make_batches(self) -> dict[str, list[QuantizedTableBatch]]:
        """For each side, the features that pool alike; a history is of bags of one, whatever its table's pooling."""
        groups: dict[str, dict[PoolingType, list[TableReader]]] = {
            side: {} for side in ("request", "candidate", "history", "all")
        }
        for config in self._embedding_bag_configs:
            for name in config.feature_names:
                offset = self._offsets_bytes[config.name]
                reader = TableReader(name, config.name, config.num_embeddings, config.embedding_dim, offset)
                side, pooling = "candidate", config.pooling
                if name in self.sequence_features:
                    side, pooling = "history", PoolingType.SUM
                elif name in self.request_features:
                    side = "request"
                groups[side].setdefault(pooling, []).append(reader)
                groups["all"].setdefault(config.pooling, []).append(reader)
        return {
            side: [
                QuantizedTableBatch(readers, self.data_type, pooling, self._storage) for pooling, readers in by.items()
            ]
            for side, by in groups.items()
        }

    def _row_bytes(self, config: EmbeddingBagConfig) -> int:
        return packed_row_bytes(config.embedding_dim, self.data_type)

    def _config(self, table: str) -> EmbeddingBagConfig:
        return next(config for config in self._embedding_bag_configs if config.name == table)

    def _packed(self, table: str) -> Tensor:
        """(num_embeddings, bytes of a row) uint8, a view of the storage."""
        config, start = self._config(table), self._offsets_bytes[table]
        shape = (config.num_embeddings, self._row_bytes(config))
        return self._storage[start : start + shape[0] * shape[1]].view(shape)

    def _attach(self) -> None:
        """Let the kernels and the state dict read the storage."""
        for name, bag in self.embedding_bags.items():
            bag.register_buffer("weight", self._packed(name))
        for batches in self._batches.values():
            for batch in batches:
                batch.attach(self._storage)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedRequestBroadcastEBC:
        """What `to`, `half`, `share_memory` and the like call; the storage goes as one, and its views follow."""
        storage = fn(self._storage)
        _check_device(storage.device)
        if storage.dtype is not torch.uint8:
            raise ValueError(f"quantized tables can't be cast to {storage.dtype}; cast the other modules one by one")
        self._storage = storage
        self._attach()
        return self


def _pick(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    keys = features.keys()
    return features if keys == names else features.permute([keys.index(name) for name in names])


def _check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(
            f"device={str(device)!r}, but quantized tables are looked up by fbgemm's CPU kernel; keep them on 'cpu'"
        )


def _refuse_float_weights(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """torch would cast a float weight to uint8 wherever its shape fits, as that of an int4 table of dim 8 does."""
    assert isinstance(module, QuantizedRequestBroadcastEBC)
    for table in module.embedding_bags:
        weight = state_dict.get(f"{prefix}embedding_bags.{table}.weight")
        if weight is not None and weight.dtype is not torch.uint8:
            raise ValueError(
                f"the state dict has table {table!r} in {weight.dtype}, and this collection reads packed uint8; load "
                "it into the float model and give that to quantize_tables"
            )


def _take_assigned_weights(module: nn.Module, _: object) -> None:
    """load_state_dict(assign=True) puts tensors of its own in place of the views; their bytes go into the storage."""
    assert isinstance(module, QuantizedRequestBroadcastEBC)
    for table, bag in module.embedding_bags.items():
        packed, weight = module._packed(table), cast(Tensor, bag.weight)
        if weight.data_ptr() != packed.data_ptr():
            packed.copy_(weight)
    module._attach()
