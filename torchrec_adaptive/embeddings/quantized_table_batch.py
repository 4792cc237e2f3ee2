"""Tables of one pooling that one call of fbgemm's quantized kernel reads, in bytes that belong to somebody else.

Shape letters: F features, B rows (requests, candidates or events), V ids of all bags, D embedding dim of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.modules.embedding_configs import (
    DataType,
    PoolingType,
    data_type_to_sparse_type,
    pooling_type_to_pooling_mode,
)

ROW_ALIGNMENT = 1  # fbgemm's own for a CPU: rows lie end to end; its GPU kernels need 16, which pads them


@dataclass(frozen=True)
class TableReader:
    """A feature, and where the table that it reads lies.

    Args:
        feature: its name.
        table: the table's name.
        num_embeddings: rows of the table.
        embedding_dim: D.
        offset_bytes: of the table's first row in the storage.
    """

    feature: str
    table: str
    num_embeddings: int
    embedding_dim: int
    offset_bytes: int


class QuantizedTableBatch:
    """One fbgemm module over features of one pooling. It holds no weights: it reads the storage that it is given.

    Args:
        readers: the features, in the order of the output's columns.
        data_type: DataType.INT8 or DataType.INT4.
        pooling: of every bag.
        storage: (bytes,) uint8 on the CPU, all tables.
    """

    def __init__(
        self, readers: Sequence[TableReader], data_type: DataType, pooling: PoolingType, storage: Tensor
    ) -> None:
        self.readers = tuple(readers)
        self.features = [reader.feature for reader in readers]
        self._dims = [reader.embedding_dim for reader in readers]
        tables = {reader.table: reader for reader in readers}
        order = list(tables)
        sparse_type = data_type_to_sparse_type(data_type)
        self.tbe = IntNBitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (name, reader.num_embeddings, reader.embedding_dim, sparse_type, EmbeddingLocation.HOST)
                for name, reader in tables.items()
            ],
            feature_table_map=[order.index(reader.table) for reader in readers],
            pooling_mode=pooling_type_to_pooling_mode(pooling),
            device=storage.device,
            output_dtype=SparseType.FP32,
            row_alignment=ROW_ALIGNMENT,
            # WARNING, which is fbgemm's default, writes 0 over a bad id in the caller's tensor
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
        self.tbe.weights_physical_offsets = [reader.offset_bytes for reader in tables.values()]
        self.tbe.initialize_logical_weights_placements_and_offsets()
        self.tbe.weight_initialized = True
        self.attach(storage)

    def attach(self, storage: Tensor) -> None:
        """Read this storage from now on.

        Args:
            storage: as for the constructor, of the same layout.
        """
        self.tbe.host_size = storage.numel()
        self.tbe.weights_host = storage

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Pool the bags of all features in one call.

        Args:
            ids: (V,) int32 or int64, feature after feature; -1 is fbgemm's pruned row, of zeros.
            offsets: (F * B + 1,) integer, where each bag starts.
            weights: (V,) float32, or None.

        Returns:
            Feature to (B, D) float32; the tensors are columns of one.

        Raises:
            ValueError: an id is outside its table.
        """
        try:
            rows = self.tbe.forward(ids, offsets.to(ids.dtype), weights)
        except RuntimeError as error:
            self._name_bad_id(ids, offsets, error)
            raise
        return dict(zip(self.features, rows.split(self._dims, dim=1), strict=True))

    def _name_bad_id(self, ids: Tensor, offsets: Tensor, error: RuntimeError) -> None:
        num_rows = (offsets.numel() - 1) // len(self.readers)
        bounds = offsets[::num_rows].tolist() if num_rows else []
        for reader, start, end in zip(self.readers, bounds, bounds[1:], strict=False):
            bag_ids = ids[start:end]
            bad = bag_ids[torch.logical_or(bag_ids < -1, bag_ids >= reader.num_embeddings)]
            if bad.numel():
                raise ValueError(
                    f"feature {reader.feature!r} has the id {int(bad[0])}; table {reader.table!r} has rows 0 to "
                    f"{reader.num_embeddings - 1}: hash or clip the ids to them"
                ) from error
