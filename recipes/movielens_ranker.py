"""The model that the recipes share: a request-oriented ranker of films, small enough for two cores.

Change the configurations here, or copy the file: a new one is a function that changes two or three fields of another.
"""

from __future__ import annotations

from dataclasses import replace

from torchrec_adaptive.datasets import MovieLens, Requests, load_movielens, movielens_schema, slice_requests, timeline
from torchrec_adaptive.distributed import SparseOptimizerConfig
from torchrec_adaptive.models import AdaptiveRankingConfig
from torchrec_adaptive.request import FeatureSchema
from torchrec_adaptive.training import TrainerConfig

MODEL_NAME = "movielens"
EMBEDDING_DIM = 16
MAX_HISTORY_EVENTS = 100


def schema() -> FeatureSchema:
    """User features and history once a request, film features for each candidate."""
    return movielens_schema(EMBEDDING_DIM)


def model_config() -> AdaptiveRankingConfig:
    """One Wukong Turbo layer of 16 tokens."""
    return AdaptiveRankingConfig(token_dim=EMBEDDING_DIM, num_layers=1, dropout=0.2)


def trainer_config(num_epochs: int, num_checkpoint_steps: int = 0) -> TrainerConfig:
    """For passes over the past."""
    return TrainerConfig(
        num_epochs=num_epochs,
        dense_learning_rate=2e-3,
        dense_weight_decay=0.05,
        num_warmup_steps=100,
        final_learning_rate_fraction=0.2,
        sparse=SparseOptimizerConfig(learning_rate=0.05),
        embedding_l2=0.1,
        num_checkpoint_steps=num_checkpoint_steps,
    )


def online_trainer_config() -> TrainerConfig:
    """For one pass along the present: a steady rate, no warm-up."""
    past = trainer_config(num_epochs=1)
    return replace(
        past,
        dense_learning_rate=1e-4,
        sparse=replace(past.sparse, learning_rate=0.02),
        num_warmup_steps=0,
        final_learning_rate_fraction=1.0,
    )


def past_and_present(past_fraction: float, data: MovieLens | None = None) -> tuple[Requests, Requests]:
    """The timeline in two.

    Args:
        past_fraction: of the pages, the first of them.
        data: the ratings, by default the installed ones.

    Returns:
        Pages to train on, and pages to replay.

    Raises:
        ValueError: a part would be empty.
    """
    pages = timeline(data or load_movielens(), max_history=MAX_HISTORY_EVENTS)
    cut = int(past_fraction * pages.num_requests)
    if not 0 < cut < pages.num_requests:
        raise ValueError(f"past_fraction={past_fraction} leaves one part of the timeline empty; use 0.5 for one")
    return slice_requests(pages, 0, cut), slice_requests(pages, cut, pages.num_requests)
