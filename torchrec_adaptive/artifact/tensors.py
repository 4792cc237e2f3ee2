"""Weights as bytes and back: safetensors only, nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from torchrec_adaptive.artifact.manifest import ArtifactError

WEIGHTS_NAME, DENSE_NAME, ROWS_NAME = "weights.safetensors", "dense.safetensors", "rows.safetensors"


@dataclass(frozen=True)
class TableRows:
    """Rows of one table.

    Args:
        ids: (N,) int64, ascending, each once.
        rows: (N, D) of the table's dtype.
    """

    ids: Tensor
    rows: Tensor


def table_weight_name(table: str) -> str:
    """The state-dict name of a table's weight in a ranking model.

    Example:
        >>> table_weight_name("item")
        'embeddings.embedding_bags.item.weight'
    """
    return f"embeddings.embedding_bags.{table}.weight"


def save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors bytes."""
    return save({name: value.detach().to("cpu").contiguous() for name, value in tensors.items()})


def load_tensors(data: bytes, what: str) -> dict[str, Tensor]:
    """Tensors from safetensors bytes.

    Args:
        data: whole file.
        what: its name, for the message.

    Returns:
        Name to CPU tensor.

    Raises:
        ArtifactError: the bytes are no safetensors.
    """
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{what} is no safetensors file ({error}); publish the version again") from None


def save_rows(tables: Mapping[str, TableRows]) -> bytes:
    """Rows of several tables as safetensors bytes."""
    flat = {}
    for table, part in tables.items():
        flat[f"{table}/ids"], flat[f"{table}/rows"] = part.ids, part.rows
    return save_tensors(flat)


def load_rows(data: bytes, what: str) -> dict[str, TableRows]:
    """Rows of several tables from safetensors bytes.

    Args:
        data: as `save_rows` wrote it.
        what: the file's name, for the message.

    Returns:
        Table to rows.

    Raises:
        ArtifactError: no safetensors, or ids and rows that do not belong together.
    """
    flat = load_tensors(data, what)
    tables = {}
    for name in sorted(flat):
        table, slash, part = name.rpartition("/")
        if not slash or part not in ("ids", "rows") or f"{table}/ids" not in flat or f"{table}/rows" not in flat:
            raise ArtifactError(f"{what} holds {name!r}; it may hold <table>/ids and <table>/rows in pairs")
        ids, rows = flat[f"{table}/ids"], flat[f"{table}/rows"]
        if ids.dim() != 1 or ids.dtype != torch.int64 or rows.dim() != 2 or rows.shape[0] != ids.shape[0]:
            raise ArtifactError(
                f"{what} holds ids {tuple(ids.shape)} of {ids.dtype} and rows {tuple(rows.shape)} for {table!r}; ids "
                "must be (N,) int64 and rows (N, D)"
            )
        tables[table] = TableRows(ids, rows)
    return tables
