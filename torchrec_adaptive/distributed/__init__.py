"""Models over several ranks. The only folder that imports torchrec.distributed."""

from torchrec_adaptive.distributed.process_group import process_group
from torchrec_adaptive.distributed.request_broadcast import RequestBroadcastEBCSharder, ShardedRequestBroadcastEBC
from torchrec_adaptive.distributed.sharding import (
    SparseOptimizerConfig,
    full_state_dict,
    load_full_state_dict,
    plan_model,
    shard_model,
    sharders,
)

__all__ = [
    "RequestBroadcastEBCSharder",
    "ShardedRequestBroadcastEBC",
    "SparseOptimizerConfig",
    "full_state_dict",
    "load_full_state_dict",
    "plan_model",
    "process_group",
    "shard_model",
    "sharders",
]
