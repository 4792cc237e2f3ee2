"""TorchRec's own models with their collection replaced: the same logits, gradients and checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive import RequestBroadcastEBC
from torchrec_adaptive.request import RequestFeatures, empty_kjt

DIM, REQUEST, CANDIDATE = 8, ("user", "city", "liked"), ("item", "shop")
COUNTS = torch.tensor([3, 0, 1, 4])


def tables() -> list[EmbeddingBagConfig]:
    names = {"user": ["user"], "city": ["city"], "item": ["item", "liked"], "shop": ["shop"]}
    return [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=20, embedding_dim=DIM, feature_names=features)
        for name, features in names.items()
    ]


def stock() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(tables=tables())


def kjt(names: tuple[str, ...], rows: int, seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(names) * rows,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(names), values=values, lengths=lengths)


def features() -> RequestFeatures:
    index = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), COUNTS)
    return RequestFeatures(kjt(REQUEST, 4, 1), kjt(CANDIDATE, 8, 2), empty_kjt(4), index)


def dlrm(ebc: EmbeddingBagCollection) -> nn.Module:
    torch.manual_seed(1)
    return DLRM(ebc, dense_in_features=5, dense_arch_layer_sizes=[16, DIM], over_arch_layer_sizes=[16, 1])


def dlrm_dcn(ebc: EmbeddingBagCollection) -> nn.Module:
    torch.manual_seed(1)
    return DLRM_DCN(ebc, 5, [16, DIM], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4)


def deepfm(ebc: EmbeddingBagCollection) -> nn.Module:
    torch.manual_seed(1)
    return SimpleDeepFMNN(5, ebc, hidden_layer_size=16, deep_fm_dimension=4)


@pytest.mark.parametrize("build", [dlrm, dlrm_dcn, deepfm])
def test_torchrecs_models_give_the_same_logits_and_gradients(build) -> None:
    plain = build(stock())
    replaced = build(RequestBroadcastEBC(tables(), request_features=REQUEST))
    replaced.load_state_dict(plain.state_dict())  # strict: the checkpoint of a plain collection loads as it is
    dense, both = torch.randn(8, 5), features()
    wanted, got = plain(dense, both.expand()), replaced(dense, both)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    wanted.square().sum().backward()
    got.square().sum().backward()
    other = dict(replaced.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(other[name].grad, parameter.grad, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("build", [dlrm, deepfm])
def test_a_plain_keyed_jagged_tensor_works_as_before(build) -> None:
    plain, replaced = build(stock()), build(RequestBroadcastEBC(tables(), request_features=REQUEST))
    replaced.load_state_dict(plain.state_dict())
    dense, expanded = torch.randn(8, 5), features().expand()
    assert torch.equal(replaced(dense, expanded), plain(dense, expanded))


def test_taking_over_a_collection_keeps_its_parameters() -> None:
    ebc = stock()
    made = RequestBroadcastEBC.from_ebc(ebc, request_features=REQUEST)
    assert {id(p) for p in made.parameters()} == {id(p) for p in ebc.parameters()}
    assert list(made.state_dict()) == list(ebc.state_dict())
    assert torch.equal(made(features()).values(), ebc(features().expand()).values())


def test_the_output_is_a_keyed_tensor_that_copies_nothing_until_asked() -> None:
    ebc, both = stock(), features()
    made, wanted = RequestBroadcastEBC.from_ebc(ebc, request_features=REQUEST), ebc(both.expand())
    out = made(both)
    assert out.keys() == wanted.keys()
    assert out.length_per_key() == wanted.length_per_key()
    user = out.broadcast("user")
    assert user.values.shape == (4, DIM)
    assert out._materialised is None
    torch.testing.assert_close(out["user"], wanted["user"])
    torch.testing.assert_close(out.candidate("item"), wanted["item"])
    assert out._materialised is None
    torch.testing.assert_close(out.values(), wanted.values())
    assert all(torch.equal(out.to_dict()[key], wanted[key]) for key in wanted.keys())  # noqa: SIM118
    groups = [["user", "shop"], ["item"], ["city", "liked"]]
    for got, part in zip(out.regroup([out], groups), wanted.regroup([wanted], groups), strict=True):
        torch.testing.assert_close(got, part)


def test_request_features_are_looked_up_once_a_request() -> None:
    """Rows that go through the tables: R for the request side, B for the candidates'."""
    made, both, seen = RequestBroadcastEBC.from_ebc(stock(), request_features=REQUEST), features(), []

    class LookUps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "embedding_bag" in func.name():
                seen.append(out[0].shape[0])
            return out

    with LookUps():
        made(both)
    assert sorted(seen) == [4, 4, 4, 8, 8]


def test_a_history_reads_the_candidates_table() -> None:
    configs = [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["item", "seen"])]
    ebc = RequestBroadcastEBC(configs, sequence_features=["seen"])
    history = KeyedJaggedTensor(keys=["seen"], values=torch.tensor([3, 3, 8]), lengths=torch.tensor([2, 0, 1]))
    item = KeyedJaggedTensor(keys=["item"], values=torch.tensor([3, 5]), lengths=torch.tensor([1, 1]))
    out = ebc(RequestFeatures(empty_kjt(3), item, history, torch.tensor([0, 2], dtype=torch.int32)))
    weight = ebc.embedding_bags["t"].weight
    assert torch.equal(out.sequence("seen").values(), weight[[3, 3, 8]])
    assert out.sequence("seen").lengths().tolist() == [2, 0, 1]
    assert out.keys() == ["item"]
    (out.sequence("seen").values().sum() + out["item"].sum()).backward()
    assert weight.grad.sum(1).tolist() == [0, 0, 0, 12, 0, 4, 0, 0, 4]


def test_weighted_bags() -> None:
    configs = [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a", "b"])]
    ebc = RequestBroadcastEBC(configs, request_features=["a"], is_weighted=True)
    plain = KeyedJaggedTensor(keys=["a"], values=torch.tensor([1, 2]), lengths=torch.tensor([2]))
    weighted = KeyedJaggedTensor(
        keys=["b"], values=torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor([0.5, 3.0])
    )
    out = ebc(RequestFeatures(plain, weighted, empty_kjt(1), torch.tensor([0], dtype=torch.int32)))
    weight = ebc.embedding_bags["t"].weight
    torch.testing.assert_close(out["a"][0], weight[1] + weight[2])
    torch.testing.assert_close(out["b"][0], 0.5 * weight[1] + 3 * weight[2])


def other_side(both: RequestFeatures) -> RequestFeatures:
    changed = copy.copy(both)
    changed.request, changed.candidate = both.candidate, both.request
    return changed


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: RequestBroadcastEBC(tables(), request_features=["usr"]), "did you mean 'user'"),
        (lambda: RequestBroadcastEBC(tables(), sequence_features=["itm"]), "did you mean 'item'"),
        (lambda: RequestBroadcastEBC(tables(), ["user"], ["user"]), "name it once"),
        (
            lambda: RequestBroadcastEBC.from_ebc(stock(), REQUEST)(other_side(features())),
            "but it is on the candidate side",
        ),
        (
            lambda: RequestBroadcastEBC.from_ebc(stock(), REQUEST)(features()).broadcast("item"),
            "no request-side feature",
        ),
        (lambda: RequestBroadcastEBC.from_ebc(stock(), REQUEST)(features()).candidate("user"), "no candidate-side"),
        (lambda: RequestBroadcastEBC.from_ebc(stock(), REQUEST)(features()).sequence("user"), "no sequence"),
        (
            lambda: RequestBroadcastEBC(
                [EmbeddingBagConfig(name="items", num_embeddings=2, embedding_dim=4, feature_names=["f"])]
            ),
            "'items_table' for one",
        ),
    ],
)
def test_what_is_wrong_is_named(act, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        act()
