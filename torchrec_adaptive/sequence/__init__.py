"""Histories of users: encoded once a request, read by every candidate."""

from torchrec_adaptive.sequence.history_attention import HistoryAttention, HistoryMean, event_ages

__all__ = ["HistoryAttention", "HistoryMean", "event_ages"]
