"""The Triton kernels on a card at real shapes, against float64; low precision is judged beside plain PyTorch's.

Shape letters: R requests, B candidates, K tokens of a side, M output tokens, N tokens, T events, H heads, D dim.
"""

import math

import pytest
import torch
from torch import Tensor

from torchrec_adaptive.ops.broadcast_attention_triton import broadcast_attention_triton
from torchrec_adaptive.ops.broadcast_factorization_machine_triton import broadcast_factorization_machine_triton
from torchrec_adaptive.ops.broadcast_linear_triton import broadcast_linear_triton

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_CANDIDATES, CANDIDATES_A_REQUEST = 1024, 70


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def even_index() -> Tensor:
    return (torch.arange(NUM_CANDIDATES, device="cuda") // CANDIDATES_A_REQUEST).int()


def uneven_index(num_requests: int) -> Tensor:
    """Ascending; the first request has half of the candidates, every third one has none."""
    index = torch.randint(num_requests, (NUM_CANDIDATES,), device="cuda")
    index[: NUM_CANDIDATES // 2] = 0
    return torch.where(index % 3 == 1, index - 1, index).sort().values.int()


def num_requests_of(index: Tensor) -> int:
    return int(index.max()) + 1


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, as a part of that of what is wanted."""
    return float((got.double() - wanted).norm() / wanted.norm())


def assert_as_good_as_plain(got: Tensor, plain: Tensor, wanted: Tensor) -> None:
    assert got.dtype == plain.dtype
    assert got.shape == wanted.shape
    eps = torch.finfo(got.dtype).eps
    # float32 sums differ in their order alone, by which plain PyTorch may be better or worse
    slack = 10 * eps if got.dtype == torch.float32 else eps / 8
    assert error_of(got, wanted) <= 1.2 * error_of(plain, wanted) + slack


def linear(weight_MK: Tensor, candidate_BKD: Tensor, request_RKD: Tensor, index: Tensor) -> Tensor:
    rows = [
        torch.matmul(weight_MK, torch.cat([request_RKD[part.long()], own], 1))
        for part, own in zip(index.split(128), candidate_BKD.split(128), strict=True)
    ]
    return torch.cat(rows)


def machine(projection_NK: Tensor, candidate_BND: Tensor, request_RND: Tensor, index: Tensor) -> Tensor:
    tokens_BND = torch.cat([request_RND[index.long()], candidate_BND], 1)
    return torch.matmul(tokens_BND, torch.matmul(tokens_BND.mT, projection_NK)).mT


def attention(
    query_BHD: Tensor, key_THD: Tensor, value_THD: Tensor, lengths_R: Tensor, index: Tensor, logits_TH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One request at a time."""
    out = torch.zeros_like(query_BHD)
    logsumexp = query_BHD.new_full(query_BHD.shape[:2], -math.inf)
    first = 0
    for request, length in enumerate(lengths_R.tolist()):
        events, rows = slice(first, first + length), index == request
        first += length
        if length and bool(rows.any()):
            scores = torch.einsum("bhd,thd->bht", query_BHD[rows], key_THD[events]) / math.sqrt(query_BHD.shape[2])
            if logits_TH is not None:
                scores = scores + logits_TH[events].mT
            out[rows] = torch.einsum("bht,thd->bhd", scores.softmax(2), value_THD[events])
            logsumexp[rows] = scores.logsumexp(2)
    return out, logsumexp


def attention_inputs(index: Tensor, num_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    num_requests = num_requests_of(index)
    lengths = torch.randint(1, 2049, (num_requests,), device="cuda")
    lengths[num_requests // 2] = 0
    num_events = int(lengths.sum())
    key, value = (randn(num_events, num_heads, head_dim, dtype=dtype) for _ in range(2))
    return randn(NUM_CANDIDATES, num_heads, head_dim, dtype=dtype), key, value, lengths.int(), index


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("even", [True, False])
def test_linear_at_the_shape_of_ikbo(even: bool, dtype: torch.dtype) -> None:
    index = even_index() if even else uneven_index(40)
    weight = randn(433, 1178 + 866, dtype=dtype, scale=2044**-0.5)
    candidate = randn(NUM_CANDIDATES, 866, 256, dtype=dtype)
    inputs = (weight, candidate, randn(num_requests_of(index), 1178, 256, dtype=dtype), index)
    wanted = linear(*[part.double() for part in inputs])
    assert_as_good_as_plain(broadcast_linear_triton(*inputs), linear(*inputs), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_over_features(dtype: torch.dtype) -> None:
    index = even_index()
    weight, candidate = randn(512, 3000, dtype=dtype, scale=0.02), randn(NUM_CANDIDATES, 1100, 1, dtype=dtype)
    inputs = (weight, candidate, randn(num_requests_of(index), 1900, 1, dtype=dtype), index)
    wanted = linear(*[part.double() for part in inputs])
    assert_as_good_as_plain(broadcast_linear_triton(*inputs), linear(*inputs), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("request_tokens", "candidate_tokens", "dim", "rank"), [(100, 60, 256, 24), (300, 133, 128, 96), (7, 5, 20, 3)]
)
def test_factorization_machine(
    request_tokens: int, candidate_tokens: int, dim: int, rank: int, even: bool, dtype: torch.dtype
) -> None:
    index = even_index() if even else uneven_index(40)
    projection = randn(request_tokens + candidate_tokens, rank, dtype=dtype, scale=1 / 16)
    candidate = randn(NUM_CANDIDATES, candidate_tokens, dim, dtype=dtype)
    inputs = (projection, candidate, randn(num_requests_of(index), request_tokens, dim, dtype=dtype), index)
    wanted = machine(*[part.double() for part in inputs])
    assert_as_good_as_plain(broadcast_factorization_machine_triton(*inputs), machine(*inputs), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(8, 64), (8, 128), (4, 256), (3, 20)])
@pytest.mark.parametrize("with_logits", [False, True])
def test_attention(with_logits: bool, num_heads: int, head_dim: int, even: bool, dtype: torch.dtype) -> None:
    inputs = attention_inputs(even_index() if even else uneven_index(40), num_heads, head_dim, dtype)
    logits = randn(len(inputs[1]), num_heads, dtype=dtype) if with_logits else None
    wide = [part.double() if part.is_floating_point() else part for part in inputs]
    wanted, wanted_logsumexp = attention(*wide, None if logits is None else logits.double())
    out, logsumexp = broadcast_attention_triton(*inputs, logits)
    assert_as_good_as_plain(out, attention(*inputs, logits)[0], wanted)
    torch.testing.assert_close(logsumexp.double(), wanted_logsumexp, rtol=1e-4, atol=1e-4)


def test_attention_beyond_two_billion_elements() -> None:
    """The events of the second request start past what 32 bits address."""
    lengths = torch.tensor([2**21, 500], device="cuda")
    key, value = (torch.zeros(2**21 + 500, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    key[-500:], value[-500:] = (randn(500, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    query, index = randn(70, 8, 128, dtype=torch.bfloat16), torch.ones(70, dtype=torch.int32, device="cuda")
    out, logsumexp = broadcast_attention_triton(query, key, value, lengths, index)
    part = (query, key[-500:], value[-500:])
    wanted, wanted_logsumexp = attention(*[p.double() for p in part], lengths[1:], index - 1, None)
    assert_as_good_as_plain(out, attention(*part, lengths[1:], index - 1, None)[0], wanted)
    torch.testing.assert_close(logsumexp.double(), wanted_logsumexp, rtol=1e-4, atol=1e-4)


def test_linear_beyond_two_billion_elements() -> None:
    num_candidates = 20_000  # 2.2e9 outputs
    index = torch.arange(num_candidates, device="cuda", dtype=torch.int32) // 100
    weight = randn(433, 32, dtype=torch.bfloat16)
    candidate, request = randn(num_candidates, 16, 256, dtype=torch.bfloat16), randn(200, 16, 256, dtype=torch.bfloat16)
    out = broadcast_linear_triton(weight, candidate, request, index)
    last = (weight, candidate[-128:], request, index[-128:])
    assert_as_good_as_plain(out[-128:], linear(*last), linear(*[p.double() for p in last[:3]], last[3]))


def test_no_launch_waits_for_the_device() -> None:
    index, dtype = even_index(), torch.bfloat16
    num_requests = num_requests_of(index)
    candidate = randn(NUM_CANDIDATES, 6, 64, dtype=dtype)
    request = randn(num_requests, 5, 64, dtype=dtype)
    weight, projection, inputs = (
        randn(7, 11, dtype=dtype),
        randn(11, 4, dtype=dtype),
        attention_inputs(index, 2, 64, dtype),
    )

    def call() -> list[Tensor]:
        return [
            broadcast_linear_triton(weight, candidate, request, index),
            broadcast_factorization_machine_triton(projection, candidate, request, index),
            *broadcast_attention_triton(*inputs),
        ]

    eager = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a capture fails where the host waits
        captured = call()
    graph.replay()
    for one, other in zip(eager, captured, strict=True):
        assert torch.equal(one, other)
