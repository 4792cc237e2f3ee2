"""Tables, inputs and TorchRec's quantized collection as the peer, for the tests of quantized tables."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as TorchRecQuantizedEBC
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.embeddings import (
    QuantizedRequestBroadcastEBC,
    RequestBroadcastEBC,
    quantize_tables,
)
from torchrec_adaptive.models import AdaptiveRankingConfig, AdaptiveRankingModel, build_model
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, RequestFeatures

BITS = {"int8": 8, "int4": 4}
TORCH_DTYPES = {"int8": torch.qint8, "int4": torch.quint4x2}
REQUEST, CANDIDATE, HISTORY = ["liked", "user", "city"], ["shop", "item"], ["seen_shop", "seen"]
NUM_ROWS = 40
COUNTS = [3, 0, 1, 4]  # candidates of each request


def tables() -> list[EmbeddingBagConfig]:
    """Sum and mean, several dims; "item" is read from all three sides."""
    return [
        table("t_user", 16, ["user"]),
        table("t_item", 8, ["item", "liked", "seen"]),
        table("t_city", 4, ["city"], PoolingType.MEAN),
        table("t_shop", 36, ["shop", "seen_shop"], PoolingType.MEAN),
    ]


def table(name: str, dim: int, features: list[str], pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=NUM_ROWS, embedding_dim=dim, feature_names=features, pooling=pooling
    )


def float_ebc(weighted: bool = False) -> RequestBroadcastEBC:
    torch.manual_seed(3)
    ebc = RequestBroadcastEBC(tables(), REQUEST, HISTORY, is_weighted=weighted)
    for weight in ebc.parameters():
        nn.init.normal_(weight)
    return ebc


def kjt(
    names: list[str],
    rows: int,
    seed: int,
    weighted: bool = False,
    same_lengths: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids, an empty one among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(names), rows), generator=generator, dtype=torch.int32)
    if rows:
        lengths[:, rows // 2] = 0
    if same_lengths:
        lengths[:] = lengths[0].clone()
    num_ids = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=names,
        values=torch.randint(0, NUM_ROWS, (num_ids,), generator=generator, dtype=dtype),
        lengths=lengths.flatten(),
        weights=torch.randn(num_ids, generator=generator) if weighted else None,
        stride=rows,
    )


def features(weighted: bool = False, dtype: torch.dtype = torch.int64, counts: list[int] = COUNTS) -> RequestFeatures:
    index = torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int64)
    )
    return RequestFeatures(
        kjt(REQUEST, len(counts), 1, weighted, dtype=dtype),
        kjt(CANDIDATE, sum(counts), 2, weighted, dtype=dtype),
        kjt(HISTORY, len(counts), 5, same_lengths=True, dtype=dtype),
        index,
    )


def torchrec_quantized(ebc: EmbeddingBagCollection, dtype: str, drop: tuple[str, ...] = ()) -> TorchRecQuantizedEBC:
    """TorchRec's own, of the same weights; features in `drop` are left out, and tables that nothing else reads."""
    configs = [copy.deepcopy(config) for config in ebc.embedding_bag_configs()]
    for config in configs:
        config.feature_names = [name for name in config.feature_names if name not in drop]
    configs = [config for config in configs if config.feature_names]
    plain = EmbeddingBagCollection(tables=configs, is_weighted=ebc.is_weighted())
    for name, bag in plain.embedding_bags.items():
        bag.weight.data = ebc.embedding_bags[name].weight.data
    plain.qconfig = QConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float32),
        weight=PlaceholderObserver.with_args(dtype=TORCH_DTYPES[dtype]),
    )
    return TorchRecQuantizedEBC.from_float(plain)


def dequantized(weight: Tensor, dtype: str) -> Tensor:
    """(N, D) float32, by fbgemm's row-wise operators."""
    packed = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight.detach(), BITS[dtype])
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, BITS[dtype])


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype == torch.float32
    assert torch.equal(got.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32))


def schema() -> FeatureSchema:
    return FeatureSchema(
        (
            Feature.bag("user", "request", NUM_ROWS, 16),
            Feature.bag("liked", "request", NUM_ROWS, 8, table="t_item"),
            Feature.bag("city", "request", NUM_ROWS, 4, pooling="mean"),
            Feature.dense("age", "request", 2),
            Feature.bag("item", "candidate", NUM_ROWS, 8, table="t_item"),
            Feature.bag("shop", "candidate", NUM_ROWS, 36, table="t_shop", pooling="mean"),
            Feature.dense("price", "candidate"),
            Feature.sequence("seen", NUM_ROWS, 8, table="t_item"),
            Feature.sequence("seen_shop", NUM_ROWS, 36, table="t_shop"),
        ),
        tasks=("click", "buy"),
    )


def model() -> AdaptiveRankingModel:
    torch.manual_seed(5)
    return build_model(schema(), AdaptiveRankingConfig(table_init_std=1.0)).eval()


def batch(counts: list[int] = COUNTS) -> RequestBatch:
    generator = torch.Generator().manual_seed(6)
    requests, candidates = len(counts), sum(counts)
    return RequestBatch(
        features(counts=counts),
        torch.randn(requests, 2, generator=generator),
        torch.randn(candidates, 1, generator=generator),
        torch.zeros(candidates, 2),
        torch.ones(candidates),
    )


def int8() -> QuantizedRequestBroadcastEBC:
    return quantize_tables(float_ebc(), "int8")
