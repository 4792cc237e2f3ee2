"""Real data sets as requests."""

from torchrec_adaptive.datasets.movielens import MovieLens, load_movielens, movielens_folder, movielens_schema
from torchrec_adaptive.datasets.movielens_splits import (
    FixedRequests,
    RandomSplitTraining,
    Requests,
    ShuffledRequests,
    random_split,
    slice_requests,
    timeline,
)

__all__ = [
    "FixedRequests",
    "MovieLens",
    "RandomSplitTraining",
    "Requests",
    "ShuffledRequests",
    "load_movielens",
    "movielens_folder",
    "movielens_schema",
    "random_split",
    "slice_requests",
    "timeline",
]
