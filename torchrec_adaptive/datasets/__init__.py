"""Real data sets as requests, and requests in Parquet files.

What needs pyarrow is loaded when it is first used, so that the rest works without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_adaptive._lazy import lazy_exports
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
from torchrec_adaptive.datasets.regroup import take_requests, to_single_impressions

if TYPE_CHECKING:
    from torchrec_adaptive.datasets.parquet_conversion import ConversionReport, convert_impressions
    from torchrec_adaptive.datasets.parquet_layout import read_parquet_schema
    from torchrec_adaptive.datasets.parquet_writer import write_impression_parquet, write_request_parquet
    from torchrec_adaptive.datasets.request_parquet import ImpressionParquet, RequestParquet

_HOMES = {
    "ConversionReport": "parquet_conversion",
    "ImpressionParquet": "request_parquet",
    "RequestParquet": "request_parquet",
    "convert_impressions": "parquet_conversion",
    "read_parquet_schema": "parquet_layout",
    "write_impression_parquet": "parquet_writer",
    "write_request_parquet": "parquet_writer",
}

__all__ = [
    "ConversionReport",
    "FixedRequests",
    "ImpressionParquet",
    "MovieLens",
    "RandomSplitTraining",
    "RequestParquet",
    "Requests",
    "ShuffledRequests",
    "convert_impressions",
    "load_movielens",
    "movielens_folder",
    "movielens_schema",
    "random_split",
    "read_parquet_schema",
    "slice_requests",
    "take_requests",
    "timeline",
    "to_single_impressions",
    "write_impression_parquet",
    "write_request_parquet",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__)
