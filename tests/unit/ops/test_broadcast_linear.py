import pytest
import torch

from torchrec_adaptive.ops import broadcast_factorization_machine, broadcast_linear
from torchrec_adaptive.request import Broadcast

# candidates of each request: none at all, one, very different numbers, requests without any
COUNTS = [[3], [1], [1, 0, 7], [0, 2, 2], [0, 0], [], [1, 64]]


def sides(counts: list[int], request_tokens: int = 4, candidate_tokens: int = 3, dtype: torch.dtype = torch.float64):
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)).int()
    request = torch.randn(len(counts), request_tokens, 5, dtype=dtype, requires_grad=True)
    candidate = torch.randn(sum(counts), candidate_tokens, 5, dtype=dtype, requires_grad=True)
    return Broadcast(request, index), candidate


def materialised(request: Broadcast, candidate: torch.Tensor) -> torch.Tensor:
    rows = [torch.cat([request.values[r], row]) for r, row in zip(request.candidate_to_request.tolist(), candidate)]
    return torch.stack(rows) if rows else candidate.new_zeros(0, request.values.shape[1] + candidate.shape[1], 5)


OPERATORS = {
    "linear": (broadcast_linear, (6, 7), lambda weight, x: torch.einsum("mn,bnd->bmd", weight, x)),
    "machine": (
        broadcast_factorization_machine,
        (7, 2),
        lambda weight, x: torch.einsum("bnd,bmd,mk->bnk", x, x, weight),
    ),
}


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_the_materialised_product_with_gradients(name: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    operator, shape, plain = OPERATORS[name]
    request, candidate = sides(counts)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = (weight, request.values, candidate)
    got, wanted = operator(weight, candidate, request), plain(weight, materialised(request, candidate))
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(got)
    ours = torch.autograd.grad((got * direction).sum(), inputs)
    theirs = torch.autograd.grad((wanted * direction).sum() + 0 * sum(x.sum() for x in inputs), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", OPERATORS)
def test_without_a_request_the_candidate_has_all_tokens(name: str) -> None:
    torch.manual_seed(0)
    operator, shape, plain = OPERATORS[name]
    weight, candidate = torch.randn(shape, dtype=torch.float64), torch.randn(5, 7, 5, dtype=torch.float64)
    torch.testing.assert_close(operator(weight, candidate, None), plain(weight, candidate))


@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck(name: str) -> None:
    torch.manual_seed(0)
    operator, shape, _ = OPERATORS[name]
    request, candidate = sides([2, 0, 3])
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    index = request.candidate_to_request
    assert torch.autograd.gradcheck(
        lambda w, c, r: operator(w, c, Broadcast(r, index)), (weight, candidate, request.values)
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_tokens_must_fit_the_weight(name: str) -> None:
    operator, shape, _ = OPERATORS[name]
    request, candidate = sides([2, 1], request_tokens=2)
    with pytest.raises(ValueError, match="the request has 2 tokens and the candidate 3"):
        operator(torch.zeros(shape, dtype=torch.float64), candidate, request)


def test_bfloat16_halves_are_added_in_float32() -> None:
    """The error against float64 stays near that of the undivided bfloat16 product."""
    torch.manual_seed(0)
    request, candidate = sides([40, 24], request_tokens=64, candidate_tokens=48, dtype=torch.bfloat16)
    weight = (torch.randn(32, 112) / 10).bfloat16()
    with torch.no_grad():
        x = materialised(request, candidate)
        exact = torch.matmul(weight.double(), x.double())
        plain = (torch.matmul(weight, x).double() - exact).abs().mean()
        got = broadcast_linear(weight, candidate, request)
        ours = (got.double() - exact).abs().mean()
        rounded = (torch.matmul(weight[:, :64], x[:, :64]) + torch.matmul(weight[:, 64:], x[:, 64:])).double()
    assert got.dtype == torch.bfloat16
    assert ours <= 1.6 * plain
    assert ours <= (rounded - exact).abs().mean() * 1.001


def test_the_request_is_multiplied_once_a_request() -> None:
    """FLOPs counted by PyTorch: the request's share does not grow with the candidates."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(num_candidates: int) -> int:
        request, candidate = sides([num_candidates], request_tokens=100, candidate_tokens=2)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            broadcast_linear(torch.zeros(6, 102, dtype=torch.float64), candidate, request)
        return counter.get_total_flops()

    assert flops(64) - flops(1) == 63 * 2 * 6 * 2 * 5
