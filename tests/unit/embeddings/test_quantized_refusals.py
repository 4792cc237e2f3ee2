"""What quantized tables refuse, and that nothing has changed then."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.unit.embeddings.quantized_cases import (
    CANDIDATE,
    HISTORY,
    REQUEST,
    features,
    float_ebc,
    int8,
    kjt,
    model,
    table,
    tables,
    torchrec_quantized,
)
from torchrec_adaptive.embeddings import (
    QuantizedRequestBroadcastEBC,
    RequestBroadcastEBC,
    quantize_tables,
)
from torchrec_adaptive.request import RequestFeatures, empty_kjt


def test_an_id_outside_its_table_is_named_and_left_as_it_was() -> None:
    both = features()
    shop = both.candidate.offset_per_key()[0]
    both.candidate.values()[shop] = 4000
    with pytest.raises(ValueError, match=r"feature 'shop' has the id 4000; table 't_shop' has rows 0 to 39"):
        quantize_tables(float_ebc(), "int8")(both)
    assert int(both.candidate.values()[shop]) == 4000


def test_an_update_that_is_refused_changes_nothing() -> None:
    made = quantize_tables(float_ebc(), "int8")
    before = made.embedding_bags["t_user"].weight.clone()
    rows = torch.randn(2, 16)
    rows[1, 3] = torch.nan
    with pytest.raises(ValueError, match="row 9 of table 't_user'"):
        made.update_rows("t_user", torch.tensor([4, 9]), rows)
    assert torch.equal(made.embedding_bags["t_user"].weight, before)


class Renamed(EmbeddingBagCollection):
    pass


def filled(value: float) -> RequestBroadcastEBC:
    ebc = float_ebc()
    with torch.no_grad():
        ebc.embedding_bags["t_city"].weight[17, 2] = value
    return ebc


def other_sides(both: RequestFeatures) -> RequestFeatures:
    return dataclasses.replace(both, request=both.candidate, candidate=both.request)


def ragged(both: RequestFeatures) -> RequestFeatures:
    return dataclasses.replace(both, history=kjt(HISTORY, 4, 8))


def two_strides() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["user", "item"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: quantize_tables(float_ebc(), "int9"), r"dtype='int9' is no dtype .*; did you mean"),
        (lambda: quantize_tables(float_ebc(), torch.float16), r"dtype=torch.float16 is no dtype"),
        (lambda: quantize_tables(float_ebc(), DataType.FP16), r"DataType.FP16.* is no dtype"),
        (
            lambda: QuantizedRequestBroadcastEBC([table("t", 7, ["f"])], "int8"),
            "must divide by 2 for int8; train it with 8",
        ),
        (
            lambda: QuantizedRequestBroadcastEBC([table("t", 6, ["f"])], "int4"),
            "must divide by 4 for int4; train it with 8",
        ),
        (lambda: QuantizedRequestBroadcastEBC([table("t", 8, ["f"])], "int4", ["g"]), "request_features names 'g'"),
        (lambda: QuantizedRequestBroadcastEBC([table("items", 8, ["f"])], "int4"), "'items_table' for one"),
        (
            lambda: QuantizedRequestBroadcastEBC([table("t", 8, ["f"])], "int4", device=torch.device("cuda")),
            "device='cuda', but quantized tables",
        ),
        (lambda: quantize_tables(model(), "int8").to("meta"), "keep them on 'cpu'"),
        (lambda: int8().type(torch.float32), "can't be cast to torch.float32"),
        (lambda: quantize_tables(filled(torch.nan), "int8"), "row 17 of table 't_city'.* NaN or infinity"),
        (lambda: quantize_tables(filled(-torch.inf), "int4"), "row 17 of table 't_city'.* NaN or infinity"),
        (lambda: quantize_tables(filled(-1e5), "int8"), "row 17 of table 't_city'.* beyond float16"),
        (lambda: quantize_tables(filled(1e8), "int8"), "row 17 of table 't_city'.* beyond float16"),
        (lambda: quantize_tables(nn.Linear(2, 2), "int8"), "Linear holds no EmbeddingBagCollection"),
        (lambda: quantize_tables(int8(), "int8"), "give an unsharded float model"),
        (lambda: quantize_tables(nn.Sequential(Renamed(tables=tables())), "int8"), "0 is a Renamed, a subclass"),
        (lambda: int8()(other_sides(features())), "but it is on the candidate side"),
        (lambda: int8()(dataclasses.replace(features(), history=empty_kjt(4))), "'seen' belongs to the history side"),
        (lambda: int8()(ragged(features())), "every event has one id in each"),
        (lambda: int8()(kjt([*REQUEST, *CANDIDATE, "seen", "sen_shop"], 3, 1)), "did you mean 'sen_shop'"),
        (lambda: int8()(two_strides()), r"strides \[1, 2\]"),
        (lambda: int8().update_rows("t_usr", torch.tensor([1]), torch.ones(1, 16)), "did you mean 't_user'"),
        (lambda: int8().update_rows("t_user", torch.tensor([1.0]), torch.ones(1, 16)), "give .N,. of int64"),
        (lambda: int8().update_rows("t_user", torch.tensor([1]), torch.ones(1, 15)), r"give \(1, 16\) of float32"),
        (lambda: int8().update_rows("t_user", torch.tensor([1]), torch.ones(1, 16).long()), "dtype torch.int64; give"),
        (
            lambda: int8().update_rows("t_user", torch.tensor([40]), torch.ones(1, 16)),
            "ids of .* are 40 to 40; its rows",
        ),
        (lambda: int8().update_rows("t_user", torch.tensor([-1]), torch.ones(1, 16)), "its rows are 0 to 39"),
        (lambda: int8().update_rows("t_user", torch.tensor([2, 2]), torch.ones(2, 16)), "more than once"),
        (
            lambda: quantize_tables(float_ebc(), "int4").load_state_dict(float_ebc().state_dict()),
            "'t_user' in torch.float32, and this collection reads packed uint8",
        ),
        (
            lambda: quantize_tables(model(), "int8").load_state_dict(model().state_dict()),
            "load it into the float model",
        ),
    ],
)
def test_what_is_wrong_is_named(act, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        act()


def test_a_state_dict_of_other_bits_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        quantize_tables(float_ebc(), "int4").load_state_dict(int8().state_dict())
    padded = torchrec_quantized(float_ebc(), "int8").state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        int8().load_state_dict(padded)
