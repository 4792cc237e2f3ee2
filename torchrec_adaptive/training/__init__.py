"""Training: the loop, its metrics and its checkpoints."""

from torchrec_adaptive.training.checkpoint import CheckpointFolder, Progress
from torchrec_adaptive.training.evaluation import StreamingMetrics, evaluate, predict, ranking_metrics
from torchrec_adaptive.training.source import BatchSource
from torchrec_adaptive.training.trainer import Trainer, TrainerConfig

__all__ = [
    "BatchSource",
    "CheckpointFolder",
    "Progress",
    "StreamingMetrics",
    "Trainer",
    "TrainerConfig",
    "evaluate",
    "predict",
    "ranking_metrics",
]
