"""Operators that mix what belongs to the request with what belongs to the candidate, without a copy."""

from torchrec_adaptive.ops.broadcast_attention import broadcast_attention
from torchrec_adaptive.ops.broadcast_factorization_machine import broadcast_factorization_machine
from torchrec_adaptive.ops.broadcast_linear import broadcast_linear
from torchrec_adaptive.ops.broadcast_matmul import broadcast_matmul
from torchrec_adaptive.ops.rms_norm import RMSNorm

__all__ = ["RMSNorm", "broadcast_attention", "broadcast_factorization_machine", "broadcast_linear", "broadcast_matmul"]
