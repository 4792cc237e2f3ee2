"""A model for serving out of a trained one: its tables quantized, everything else as it was."""

from __future__ import annotations

import copy
from typing import TypeVar, overload

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_adaptive.embeddings.quantized_request_broadcast import QuantizedRequestBroadcastEBC
from torchrec_adaptive.embeddings.quantized_rows import TableDtype
from torchrec_adaptive.embeddings.request_broadcast import RequestBroadcastEBC

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@overload
def quantize_tables(module: EmbeddingBagCollection, dtype: TableDtype) -> QuantizedRequestBroadcastEBC:
    """Of a collection."""


@overload
def quantize_tables(module: ModuleT, dtype: TableDtype) -> ModuleT:
    """Of a model."""


def quantize_tables(module: nn.Module, dtype: TableDtype) -> nn.Module:
    """A collection, or a copy of a model, with its tables quantized for inference. What is given stays as it is.

    The float tables are not copied on the way; the other weights of a model are.

    Args:
        module: a RequestBroadcastEBC or EmbeddingBagCollection, or an unsharded model that holds some.
        dtype: "int8" or "int4", or any name that `parse_table_dtype` knows.

    Returns:
        QuantizedRequestBroadcastEBC for a collection, else a model of the same class.

    Raises:
        ValueError: as `QuantizedRequestBroadcastEBC.from_float`; or the model holds no collection, or one of a subclass
            whose look-up this module doesn't know.
    """
    quantized: dict[int, nn.Module] = {}
    for name, found in module.named_modules():
        if isinstance(found, EmbeddingBagCollection):
            if type(found) not in (EmbeddingBagCollection, RequestBroadcastEBC):
                raise ValueError(
                    f"{name or 'module'} is a {type(found).__name__}, a subclass of EmbeddingBagCollection with a "
                    "look-up of its own; put RequestBroadcastEBC.from_ebc of it in its place"
                )
            quantized[id(found)] = QuantizedRequestBroadcastEBC.from_float(found, dtype)
    if not quantized:
        raise ValueError(
            f"{type(module).__name__} holds no EmbeddingBagCollection to quantize; give an unsharded float model"
        )
    return copy.deepcopy(module, quantized)
