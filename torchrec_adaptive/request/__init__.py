"""What a request is: one user, many candidates, and the features of each side."""

from torchrec_adaptive.request.batch import RequestBatch
from torchrec_adaptive.request.broadcast import Broadcast
from torchrec_adaptive.request.concat import concat_batches
from torchrec_adaptive.request.features import RequestFeatures, concat_kjts, empty_kjt, expand_kjt
from torchrec_adaptive.request.index import check_candidate_to_request
from torchrec_adaptive.request.rows import batch_from_rows
from torchrec_adaptive.request.schema import Feature, FeatureSchema, Kind, Side, TableSpec, nearest_name

__all__ = [
    "Broadcast",
    "Feature",
    "FeatureSchema",
    "Kind",
    "RequestBatch",
    "RequestFeatures",
    "Side",
    "TableSpec",
    "batch_from_rows",
    "check_candidate_to_request",
    "concat_batches",
    "concat_kjts",
    "empty_kjt",
    "expand_kjt",
    "nearest_name",
]
