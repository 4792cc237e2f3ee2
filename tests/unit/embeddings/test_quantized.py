"""Quantized tables against TorchRec's quantized collection on expanded rows and fbgemm's own dequantization, by bits.

Shape letters: R requests, B candidates, T events, N rows, D embedding dim.
"""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.unit.embeddings.quantized_cases import (
    BITS,
    CANDIDATE,
    COUNTS,
    HISTORY,
    NUM_ROWS,
    REQUEST,
    assert_same_bits,
    batch,
    dequantized,
    features,
    float_ebc,
    kjt,
    model,
    schema,
    table,
    tables,
    torchrec_quantized,
)
from torchrec_adaptive.embeddings import (
    BroadcastKeyedTensor,
    QuantizedRequestBroadcastEBC,
    quantize_tables,
)
from torchrec_adaptive.models import AdaptiveRankingConfig, build_model
from torchrec_adaptive.request import RequestBatch


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_bags_are_torchrecs_on_expanded_rows(dtype: str, weighted: bool, ids: torch.dtype) -> None:
    ebc, both = float_ebc(weighted), features(weighted, ids)
    out = quantize_tables(ebc, dtype)(both)
    wanted = torchrec_quantized(ebc, dtype, tuple(HISTORY))(both.expand())
    assert out.keys() == ["user", "item", "liked", "city", "shop"]  # as the float collection has them
    assert (out.request_keys(), out.candidate_keys()) == (["user", "liked", "city"], ["item", "shop"])
    for name in out.keys():  # noqa: SIM118
        assert_same_bits(out[name], wanted[name])
    for name in REQUEST:
        assert out.broadcast(name).values.shape[0] == len(COUNTS)
    assert_same_bits(out.values(), torch.cat([wanted[name] for name in out.keys()], dim=1))  # noqa: SIM118


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_sequences_are_the_dequantized_rows(dtype: str) -> None:
    ebc, both = float_ebc(), features()
    out = quantize_tables(ebc, dtype)(both)
    for name, owner in (("seen", "t_item"), ("seen_shop", "t_shop")):
        ids = both.history[name]
        got = out.sequence(name)
        assert got.values().shape[0] == ids.values().numel() > 0
        assert_same_bits(got.values(), dequantized(ebc.embedding_bags[owner].weight, dtype)[ids.values()])
        assert torch.equal(got.lengths(), ids.lengths())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_are_within_a_step_of_the_float_ones(dtype: str) -> None:
    ebc, both = float_ebc(), features()
    got = quantize_tables(ebc, dtype)(both).sequence("seen_shop").values()
    rows = ebc(both).sequence("seen_shop").values().detach()
    step = (rows.amax(1) - rows.amin(1)) / (2 ** BITS[dtype] - 1)
    assert bool(((got - rows).abs().amax(1) <= step).all())
    assert not torch.equal(got, rows)


def test_ids_without_weights_weigh_one_in_a_weighted_collection() -> None:
    ebc = float_ebc(weighted=True)
    both = dataclasses.replace(features(), candidate=features(weighted=True).candidate)
    out = quantize_tables(ebc, "int8")(both)
    wanted = torchrec_quantized(ebc, "int8", tuple(HISTORY))(both.expand())
    for name in (*REQUEST, *CANDIDATE):
        assert_same_bits(out[name], wanted[name])


def test_a_plain_collection_and_float16_tables() -> None:
    configs = [dataclasses.replace(config, data_type=DataType.FP16) for config in tables()]
    torch.manual_seed(4)
    ebc, both = EmbeddingBagCollection(tables=configs), features()
    made = QuantizedRequestBroadcastEBC.from_float(ebc, torch.int8, REQUEST, HISTORY)
    assert ebc.embedding_bags["t_user"].weight.dtype == torch.float16
    wanted = torchrec_quantized(ebc, "int8", tuple(HISTORY))(both.expand())
    for name in (*REQUEST, *CANDIDATE):
        assert_same_bits(made(both)[name], wanted[name])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_keyed_jagged_tensor_gives_what_torchrecs_gives(dtype: str) -> None:
    ebc, one_stride = float_ebc(), kjt([*HISTORY, *CANDIDATE, *REQUEST], 6, 9)
    out, wanted = quantize_tables(ebc, dtype)(one_stride), torchrec_quantized(ebc, dtype)(one_stride)
    assert out.keys() == [name for config in tables() for name in config.feature_names]
    for name in out.keys():  # noqa: SIM118
        assert_same_bits(out[name], wanted[name])


def test_torchrecs_dlrm_takes_it() -> None:
    configs = [table("t_user", 8, ["user"]), table("t_item", 8, ["item"])]
    ebc = EmbeddingBagCollection(tables=configs)
    model = DLRM(ebc, dense_in_features=5, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])
    ids, dense = kjt(["user", "item"], 6, 3), torch.randn(6, 5)
    peer = copy.deepcopy(model, {id(ebc): torchrec_quantized(ebc, "int8")})
    assert torch.equal(quantize_tables(model, "int8")(dense, ids), peer(dense, ids))


def test_one_storage_holds_each_table_once() -> None:
    made = quantize_tables(float_ebc(), "int8")
    batches = [batch for side in made._batches.values() for batch in side]
    assert len(batches) == 7  # request, candidate and one-stride bags of both poolings; the history
    starts = {batch.tbe.weights_host.data_ptr() for batch in batches}
    starts |= {weight.untyped_storage().data_ptr() for weight in made.state_dict().values()}
    assert len(starts) == 1
    assert all(batch.tbe.weights_dev.numel() == batch.tbe.weights_uvm.numel() == 0 for batch in batches)
    row_bytes = [16 + 4, 8 + 4, 4 + 4, 36 + 4]
    assert made.memory_bytes == sum(-(-NUM_ROWS * size // 128) * 128 for size in row_bytes)
    assert made.memory_bytes == made.state_dict()["embedding_bags.t_user.weight"].untyped_storage().nbytes()
    assert not list(made.parameters())


def test_each_side_and_pooling_is_one_kernel_call() -> None:
    made, both = quantize_tables(float_ebc(), "int4"), features()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made(both)
    calls = [event.name for event in profile.events() if "int_nbit_split_embedding_codegen_lookup" in event.name]
    assert len(calls) == 2 + 2 + 1  # sum and mean of the requests, of the candidates; the history


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_updated_rows_are_those_of_the_updated_table(dtype: str) -> None:
    ebc, both = float_ebc(), features()
    made = quantize_tables(ebc, dtype)
    before = {name: weight.clone() for name, weight in made.state_dict().items()}
    place = made.embedding_bags["t_item"].weight.data_ptr()
    ids, rows = torch.tensor([7, 0, 39]), torch.randn(3, 8) * 5
    made.update_rows("t_item", ids, rows)
    with torch.no_grad():
        ebc.embedding_bags["t_item"].weight[ids] = rows
    wanted = quantize_tables(ebc, dtype)
    for name, weight in made.state_dict().items():
        assert torch.equal(weight, wanted.state_dict()[name])
        assert torch.equal(weight, before[name]) == ("t_item" not in name)
    assert made.embedding_bags["t_item"].weight.data_ptr() == place
    assert_same_bits(made(both).values(), wanted(both).values())
    made.update_rows("t_item", ids[:0], rows[:0])
    assert torch.equal(made.embedding_bags["t_item"].weight, wanted.embedding_bags["t_item"].weight)


def test_a_long_table_is_quantized_to_its_last_row() -> None:
    """Tables are quantized 65,536 rows at a time."""
    long = dataclasses.replace(table("t", 4, ["f"]), num_embeddings=150_001)
    ebc = EmbeddingBagCollection(tables=[long])
    wanted = torchrec_quantized(ebc, "int4").state_dict()["embedding_bags.t.weight"].elem
    assert torch.equal(quantize_tables(ebc, "int4").embedding_bags["t"].weight, wanted[:, :6])


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_round(assign: bool) -> None:
    made, both = quantize_tables(float_ebc(), "int4"), features()
    saved = {name: weight.clone() for name, weight in made.state_dict().items()}
    assert {weight.dtype for weight in saved.values()} == {torch.uint8}
    assert list(saved) == list(float_ebc().state_dict())
    fresh = QuantizedRequestBroadcastEBC(tables(), "int4", REQUEST, HISTORY)
    assert not bool(fresh(both).values().any())
    fresh.load_state_dict(saved, assign=assign)
    assert_same_bits(fresh(both).values(), made(both).values())
    assert_same_bits(fresh(both).sequence("seen").values(), made(both).sequence("seen").values())
    fresh.update_rows("t_user", torch.tensor([1]), torch.ones(1, 16))
    assert torch.equal(saved["embedding_bags.t_user.weight"], made.state_dict()["embedding_bags.t_user.weight"])


def test_a_copy_has_a_storage_of_its_own() -> None:
    made, both = quantize_tables(float_ebc(), "int8"), features()
    before, copied = made(both).values(), copy.deepcopy(made)
    assert_same_bits(copied(both).values(), before)
    copied.update_rows("t_shop", torch.arange(NUM_ROWS), torch.randn(NUM_ROWS, 36))
    assert_same_bits(made(both).values(), before)
    assert not torch.equal(copied(both)["shop"], made(both)["shop"])
    assert not torch.equal(copied(both).sequence("seen_shop").values(), made(both).sequence("seen_shop").values())


@pytest.mark.parametrize("move", [nn.Module.half, nn.Module.share_memory, lambda module: module.to("cpu")])
def test_casts_and_sharing_leave_the_numbers(move) -> None:
    made, both = quantize_tables(float_ebc(), "int8"), features()
    before = made(both).values()
    moved = move(made)
    assert_same_bits(moved(both).values(), before)
    moved.update_rows("t_user", torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, 16))
    assert not bool(moved(both)["user"].any())


def test_a_storage_that_moves_takes_kernels_and_state_dict_along() -> None:
    made, both = quantize_tables(float_ebc(), "int8"), features()
    before, place = made(both).values(), made.embedding_bags["t_user"].weight.data_ptr()
    made._apply(torch.clone)  # what a move of the module does to its tensors
    assert made.embedding_bags["t_user"].weight.data_ptr() != place
    assert_same_bits(made(both).values(), before)
    made.embedding_bags["t_user"].weight.zero_()
    assert not bool(made(both)["user"].any())


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_is_kept(training: bool) -> None:
    assert quantize_tables(float_ebc().train(training), "int8").training is training


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_no_candidate_and_no_request(counts: list[int], ids: torch.dtype) -> None:
    ebc, both = float_ebc(), features(dtype=ids, counts=counts)
    out = quantize_tables(ebc, "int8")(both)
    assert out.values().shape == (0, 16 + 8 + 8 + 4 + 36)
    for name in REQUEST:
        assert out.broadcast(name).values.shape[0] == len(counts)
    wanted = ebc(both)
    for name in HISTORY:
        assert out.sequence(name).values().shape == wanted.sequence(name).values().shape
        assert out.sequence(name).lengths().tolist() == wanted.sequence(name).lengths().tolist()
    if counts == [0, 0, 0]:
        liked = dequantized(ebc.embedding_bags["t_item"].weight, "int8")
        bag = both.request["liked"]
        pooled = nn.functional.embedding_bag(bag.values().long(), liked, bag.offsets()[:-1].long(), mode="sum")
        torch.testing.assert_close(out.broadcast("liked").values, pooled)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_models_scores_are_those_from_torchrecs_rows(dtype: str) -> None:
    dense, data = model(), batch()
    data.validate(dense.schema)
    before, state = dense(data), copy.deepcopy(dense.state_dict())
    quantized = quantize_tables(dense, dtype)
    got = quantized(data)

    ebc, index = dense.embeddings, data.candidate_to_request.long()
    rows = torchrec_quantized(ebc, dtype, tuple(HISTORY))(data.features.expand())
    request = {}
    for name in REQUEST:  # a request's row from any of its candidates; whom nobody reads stays 0
        request[name] = torch.zeros(len(COUNTS), rows[name].shape[1])
        request[name][index] = rows[name]
    sequences = {}
    for name, owner in (("seen", "t_item"), ("seen_shop", "t_shop")):
        ids = data.features.history[name]
        weight = dequantized(ebc.embedding_bags[owner].weight, dtype)
        sequences[name] = JaggedTensor(weight[ids.values()], lengths=ids.lengths())
    candidate = {name: rows[name] for name in CANDIDATE}
    peer = BroadcastKeyedTensor([*REQUEST, *CANDIDATE], request, candidate, data.candidate_to_request, sequences)
    assert_same_bits(got, dense.score(peer, data))

    assert got.shape == (sum(COUNTS), 2)
    assert not torch.equal(got, before)
    assert_same_bits(dense(data), before)
    assert all(torch.equal(value, state[name]) for name, value in dense.state_dict().items())
    assert isinstance(quantized.embeddings, QuantizedRequestBroadcastEBC)
    assert not quantized.training
    with torch.no_grad():
        quantized.logits.bias += 1
    assert_same_bits(dense(data), before)


def test_a_quantized_models_state_dict_goes_round() -> None:
    made, data = quantize_tables(model(), "int8"), batch()
    other = quantize_tables(build_model(schema(), AdaptiveRankingConfig()).eval(), "int8")
    with torch.inference_mode():
        wanted = made(data)
        assert not torch.equal(other(data), wanted)
        other.load_state_dict(made.state_dict())
        assert_same_bits(other(data), wanted)


def test_threads_score_as_one_does() -> None:
    quantized = quantize_tables(model(), "int8")
    batches = [batch(counts) for counts in ([1, 2], COUNTS, [5], [0, 7, 2], [3, 3, 3])]

    def score(data: RequestBatch) -> Tensor:
        with torch.inference_mode():
            return quantized(data)

    wanted = [score(data) for data in batches]
    with ThreadPoolExecutor(8) as pool:
        for got, alone in zip(pool.map(score, batches * 40), wanted * 40, strict=True):
            assert_same_bits(got, alone)
