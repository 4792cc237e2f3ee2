"""The ranking model under TorchRec: in its pipelines, and on a rank whose part of a step is empty."""

from __future__ import annotations

import numpy as np
import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from torchrec_adaptive.distributed import SparseOptimizerConfig, full_state_dict, process_group, shard_model
from torchrec_adaptive.models import AdaptiveRankingConfig, RankingTask, build_model
from torchrec_adaptive.request import (
    Feature,
    FeatureSchema,
    RequestBatch,
    RequestFeatures,
    batch_from_rows,
    expand_kjt,
)
from torchrec_adaptive.testing.gloo import run_ranks

SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 16, 8),
        Feature.bag("item", "candidate", 12, 8, table="film"),
        Feature.sequence("seen", 12, 8, table="film"),
        Feature.dense("price", "candidate"),
    )
)


def losses_of(pipeline_class: type, batches: list[RequestBatch]) -> list[float]:
    """Through one of TorchRec's pipelines, in one process."""
    torch.manual_seed(0)
    model = RankingTask(build_model(SCHEMA, AdaptiveRankingConfig(token_dim=8)))
    with process_group():
        sharded = shard_model(model, optimizer=SparseOptimizerConfig(learning_rate=0.1))
        dense = [p for n, p in sharded.named_parameters() if "embedding_bags" not in n]
        pipeline = pipeline_class(sharded, torch.optim.SGD(dense, lr=0.1), torch.device("cpu"))
        stream = iter(batches)
        losses = [float(pipeline.progress(stream)[0]) for _ in batches]
        if pipeline_class is TrainPipelineSparseDist:
            assert [type(module).__name__ for module in pipeline._pipelined_modules] == ["ShardedRequestBroadcastEBC"]
    return losses


def test_torchrecs_pipelines_carry_the_model() -> None:
    """The sparse one traces the model and sends the next batch's ids while this one computes."""
    batches = [batch_of("full"), batch_of("no candidates"), batch_of("full"), batch_of("full")]
    plain, sparse = (losses_of(kind, batches) for kind in (TrainPipelineBase, TrainPipelineSparseDist))
    np.testing.assert_allclose(plain, sparse, rtol=1e-6)
    assert plain[3] < plain[2] < plain[0]
    assert plain[1] == 0.0


def batch_of(kind: str) -> RequestBatch:
    rows = [
        {"request_id": r, "user": r, "seen": [r] * (2 * r), "item": r + 3, "price": 0.5 * i, "labels": {"label": i}}
        for r in range(3)
        for i in range(2)
    ]
    batch = batch_from_rows(SCHEMA, rows)
    if kind == "full":
        return batch
    none = torch.empty(0, dtype=torch.int32)
    requests = none if kind == "no requests" else torch.arange(3)
    return RequestBatch(
        RequestFeatures(
            expand_kjt(batch.features.request, requests),
            expand_kjt(batch.features.candidate, none),
            expand_kjt(batch.features.history, requests),
            none,
        ),
        torch.empty(len(requests), 0),
        torch.empty(0, 1),
        torch.empty(0, 1),
        torch.empty(0),
    )


def train(rank: int, world_size: int, kind: str) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    task = RankingTask(build_model(SCHEMA, AdaptiveRankingConfig(token_dim=8, num_layers=2, recency=True)))
    sharded = shard_model(task, optimizer=SparseOptimizerConfig(learning_rate=0.1))
    dense = [p for n, p in sharded.named_parameters() if "embedding_bags" not in n]
    optimizer = torch.optim.SGD(dense, lr=0.1 * world_size)  # gradients are the mean over the ranks
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = sharded(batch_of("full" if rank == 0 else kind))
        loss.backward()
        optimizer.step()
    return {name: value.numpy() for name, value in full_state_dict(sharded).items() if "embedding_bags" not in name}


def train_all(rank: int, world_size: int) -> dict[str, dict[str, np.ndarray]]:
    return {kind: train(rank, world_size, kind) for kind in ("no candidates", "no requests")}


def test_an_idle_rank_changes_nothing() -> None:
    (alone,) = run_ranks(train_all, 1)
    first, second = run_ranks(train_all, 2)
    for kind, weights in alone.items():
        assert set(weights) == set(first[kind]) == set(second[kind])
        for name, wanted in weights.items():
            np.testing.assert_allclose(first[kind][name], wanted, rtol=1e-5, atol=1e-6, err_msg=f"{kind}: {name}")
            np.testing.assert_array_equal(first[kind][name], second[kind][name], err_msg=f"{kind}: {name}")
