"""Request-oriented ranking models of LLM scale on TorchRec: train, publish, serve, update in place.

The public modules are importable from here; each is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_adaptive._lazy import lazy_exports
from torchrec_adaptive._stack import check_stack, installed_versions

if TYPE_CHECKING:
    from torchrec_adaptive.embeddings import RequestBroadcastEBC
    from torchrec_adaptive.interaction import WukongTurboBlock
    from torchrec_adaptive.models import AdaptiveRankingModel
    from torchrec_adaptive.optimize import request_orient
    from torchrec_adaptive.request import Broadcast, Feature, FeatureSchema, RequestBatch, RequestFeatures

check_stack(installed_versions())

__version__ = "0.1.0"

_HOMES = {
    "AdaptiveRankingModel": "models",
    "Broadcast": "request",
    "Feature": "request",
    "FeatureSchema": "request",
    "RequestBatch": "request",
    "RequestBroadcastEBC": "embeddings",
    "RequestFeatures": "request",
    "WukongTurboBlock": "interaction",
    "request_orient": "optimize",
}

__all__ = [
    "AdaptiveRankingModel",
    "Broadcast",
    "Feature",
    "FeatureSchema",
    "RequestBatch",
    "RequestBroadcastEBC",
    "RequestFeatures",
    "WukongTurboBlock",
    "request_orient",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__)
