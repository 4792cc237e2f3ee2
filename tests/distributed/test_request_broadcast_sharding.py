"""Two gloo ranks give what one process gives, for every sharding type, over several steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_adaptive.distributed import SparseOptimizerConfig, full_state_dict, shard_model
from torchrec_adaptive.embeddings import RequestBroadcastEBC
from torchrec_adaptive.models import AdaptiveRankingConfig, RankingTask, build_model
from torchrec_adaptive.request import Feature, FeatureSchema, batch_from_rows
from torchrec_adaptive.testing.gloo import run_ranks

LEARNING_RATE, EPS, STEPS = 0.1, 1e-6, 4


def make_schema(weighted: bool = False, pooling: str = "sum") -> FeatureSchema:
    return FeatureSchema(
        (
            Feature.bag("user", "request", 16, 8),
            Feature.bag("liked", "request", 12, 8, table="item", pooling=pooling, weighted=weighted),
            Feature.bag("item", "candidate", 12, 8, table="item", pooling=pooling),
            Feature.sequence("seen", 12, 8, table="item"),
            Feature.sequence("action", 3, 4),
        )
    )


def make_batch(schema: FeatureSchema, seed: int) -> list[dict]:
    """Two ranks take half each: 6 requests, 12 candidates, of which 6 in either half."""
    random = np.random.default_rng(seed)
    weighted = schema.feature("liked").weighted
    rows = []
    for request, candidates in enumerate((1, 2, 3, 3, 1, 2)):
        events = int(random.integers(0, 4))
        liked = random.integers(0, 12, random.integers(0, 4)).tolist()
        shared = {
            "request_id": request,
            "user": [int(random.integers(0, 16))],
            "liked": (liked, random.random(len(liked)).tolist()) if weighted else liked,
            "seen": random.integers(0, 12, events).tolist(),
            "action": random.integers(0, 3, events).tolist(),
        }
        for _ in range(candidates):
            rows.append(shared | {"item": random.integers(0, 12, 2).tolist(), "labels": {"label": random.random()}})
    return rows


def train_all(rank: int, world_size: int, schemas: list[FeatureSchema], sharding_type: str) -> list[dict]:
    return [train(rank, world_size, schema, sharding_type) for schema in schemas]


def train(rank: int, world_size: int, schema: FeatureSchema, sharding_type: str) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    task = RankingTask(build_model(schema, AdaptiveRankingConfig(token_dim=8, num_layers=2)))
    tables = [table.name for table in schema.tables]
    optimizer = SparseOptimizerConfig(learning_rate=LEARNING_RATE, eps=EPS)
    sharded = shard_model(task, optimizer=optimizer, sharding_types=dict.fromkeys(tables, sharding_type))
    local = [p for n, p in sharded.named_parameters() if "embedding_bags" in n and sharding_type == "data_parallel"]
    dense = [p for n, p in sharded.named_parameters() if "embedding_bags" not in n]
    optimizers = [torch.optim.SGD(dense, lr=0.1)]
    if local:
        assert len(local) == len(tables)
        optimizers.append(RowWiseAdagrad(local, lr=LEARNING_RATE, eps=EPS))
    losses = []
    for step in range(STEPS):
        rows = make_batch(schema, step)
        if world_size == 2:
            rows = rows[:6] if rank == 0 else rows[6:]
        for each in optimizers:
            each.zero_grad()
        loss, _ = sharded(batch_from_rows(schema, rows))
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(float(loss.detach()))
    sharded.eval()
    logits = sharded.module.model(batch_from_rows(schema, make_batch(schema, 99)))
    return {name: value.numpy() for name, value in full_state_dict(sharded).items()} | {
        "logits": logits.detach().numpy(),
        "losses": np.array(losses),
    }


def train_unsharded(schema: FeatureSchema) -> dict[str, np.ndarray]:
    """The same steps with autograd alone: no TorchRec sharding, no fused kernel."""
    torch.manual_seed(0)
    task = RankingTask(build_model(schema, AdaptiveRankingConfig(token_dim=8, num_layers=2)))
    tables = [p for n, p in task.named_parameters() if "embedding_bags" in n]
    dense = [p for n, p in task.named_parameters() if "embedding_bags" not in n]
    optimizers = [torch.optim.SGD(dense, lr=0.1), RowWiseAdagrad(tables, lr=LEARNING_RATE, eps=EPS)]
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        task(batch_from_rows(schema, make_batch(schema, step)))[0].backward()
        for each in optimizers:
            each.step()
    task.eval()
    logits = task.model(batch_from_rows(schema, make_batch(schema, 99)))
    return {n: v.numpy() for n, v in task.state_dict().items()} | {"logits": logits.detach().numpy()}


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_two_ranks_train_to_what_one_process_does(sharding_type: str) -> None:
    schemas = [make_schema(), make_schema(weighted=True), make_schema(pooling="mean")]
    results = run_ranks(train_all, 2, schemas, sharding_type)
    for schema, first, second in zip(schemas, *results, strict=True):
        wanted = train_unsharded(schema)
        for name, value in wanted.items():
            np.testing.assert_allclose(first[name], value, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(second["logits"], wanted["logits"], atol=2e-5)
        assert not np.allclose(first["losses"], second["losses"]), "the ranks saw the same rows"
        assert set(wanted) == set(first) - {"losses"}, "state-dict keys differ from the unsharded model's"


def test_one_process_under_dmp_trains_the_same() -> None:
    schema = make_schema()
    wanted = train_unsharded(schema)
    (got,) = run_ranks(train, 1, schema, "table_wise")
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)


def plan_wrongly(rank: int, world_size: int) -> str:
    schema = make_schema()
    try:
        shard_model(build_model(schema, AdaptiveRankingConfig(token_dim=8)), sharding_types={"itme": "row_wise"})
    except ValueError as error:
        return str(error)
    return ""


class Subclass(RequestBroadcastEBC):
    """A class that no sharder matches exactly."""


def shard_a_subclass(rank: int, world_size: int) -> str:
    try:
        shard_model(Subclass([EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])]))
    except ValueError as error:
        return str(error)
    return ""


def test_a_misspelt_table_is_refused() -> None:
    assert "did you mean 'item'" in run_ranks(plan_wrongly, 1)[0]


def test_a_table_that_no_sharder_takes_is_refused() -> None:
    assert "['t'] are in no sharding plan" in run_ranks(shard_a_subclass, 1)[0]


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("planted")
    torch.distributed.barrier()


def test_the_launcher_shows_a_failing_rank() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*planted"):
        run_ranks(fail, 2)
