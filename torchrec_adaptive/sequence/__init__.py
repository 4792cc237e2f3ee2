"""Histories of users: encoded once a request, read by every candidate."""

from torchrec_adaptive.sequence.history_attention import HistoryAttention, HistoryMean

__all__ = ["HistoryAttention", "HistoryMean"]
