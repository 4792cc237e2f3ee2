"""Request-oriented ranking models of LLM scale on TorchRec: train, publish, serve, update in place.

The public modules are importable from here; each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'torchrec_adaptive' has no attribute {name!r}; it has {sorted(_HOMES)}")
    return getattr(importlib.import_module(f"torchrec_adaptive.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
