"""Histories of users: encoded once a request, read by every candidate."""

from torchrec_adaptive.sequence.history_attention import HistoryAttention, HistoryMean, event_ages
from torchrec_adaptive.sequence.history_encoder import HistoryEncoder, HistoryEncoderLayer

__all__ = ["HistoryAttention", "HistoryEncoder", "HistoryEncoderLayer", "HistoryMean", "event_ages"]
