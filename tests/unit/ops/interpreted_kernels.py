"""The Triton kernels under Triton's interpreter, against float64; test_triton_interpreter.py runs this in a process.

No bfloat16: the interpreter multiplies its bit patterns as integers. float16 goes the same way through the kernels.
"""

import pytest
import torch
from torch import Tensor

from torchrec_adaptive.ops.broadcast_attention_triton import (
    AttentionBlocks,
    broadcast_attention_triton,
    request_tiles,
)
from torchrec_adaptive.ops.broadcast_factorization_machine_triton import (
    ProductBlocks,
    broadcast_factorization_machine_triton,
)
from torchrec_adaptive.ops.broadcast_linear_triton import LinearBlocks, broadcast_linear_triton

# candidates of each request: one request with all, requests without any at either end and between, no candidate at all
COUNTS = [[5], [0, 19, 0, 1, 2], [1, 1, 3], [0, 0]]
DTYPES = [torch.float32, torch.float16]
LINEAR_BLOCKS = LinearBlocks(16, 16, 16, num_warps=4, num_stages=1)
ATTENTION_BLOCKS = AttentionBlocks(16, 16, num_warps=4, num_stages=1)
PRODUCT_BLOCKS = ProductBlocks(16, 16, 16, num_warps=4, num_stages=1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def index_of(counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))


def assert_as_good_as_plain(got: Tensor, plain: Tensor, wanted: Tensor) -> None:
    """Largest error within three times that of the same formula in plain PyTorch at the same precision."""
    assert got.dtype == plain.dtype
    assert got.shape == wanted.shape
    if wanted.numel():
        unit = torch.finfo(got.dtype).eps * wanted.abs().max()
        assert (got.double() - wanted).abs().max() <= 3 * (plain.double() - wanted).abs().max() + unit


def linear(weight: Tensor, candidate: Tensor, request: Tensor, index: Tensor) -> Tensor:
    return torch.einsum("mk,bkd->bmd", weight, torch.cat([request[index.long()], candidate], 1))


def machine(projection: Tensor, candidate: Tensor, request: Tensor, index: Tensor) -> Tensor:
    tokens = torch.cat([request[index.long()], candidate], 1)
    return (tokens @ (tokens.mT @ projection)).mT


def attention(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, index: Tensor, logits: Tensor | None):
    """One candidate at a time."""
    out, logsumexp = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
    ends = lengths.cumsum(0).tolist()
    for b, r in enumerate(index.tolist()):
        events = slice(ends[r] - int(lengths[r]), ends[r])
        if lengths[r]:
            scores = torch.einsum("hd,thd->ht", query[b], key[events]) / query.shape[2] ** 0.5
            scores = scores if logits is None else scores + logits[events].mT
            out[b] = torch.einsum("ht,thd->hd", scores.softmax(1), value[events])
            logsumexp[b] = scores.logsumexp(1)
    return out, logsumexp


@pytest.mark.parametrize("rows_a_candidate", [1, 3])
@pytest.mark.parametrize(
    "counts", [[0], [1], [4, 0, 9], [0, 0, 5, 0], [1] * 600, [0] * 255 + [8, 8], [1] * 256], ids=len
)
def test_each_row_is_in_one_tile_of_its_request(counts: list[int], rows_a_candidate: int) -> None:
    rows, tiles = [rows_a_candidate * count for count in counts], [-(-rows_a_candidate * c // 4) for c in counts]
    (first_rows, first_tiles), num_programs = request_tiles(index_of(counts), len(counts), 4, rows_a_candidate)
    assert first_rows.tolist() == [0, *torch.tensor(rows).cumsum(0).tolist()]
    assert first_tiles.tolist() == [0, *torch.tensor(tiles).cumsum(0).tolist()]
    assert sum(tiles) <= num_programs <= sum(rows) // 4 + 1 + len(counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    ("num_outputs", "request_tokens", "candidate_tokens", "dim"), [(19, 5, 18, 3), (7, 33, 2, 1), (2, 0, 3, 5)]
)
def test_linear(
    num_outputs: int, request_tokens: int, candidate_tokens: int, dim: int, counts: list[int], dtype: torch.dtype
) -> None:
    weight = torch.randn(num_outputs, request_tokens + candidate_tokens, dtype=dtype)
    candidate = torch.randn(sum(counts), candidate_tokens, dim, dtype=dtype)
    inputs = (weight, candidate, torch.randn(len(counts), request_tokens, dim, dtype=dtype), index_of(counts))
    wanted = linear(*[part.double() for part in inputs])
    assert_as_good_as_plain(broadcast_linear_triton(*inputs, LINEAR_BLOCKS), linear(*inputs), wanted)


def test_linear_reads_inputs_of_any_strides() -> None:
    weight, index = torch.randn(9, 6).mT, index_of([2, 1])
    candidate, request = torch.randn(3, 4, 5).mT, torch.randn(2, 4, 8)[:, :, ::2].mT
    wanted = linear(weight.double(), candidate.double(), request.double(), index)
    got = broadcast_linear_triton(weight, candidate, request, index, LINEAR_BLOCKS)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    ("request_tokens", "candidate_tokens", "dim", "rank"), [(5, 18, 19, 3), (17, 2, 4, 18), (0, 3, 1, 2), (3, 0, 5, 2)]
)
def test_factorization_machine(
    request_tokens: int, candidate_tokens: int, dim: int, rank: int, counts: list[int], dtype: torch.dtype
) -> None:
    projection = torch.randn(request_tokens + candidate_tokens, rank, dtype=dtype) / 4
    candidate = torch.randn(sum(counts), candidate_tokens, dim, dtype=dtype)
    inputs = (projection, candidate, torch.randn(len(counts), request_tokens, dim, dtype=dtype), index_of(counts))
    wanted = machine(*[part.double() for part in inputs])
    got = broadcast_factorization_machine_triton(*inputs, PRODUCT_BLOCKS)
    assert_as_good_as_plain(got, machine(*inputs), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dim", [3, 20, 130])
@pytest.mark.parametrize("with_logits", [False, True])
def test_attention(with_logits: bool, dim: int, counts: list[int], dtype: torch.dtype) -> None:
    lengths = torch.tensor([[37], [4, 0, 18, 16, 0], [0, 33, 1], [2, 3]][COUNTS.index(counts)])
    query = 2 * torch.randn(sum(counts), 2, dim, dtype=dtype)
    key, value = torch.randn(2, int(lengths.sum()), 2, dim, dtype=dtype)
    logits = torch.randn(len(key), 2, dtype=dtype) if with_logits else None
    inputs = (query, key, value, lengths, index_of(counts))
    wide = [part.double() if part.is_floating_point() else part for part in inputs]
    wanted, wanted_logsumexp = attention(*wide, None if logits is None else logits.double())
    out, logsumexp = broadcast_attention_triton(*inputs, logits, ATTENTION_BLOCKS)
    assert_as_good_as_plain(out, attention(*inputs, logits)[0], wanted)
    assert logsumexp.dtype == torch.float32
    torch.testing.assert_close(logsumexp.double(), wanted_logsumexp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_logits", [False, True])
def test_candidates_without_any_event(with_logits: bool) -> None:
    query, nothing, lengths = torch.randn(3, 2, 4), torch.randn(0, 2, 4), torch.zeros(2, dtype=torch.int32)
    logits = torch.randn(0, 2) if with_logits else None
    out, logsumexp = broadcast_attention_triton(query, nothing, nothing, lengths, index_of([2, 1]), logits)
    assert (out == 0).all()
    assert (logsumexp == -torch.inf).all()


def test_attention_where_logits_hide_events_and_scores_are_large() -> None:
    query, key, value = 40 * torch.randn(3, 1, 8), torch.randn(40, 1, 8), torch.randn(40, 1, 8)
    logits = torch.zeros(40, 1)
    logits[:20] = -torch.inf  # the first step sees hidden events alone
    logits[33:] = -torch.inf  # all events of the second request
    inputs = (query, key, value, torch.tensor([33, 7]), index_of([2, 1]))
    wanted, wanted_logsumexp = attention(*[p.double() if p.is_floating_point() else p for p in inputs], logits.double())
    out, logsumexp = broadcast_attention_triton(*inputs, logits, ATTENTION_BLOCKS)
    torch.testing.assert_close(out[:2].double(), wanted[:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logsumexp.double(), wanted_logsumexp, rtol=1e-5, atol=1e-5)
    assert (out[2] == 0).all()


def test_attention_reads_parts_of_a_larger_tensor_and_nothing_else() -> None:
    packed, query = torch.full((60, 2, 2, 40), torch.nan), torch.randn(4, 6, 2).mT
    key, value = packed[20:29, 0, :, :6], packed[20:29, 1, :, 3:9]
    packed[20:29, 0, :, :6], packed[20:29, 1, :, 3:9] = torch.randn(2, 9, 2, 6)
    logits = torch.randn(2, 9).mT
    inputs = (query, key, value, torch.tensor([6, 3]), index_of([1, 3]))
    wanted, wanted_logsumexp = attention(*inputs, logits)
    out, logsumexp = broadcast_attention_triton(*inputs, logits)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp, wanted_logsumexp, rtol=1e-5, atol=1e-5)
