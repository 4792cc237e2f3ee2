"""Weights to artifacts."""

from torchrec_adaptive.publishing.publisher import Publisher, TouchedRows

__all__ = ["Publisher", "TouchedRows"]
