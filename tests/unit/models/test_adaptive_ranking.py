import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

from torchrec_adaptive.models import AdaptiveRankingConfig, AdaptiveRankingModel, RankingTask, build_model
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, RequestFeatures, batch_from_rows, expand_kjt

SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 40, 16),
        Feature.bag("tags", "request", 30, 8, pooling="mean"),
        Feature.bag("item", "candidate", 50, 16, table="films"),
        Feature.bag("genres", "candidate", 12, 24),
        Feature.sequence("seen", 50, 16, table="films"),
        Feature.sequence("action", 5, 4),
        Feature.dense("hour", "request", 2),
        Feature.dense("price", "candidate"),
    ),
    tasks=("click", "buy"),
)
CONFIG = AdaptiveRankingConfig(
    token_dim=16, num_layers=2, num_fmb_tokens=4, num_lcb_tokens=3, rank=4, mlp_widths=(32,), recency=True
)
DEEP = dataclasses.replace(
    CONFIG,
    num_encoder_layers=2,
    encoder_dim=12,
    num_request_layers=2,
    num_request_tokens=2,
    norm="rms",
)
# candidates and events of each request
SHAPES = [
    ([3], [2]),
    ([1], [0]),
    ([2, 0, 5], [3, 1, 0]),
    ([0, 0], [2, 0]),
    ([], []),
    ([1, 40], [17, 2]),
]


def batch_of(candidates: list[int], events: list[int], schema: FeatureSchema = SCHEMA, seed: int = 0) -> RequestBatch:
    """Random requests with so many candidates and events each."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(specs: tuple[Feature, ...], count: int | None = None) -> dict:
        """`count` ids a feature; None for one of an id feature and 0 to 2 of a bag."""
        single = {"user", "item"}
        counts = [1 if f.name in single else int(torch.randint(3, (), generator=generator)) for f in specs]
        return {
            f.name: torch.randint(f.num_embeddings, (some if count is None else count,), generator=generator).tolist()
            for f, some in zip(specs, counts)
        }

    rows = []
    for number, (num_candidates, num_events) in enumerate(zip(candidates, events)):
        shared = drawn(schema.request_bags) | drawn(schema.sequences, num_events)
        shared |= {f.name: [0.1 * number] * f.width for f in schema.request_dense}
        for place in range(max(1, num_candidates)):
            row = (
                shared
                | drawn(schema.candidate_bags)
                | {f.name: [0.5 * place] * f.width for f in schema.candidate_dense}
            )
            labels = {task: (place + shift) % 2 for shift, task in enumerate(schema.tasks)}
            rows.append(row | {"request_id": number, "weight": 0.5 + place, "labels": labels})
    return keep_candidates(batch_from_rows(schema, rows), candidates)


def keep_candidates(batch: RequestBatch, counts: list[int]) -> RequestBatch:
    """Without the one candidate that stood in for each request that has none."""
    index = batch.candidate_to_request
    keep = torch.tensor([counts[r] > 0 for r in index.tolist()], dtype=torch.bool)
    rows = keep.nonzero().flatten()
    features = dataclasses.replace(
        batch.features, candidate=expand_kjt(batch.features.candidate, rows), candidate_to_request=index[keep]
    )
    return dataclasses.replace(
        batch,
        features=features,
        candidate_dense=batch.candidate_dense[keep],
        labels=batch.labels[keep],
        weights=batch.weights[keep],
    )


def expanded(batch: RequestBatch) -> RequestBatch:
    """Each candidate a request of its own: every request-side value copied, as an impression-level system has it."""
    index = batch.candidate_to_request
    features = RequestFeatures(
        expand_kjt(batch.features.request, index),
        batch.features.candidate,
        expand_kjt(batch.features.history, index),
        torch.arange(batch.num_candidates, dtype=torch.int32),
    )
    return dataclasses.replace(batch, features=features, request_dense=batch.request_dense[index.long()])


def made(config: AdaptiveRankingConfig = CONFIG, schema: FeatureSchema = SCHEMA, seed: int = 0) -> AdaptiveRankingModel:
    torch.manual_seed(seed)
    return build_model(schema, config)


def gradients(model: nn.Module, batch: RequestBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    loss, (_, logits, _, _) = RankingTask(model)(batch)
    loss.backward()
    return logits, {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("config", [CONFIG, DEEP], ids=["shallow", "deep"])
@pytest.mark.parametrize(("candidates", "events"), SHAPES, ids=str)
def test_expanded_and_broadcast_evaluation_agree_with_gradients(candidates, events, config) -> None:
    model, batch = made(config), batch_of(candidates, events)
    batch.validate(SCHEMA)
    copied = expanded(batch)
    assert copied.num_requests == batch.num_candidates
    logits, grads = gradients(model, batch)
    logits_copied, grads_copied = gradients(model, copied)
    assert logits.shape == (sum(candidates), 2)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, logits_copied, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        assert grad is not None, f"{name} has no gradient: a rank with this batch would hang the all-reduce"
        torch.testing.assert_close(grad, grads_copied[name], rtol=1e-5, atol=1e-5, msg=name)


def test_a_batch_of_requests_scores_as_each_request_alone() -> None:
    model = made().eval()
    together = model(batch_of([3, 2], [4, 0]))
    rows = []
    batch = batch_of([3, 2], [4, 0])
    for r in range(2):
        mine = (batch.candidate_to_request == r).nonzero().flatten()
        features = RequestFeatures(
            expand_kjt(batch.features.request, torch.tensor([r])),
            expand_kjt(batch.features.candidate, mine),
            expand_kjt(batch.features.history, torch.tensor([r])),
            torch.zeros(len(mine), dtype=torch.int32),
        )
        alone = RequestBatch(
            features,
            batch.request_dense[r : r + 1],
            batch.candidate_dense[mine],
            batch.labels[mine],
            batch.weights[mine],
        )
        rows.append(model(alone))
    torch.testing.assert_close(together, torch.cat(rows), rtol=1e-5, atol=1e-5)


def test_the_request_side_is_encoded_at_the_requests_rows() -> None:
    """FLOPs counted by PyTorch: what one more candidate costs does not depend on the encoder and the tower."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(config: AdaptiveRankingConfig, num_candidates: int) -> int:
        model, batch = made(config), batch_of([num_candidates], [9])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(batch)
        return counter.get_total_flops()

    deeper = dataclasses.replace(DEEP, num_encoder_layers=3, num_request_layers=3)
    assert flops(deeper, 5) - flops(deeper, 1) == flops(DEEP, 5) - flops(DEEP, 1)
    assert flops(deeper, 1) > 1.3 * flops(DEEP, 1)


def test_what_the_logits_depend_on() -> None:
    """History, request and candidate each move the logits; another request's history does not."""
    model = made().eval()
    batch = batch_of([2, 2], [3, 3])
    before = model(batch)

    def after(change) -> torch.Tensor:
        changed = copy.deepcopy(batch)
        change(changed)
        return (model(changed) - before).abs().amax(1)

    def seen(b: RequestBatch) -> None:
        b.features.history["seen"].values()[0] = 49 - b.features.history["seen"].values()[0]

    assert bool((after(seen)[:2] > 1e-7).all())
    assert bool((after(seen)[2:] == 0).all())
    assert bool((after(lambda b: b.request_dense[1].add_(3.0))[2:] > 1e-6).all())
    moved = after(lambda b: b.candidate_dense[0].add_(3.0))
    assert moved[0] > 1e-6
    assert bool((moved[1:] == 0).all())


SCHEMAS = {
    "candidate dense only": FeatureSchema((Feature.dense("price", "candidate", 3),)),
    "no request side": FeatureSchema((Feature.bag("item", "candidate", 50, 8),)),
    "history and candidate": FeatureSchema(
        (Feature.bag("item", "candidate", 50, 8, table="i"), Feature.sequence("seen", 50, 8, table="i"))
    ),
    "request dense only": FeatureSchema((Feature.bag("item", "candidate", 50, 8), Feature.dense("hour", "request"))),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_schemas_that_lack_a_side_or_kind(schema: FeatureSchema) -> None:
    model, batch = made(schema=schema), batch_of([2, 0, 3], [2, 0, 0], schema)
    logits, grads = gradients(model, batch)
    assert logits.shape == (5, 1)
    assert None not in grads.values()
    torch.testing.assert_close(logits, gradients(model, expanded(batch))[0], rtol=1e-5, atol=1e-5)


def test_candidate_and_history_share_a_table() -> None:
    names = [name for name in made().state_dict() if name.startswith("embeddings.")]
    assert names == [f"embeddings.embedding_bags.{t}.weight" for t in ("user", "tags", "films", "genres", "action")]


def test_a_server_loads_the_weights() -> None:
    trained = made(seed=1).eval()
    config = json.loads(json.dumps(CONFIG.to_dict()))
    served = build_model(
        FeatureSchema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))), config, torch.device("meta")
    )
    assert {p.device.type for p in served.parameters()} == {"meta"}
    served.load_state_dict(trained.state_dict(), assign=True)
    batch = batch_of([4, 1], [3, 2])
    assert torch.equal(served.eval()(batch), trained(batch))


def test_seeded_and_deterministic() -> None:
    batch = batch_of([4, 1], [3, 2])
    config = dataclasses.replace(CONFIG, dropout=0.5)
    one, same, other = made(config).eval(), made(config).eval(), made(config, seed=1).eval()
    assert torch.equal(one(batch), same(batch))
    assert torch.equal(one(batch), one(batch))
    assert not torch.equal(one(batch), other(batch))
    one.train()
    assert not torch.equal(one(batch), one(batch))


def test_tables_begin_alike_whatever_their_rows() -> None:
    schema = FeatureSchema((Feature.bag("wide", "candidate", 50_000, 8), Feature.bag("narrow", "candidate", 100, 8)))
    stds = [float(table.detach().std()) for table in made(schema=schema).embeddings.parameters()]
    assert stds == pytest.approx([0.05, 0.05], rel=0.1)


def test_dropout_of_a_shared_token_is_the_requests() -> None:
    """In training, too, a request's candidates share its tokens: what is dropped is dropped for all of them."""
    model = made(dataclasses.replace(CONFIG, dropout=0.5)).train()
    seen: list[torch.Tensor] = []
    model.interaction.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].values))
    model(batch_of([5], [3]))
    assert seen[0].shape[0] == 1


@pytest.mark.parametrize("bias", [False, True])
def test_bias_terms(bias: bool) -> None:
    names = [name for name, _ in made(dataclasses.replace(CONFIG, bias=bias)).named_parameters() if "bias" in name]
    assert "logits.bias" in names
    assert (len(names) > 1) == bias


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: AdaptiveRankingConfig.from_dict({"token_dmi": 3}), "did you mean 'token_dim'"),
        (lambda: AdaptiveRankingConfig(dropout=1.0), "dropout=1.0"),
        (lambda: AdaptiveRankingConfig(table_init_std=0.0), "table_init_std=0.0 must be above 0"),
        (lambda: AdaptiveRankingConfig(token_dim=0), "token_dim=0 must be 1 or more"),
        (lambda: AdaptiveRankingConfig(num_layers=0), "num_layers=0"),
        (lambda: AdaptiveRankingConfig(head_widths=(0,)), r"head_widths=\(0,\)"),
        (lambda: AdaptiveRankingConfig(num_request_layers=-1), "num_request_layers=-1 must be 0 or more"),
        (lambda: AdaptiveRankingConfig(num_encoder_layers=1, encoder_dim=15), "num_encoder_heads=2 must divide .* 15"),
        (
            lambda: AdaptiveRankingConfig(token_dim=15, num_history_heads=2),
            "num_history_heads=2 must divide token_dim=15",
        ),
        (
            lambda: build_model(FeatureSchema((Feature.bag("user", "request", 4, 4),)), CONFIG),
            "no candidate-side feature",
        ),
    ],
)
def test_wrong_configs_are_refused(build, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()


def test_config_round_trip() -> None:
    config = AdaptiveRankingConfig(token_dim=8, mlp_widths=(4, 5), head_widths=(), dropout=0.25, bias=True)
    assert AdaptiveRankingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(dataclasses.replace(config))
