"""Blocks wired into ranking models."""

from torchrec_adaptive.models.adaptive_ranking import AdaptiveRankingModel, build_model
from torchrec_adaptive.models.config import AdaptiveRankingConfig
from torchrec_adaptive.models.task import RankingTask

__all__ = ["AdaptiveRankingConfig", "AdaptiveRankingModel", "RankingTask", "build_model"]
