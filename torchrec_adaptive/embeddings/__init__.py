"""Embedding tables for request-oriented models."""

from torchrec_adaptive.embeddings.broadcast_keyed_tensor import BroadcastKeyedTensor
from torchrec_adaptive.embeddings.quantized_request_broadcast import QuantizedRequestBroadcastEBC
from torchrec_adaptive.embeddings.request_broadcast import RequestBroadcastEBC, check_features
from torchrec_adaptive.embeddings.table_quantization import quantize_tables

__all__ = [
    "BroadcastKeyedTensor",
    "QuantizedRequestBroadcastEBC",
    "RequestBroadcastEBC",
    "check_features",
    "quantize_tables",
]
