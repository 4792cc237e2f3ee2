"""Rows of an embedding table at 8 or 4 bits, in the bytes that fbgemm's look-up reads.

    | float16 scale | float16 bias | D values of 8 or 4 bits |        value = scale * q + bias

Each row has a scale and a bias of its own, so that a row is quantized without a look at the others.

Shape letters: N rows, D embedding dim, W bytes of a row (D + 4 for int8, D / 2 + 4 for int4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType

from torchrec_adaptive.request import nearest_name

TableDtype: TypeAlias = DataType | torch.dtype | str

_SCALE_BIAS_BYTES = 4
_DTYPES: dict[TableDtype, DataType] = {
    "int8": DataType.INT8,
    "int4": DataType.INT4,
    DataType.INT8: DataType.INT8,
    DataType.INT4: DataType.INT4,
    torch.int8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
}


def parse_table_dtype(dtype: TableDtype) -> DataType:
    """The two dtypes of a quantized table, by any of their names.

    Args:
        dtype: "int8" or "int4", TorchRec's DataType of that name, or the torch dtype that TorchRec's qconfig uses for
            it (torch.int8 or torch.quint8; torch.quint4x2).

    Returns:
        DataType.INT8 or DataType.INT4.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> parse_table_dtype("int4")
        <DataType.INT4: 'INT4'>
    """
    found = _DTYPES.get(dtype)
    if found is None:
        way_out = nearest_name(str(dtype), ["int8", "int4"])
        raise ValueError(f"dtype={dtype!r} is no dtype of quantized tables, which are int8 or int4; {way_out}")
    return found


def check_embedding_dim(table: str, embedding_dim: int, data_type: DataType) -> None:
    """Refuse a dim whose rows fbgemm can't pack: the values of a row must fill an even number of bytes.

    Args:
        table: its name, for the message.
        embedding_dim: D.
        data_type: DataType.INT8 or DataType.INT4.

    Raises:
        ValueError: D does not divide by 2 for int8, or by 4 for int4.
    """
    divisor = 16 // DATA_TYPE_NUM_BITS[data_type]
    if embedding_dim % divisor:
        rounded = -(-embedding_dim // divisor) * divisor
        raise ValueError(
            f"table {table!r} has embedding_dim={embedding_dim}, which must divide by {divisor} for "
            f"{data_type.value.lower()}; train it with {rounded}, or leave it in float"
        )


def packed_row_bytes(embedding_dim: int, data_type: DataType) -> int:
    """W.

    Args:
        embedding_dim: D, as `check_embedding_dim` allows it.
        data_type: DataType.INT8 or DataType.INT4.

    Returns:
        Bytes of a row, its scale and bias included.

    Example:
        >>> packed_row_bytes(64, DataType.INT8), packed_row_bytes(64, DataType.INT4)
        (68, 36)
    """
    return embedding_dim * DATA_TYPE_NUM_BITS[data_type] // 8 + _SCALE_BIAS_BYTES


def quantize_rows(table: str, ids: Sequence[int] | Tensor, rows: Tensor, data_type: DataType) -> Tensor:
    """Float rows in the bytes of the look-up.

    Args:
        table: its name, for the message.
        ids: (N,) of the rows, for the message.
        rows: (N, D) float32, float16 or bfloat16, on the CPU.
        data_type: DataType.INT8 or DataType.INT4.

    Returns:
        (N, W) uint8.

    Raises:
        ValueError: a row holds NaN or infinity, or numbers whose scale or bias float16 can't hold.
    """
    rows = rows.detach()
    if rows.dtype is not torch.float16:
        rows = rows.float()
    finite = torch.isfinite(rows).all(dim=1)
    _check_rows(table, ids, rows, finite, "NaN or infinity, as a model that has diverged; use weights from before")
    packed = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, DATA_TYPE_NUM_BITS[data_type])
    scale_bias, values = packed[:, -_SCALE_BIAS_BYTES:], packed[:, :-_SCALE_BIAS_BYTES]
    held = torch.isfinite(scale_bias.contiguous().view(torch.float16)).all(dim=1)
    _check_rows(
        table,
        ids,
        rows,
        held,
        "a scale or bias beyond float16, whose largest number is 65504; leave the table in float",
    )
    return torch.cat([scale_bias, values], dim=1)


def _check_rows(table: str, ids: Sequence[int] | Tensor, rows: Tensor, good: Tensor, what: str) -> None:
    if not bool(good.all()):
        first = int((~good).nonzero()[0])
        low, high = rows[first].min().item(), rows[first].max().item()
        raise ValueError(f"row {int(ids[first])} of table {table!r}, {low:g} to {high:g}, has {what}")
