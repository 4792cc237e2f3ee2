"""Models of one row a pair, rewritten: the same outputs, gradients and checkpoints, and what can't be is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.optimize import request_orient
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, batch_from_rows

DIM = 8


def make_schema(*dense: Feature) -> FeatureSchema:
    """Sides interleaved, as a schema that grew may have them."""
    return FeatureSchema(
        (
            *(dense or (Feature.dense("hour", "request", 2), Feature.dense("price", "candidate"))),
            Feature.bag("user", "request", 50, DIM, max_length=4),
            Feature.bag("item", "candidate", 40, DIM),
            Feature.bag("topics", "request", 30, DIM),
            Feature.bag("tags", "candidate", 20, DIM),
            Feature.bag("country", "request", 10, DIM),
        )
    )


SCHEMA = make_schema()


def make_collection(schema: FeatureSchema = SCHEMA, is_weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(
            name=f"table_{f.name}", num_embeddings=f.num_embeddings, embedding_dim=DIM, feature_names=[f.name]
        )
        for f in schema.features
        if not f.width
    ]
    return EmbeddingBagCollection(tables, is_weighted=is_weighted)


def make_batch(counts: tuple[int, ...], schema: FeatureSchema = SCHEMA, seed: int = 0) -> RequestBatch:
    generator = torch.Generator().manual_seed(seed)

    def value(feature: Feature) -> Any:
        if feature.width:
            return torch.randn(feature.width, generator=generator).tolist()
        length = int(torch.randint(0, 4, (), generator=generator))
        return torch.randint(feature.num_embeddings, (length,), generator=generator).tolist()

    rows = []
    for request, count in enumerate(counts):
        shared = {f.name: value(f) for f in schema.features if f.side == "request"} | {"request_id": request}
        rows += [shared | {f.name: value(f) for f in schema.features if f.side == "candidate"} for _ in range(count)]
    return batch_from_rows(schema, rows)


def expanded(batch: RequestBatch) -> tuple[Tensor, KeyedJaggedTensor]:
    """What the model itself takes: hour (2) and price (1), and every feature at B rows."""
    dense = torch.cat([batch.request_dense[batch.candidate_to_request.long()], batch.candidate_dense], dim=1)
    return dense, batch.features.expand()


class UsersOwn(nn.Module):
    """Every operator that a rule knows, and some that none does."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection
        self.dense = nn.Sequential(nn.Linear(3, DIM), nn.GELU(), nn.LayerNorm(DIM))
        self.user = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.SiLU(), nn.LayerNorm(DIM))
        self.wide = nn.Linear(5 * DIM, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 5 * DIM))
        self.last = nn.Linear(3 + 4 + 5 * DIM + 2 * DIM + 2, 1)

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.collection(sparse)
        every = pooled.values()
        user = self.user(torch.cat([pooled["user"], pooled["topics"]], dim=-1))
        tokens = every.view(sparse.stride(), 5, DIM)
        wide = self.wide(every.relu())
        shared = nn.functional.linear(torch.tanh(every * 2.0), self.weight)
        stacked = torch.stack([user, pooled["item"], pooled["country"]], dim=1)
        crossed = user * pooled["item"]
        mean = stacked.transpose(1, 2).softmax(dim=2).sum(dim=2)
        lengths = every.norm(dim=1, keepdim=True)
        total = (tokens * tokens).sum(1).sum(1, keepdim=True)
        cube = every * every * every.sigmoid()
        return self.last(
            torch.cat([wide, shared, cube, crossed + self.dense(dense), mean, lengths.log1p(), total], dim=1)
        ).squeeze(-1)


def make_models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "DLRM": DLRM(make_collection(), 3, [16, DIM], [16, 8, 1]),
        "DLRM_DCN": DLRM_DCN(make_collection(), 3, [16, DIM], [16, 8, 1], 2, 4),
        "DeepFM": SimpleDeepFMNN(3, make_collection(), 16, 5),
        "UsersOwn": UsersOwn(make_collection()),
    }


def run(name: str, model: nn.Module, batch: RequestBatch) -> Tensor:
    dense, sparse = expanded(batch)
    return model(sparse, dense) if name == "UsersOwn" else model(dense, sparse)


@pytest.mark.parametrize("counts", [(1,), (100,), (3, 1, 40, 2), (1, 1, 1)])
@pytest.mark.parametrize("name", list(make_models()))
def test_outputs_are_the_models(name: str, counts: tuple[int, ...]) -> None:
    model = make_models()[name].eval()
    batch = make_batch(counts)
    with torch.inference_mode():
        torch.testing.assert_close(request_orient(model, SCHEMA)(batch), run(name, model, batch), atol=1e-5, rtol=1e-5)


def test_a_batch_without_candidates_has_no_rows() -> None:
    model = make_models()["DLRM"].eval()
    assert request_orient(model, SCHEMA)(batch_from_rows(SCHEMA, [])).shape == (0, 1)


@pytest.mark.parametrize("name", list(make_models()))
def test_gradients_are_the_models(name: str) -> None:
    model = make_models()[name]
    batch = make_batch((3, 1, 9))
    oriented = request_orient(model, SCHEMA)
    assert oriented.training
    gradients = []
    for output in (run(name, model, batch), oriented(batch)):
        model.zero_grad()
        output.square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], gradient, atol=1e-4, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", list(make_models()))
def test_parameters_are_shared_and_checkpoints_load(name: str) -> None:
    model = make_models()[name].eval()
    before = set(vars(model)) | set(model.state_dict())
    oriented = request_orient(model, SCHEMA)
    assert set(vars(model)) | set(model.state_dict()) == before
    assert oriented.state_dict().keys() == model.state_dict().keys()
    batch = make_batch((4, 5))
    other = make_models()[name].eval()
    with torch.no_grad():
        oriented(batch)
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        oriented.load_state_dict(other.state_dict())
        torch.testing.assert_close(oriented(batch), run(name, other, batch), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(run(name, model, batch), run(name, other, batch))


def test_the_report_says_what_became_of_each_operator() -> None:
    report = request_orient(make_models()["DLRM"], SCHEMA).report
    assert not report.left
    by_name = {operator.name: operator for operator in report.operators}
    gram = by_name["bmm"]
    assert gram.kind == "decomposed"
    assert gram.before == 2 * 6 * 6 * DIM
    assert gram.after_request == 2 * 3 * 3 * DIM
    assert gram.after_candidate == 2 * (3 * 3 + 3 * 3) * DIM
    first = by_name["over_arch_model_0__mlp_0__linear"]
    assert (first.kind, first.before) == ("decomposed", 2 * 16 * (DIM + 15))
    assert first.after_candidate == 2 * 16 * (DIM + 12)
    assert first.module == "over_arch.model.0._mlp.0._linear"
    before, after = report.flops(1, 1000)
    assert before == 1000 * sum(operator.before for operator in report.operators)
    assert after < before
    assert "over_arch_model_0__mlp_0__linear" in str(report)


def test_the_report_names_what_mathematics_forbids() -> None:
    report = request_orient(make_models()["DLRM_DCN"], SCHEMA).report
    assert [operator.name for operator in report.left] == ["mul", "add_1", "mul_1"]
    assert {operator.module for operator in report.left} == {"inter_arch.crossnet"}
    assert all("element by element" in operator.reason for operator in report.left)
    assert "inter_arch.crossnet:mul" in str(report)


def test_a_tower_of_the_request_runs_once_a_request() -> None:
    report = request_orient(make_models()["UsersOwn"], SCHEMA).report
    tower = next(operator for operator in report.hoisted if operator.name == "user_0")
    assert (tower.before, tower.after_request, tower.after_candidate) == (2 * 2 * DIM * DIM, 2 * 2 * DIM * DIM, 0)
    unknown = next(operator for operator in report.left if operator.name == "norm")
    assert "no rule knows" in unknown.reason


@pytest.mark.parametrize("side", ["request", "candidate"])
def test_dense_features_of_one_side(side: str) -> None:
    schema = make_schema(Feature.dense("counters", side, 3))
    model = DLRM(make_collection(schema), 3, [16, DIM], [16, 1]).eval()
    oriented = request_orient(model, schema)
    batch = make_batch((3, 4), schema)
    with torch.inference_mode():
        torch.testing.assert_close(oriented(batch), model(*expanded(batch)), atol=1e-5, rtol=1e-5)
    assert len([o for o in oriented.report.hoisted if o.after_request]) == (2 if side == "request" else 0)


def test_weights_changed_in_place_are_seen() -> None:
    model = make_models()["DLRM"].eval()
    oriented, batch = request_orient(model, SCHEMA), make_batch((3, 4))
    with torch.inference_mode():
        before = oriented(batch)
    with torch.no_grad():
        model.over_arch.model[0]._mlp[0]._linear.weight.mul_(1.5)
        model.over_arch.model[0]._mlp[0]._linear.bias.add_(0.5)
    with torch.inference_mode():
        after = oriented(batch)
        torch.testing.assert_close(after, model(*expanded(batch)), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, after)


class InPlace(UsersOwn):
    """What is changed in place is read again, by its old name too."""

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.collection(sparse)
        user, item = pooled["user"], pooled["item"]
        both = torch.cat([user, item], dim=1)
        before = both.sum(1)
        both.relu_()
        crossed = user * item
        user += 1.0
        return (
            (both * both).sum(1)
            + before
            + (user * item).sum(1)
            + crossed.sum(1)
            + nn.functional.relu(user, True).sum(1)
        )


def test_changes_in_place_are_seen_where_they_were() -> None:
    model = InPlace(make_collection()).eval()
    oriented, batch = request_orient(model, SCHEMA), make_batch((3, 1, 4))
    with torch.inference_mode():
        torch.testing.assert_close(oriented(batch), run("UsersOwn", model, batch), atol=1e-5, rtol=1e-5)


class Branching(UsersOwn):
    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.collection(sparse)
        if pooled["user"].sum() > 0:
            return pooled["user"]
        return pooled["item"]


class ReadsLengths(UsersOwn):
    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        return self.collection(sparse).values() * sparse.lengths()[0]


class MixesRows(UsersOwn):
    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        return self.dense(dense).sigmoid() if sparse is None else Untyped.softmax_over_rows(self.collection(sparse))


class Untyped(nn.Module):
    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, sparse, dense):
        return self.collection(sparse).values()

    @staticmethod
    def softmax_over_rows(pooled: Any) -> Tensor:
        return pooled["user"].softmax(0)


def test_an_operator_over_rows_is_left_and_right() -> None:
    model = MixesRows(make_collection()).eval()
    oriented, batch = request_orient(model, SCHEMA), make_batch((3, 4))
    torch.testing.assert_close(oriented(batch), run("UsersOwn", model, batch))
    assert [operator.name for operator in oriented.report.left] == ["softmax"]


@pytest.mark.parametrize(
    ("model", "schema", "sentence"),
    [
        (Branching, SCHEMA, r"Branching can't be traced by torch.fx at .*test_request_orient.py:\d+, `if pooled"),
        (ReadsLengths, SCHEMA, "node 'lengths' reads the sparse input"),
        (Untyped, SCHEMA, "argument 'sparse' of the model is of type None.*annotate"),
        (UsersOwn, FeatureSchema(SCHEMA.features[:-1]), "reads the feature 'country', which is no bag of the schema"),
        (UsersOwn, FeatureSchema(SCHEMA.features[2:]), "takes 'dense', but the schema has no dense feature"),
        (
            UsersOwn,
            FeatureSchema((*SCHEMA.features, Feature.sequence("seen", 9, 4))),
            "the schema has histories \\('seen'\\)",
        ),
        (
            UsersOwn,
            FeatureSchema((*SCHEMA.features[:-1], Feature.bag("country", "request", 11, DIM))),
            "num_embeddings=11 in the schema, and table 'table_country' 10 rows",
        ),
        (lambda _: nn.Linear(3, 1), SCHEMA, "Linear has no EmbeddingBagCollection"),
    ],
)
def test_what_cannot_be_is_refused(model, schema: FeatureSchema, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        request_orient(model(make_collection()), schema)
