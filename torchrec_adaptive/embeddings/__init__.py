"""Embedding tables for request-oriented models."""

from torchrec_adaptive.embeddings.broadcast_keyed_tensor import BroadcastKeyedTensor
from torchrec_adaptive.embeddings.request_broadcast import RequestBroadcastEBC, check_features

__all__ = ["BroadcastKeyedTensor", "RequestBroadcastEBC", "check_features"]
