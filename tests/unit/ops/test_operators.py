"""What holds for every operator: registration, the reference, and the errors."""

import math

import pytest
import torch

from torchrec_adaptive.ops import broadcast_attention, broadcast_factorization_machine, broadcast_linear
from torchrec_adaptive.ops.broadcast_attention import broadcast_attention_op
from torchrec_adaptive.ops.broadcast_attention_cpu import attention_groups, broadcast_attention_cpu
from torchrec_adaptive.ops.broadcast_attention_reference import broadcast_attention_reference
from torchrec_adaptive.ops.broadcast_factorization_machine import broadcast_factorization_machine_op
from torchrec_adaptive.ops.broadcast_factorization_machine_cpu import broadcast_factorization_machine_cpu
from torchrec_adaptive.ops.broadcast_factorization_machine_reference import broadcast_factorization_machine_reference
from torchrec_adaptive.ops.broadcast_linear import broadcast_linear_op
from torchrec_adaptive.ops.broadcast_linear_cpu import broadcast_linear_cpu
from torchrec_adaptive.ops.broadcast_linear_reference import broadcast_linear_reference
from torchrec_adaptive.request import Broadcast

# candidates of each request: one large segment each, many small ones, both, none
COUNTS = [[300], [200, 0, 150], [1] * 40, [3] * 20 + [500], [0, 0, 0], []]


def index_of(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)).int()


def sides(counts: list[int], num_request: int, num_candidate: int, dim: int, dtype: torch.dtype = torch.float64):
    return (
        torch.randn(sum(counts), num_candidate, dim, dtype=dtype),
        torch.randn(len(counts), num_request, dim, dtype=dtype),
        index_of(counts),
    )


def attention_inputs(events: list[int], counts: list[int], dtype: torch.dtype = torch.float64):
    total = sum(events)
    return (
        torch.randn(sum(counts), 2, 8, dtype=dtype),
        torch.randn(total, 2, 8, dtype=dtype),
        torch.randn(total, 2, 8, dtype=dtype),
        torch.tensor(events, dtype=torch.int32),
        index_of(counts),
        torch.randn(total, 2, dtype=dtype),
    )


def requiring_grad(inputs):
    return tuple(x.requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize("dim", [1, 16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_linear_equals_its_reference_whichever_way_it_goes(counts: list[int], dim: int) -> None:
    torch.manual_seed(0)
    candidate, request, index = sides(counts, 20, 30, dim)
    weight = torch.randn(50, 50, dtype=torch.float64)
    torch.testing.assert_close(
        broadcast_linear_cpu(weight, candidate, request, index),
        broadcast_linear_reference(weight, candidate, request, index),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_machine_equals_its_reference_whichever_way_it_goes(counts: list[int]) -> None:
    torch.manual_seed(0)
    candidate, request, index = sides(counts, 5, 3, 16)
    projection = torch.randn(8, 4, dtype=torch.float64)
    torch.testing.assert_close(
        broadcast_factorization_machine_cpu(projection, candidate, request, index),
        broadcast_factorization_machine_reference(projection, candidate, request, index),
        rtol=1e-11,
        atol=1e-11,
    )


@pytest.mark.parametrize("with_logits", [False, True], ids=["plain", "logits"])
@pytest.mark.parametrize(
    ("events", "counts"),
    [
        ([700], [60]),
        ([5] * 30, [3] * 30),
        ([5, 0, 900, 7, 6], [4, 3, 50, 0, 2]),
        ([1, 300, 2], [300, 1, 2]),
        ([3, 0], [0, 2]),
    ],
    ids=["alone", "joined", "both", "uneven", "empty"],
)
def test_attention_equals_its_reference_with_gradients(events, counts, with_logits: bool) -> None:
    torch.manual_seed(0)
    inputs = requiring_grad(attention_inputs(events, counts))
    if not with_logits:
        inputs = (*inputs[:-1], None)
    got, wanted = broadcast_attention_op(*inputs), broadcast_attention_reference(*inputs)
    floats = [x for x in inputs if x is not None and x.is_floating_point()]
    seen = torch.isfinite(wanted[1])
    directions = torch.randn_like(got[0]), torch.randn_like(got[1])
    gradients = []
    for out, sums in (got, wanted):
        total = (out * directions[0]).sum() + (sums[seen] * directions[1][seen]).sum()
        gradients.append(torch.autograd.grad(total, floats, allow_unused=True))
    for one, other in zip([*got, *gradients[0]], [*wanted, *gradients[1]], strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-10, atol=1e-11)


def test_attention_joins_small_requests_and_leaves_large_ones_alone() -> None:
    groups = attention_groups(torch.tensor([10, 12, 0, 2000, 11]), index_of([3, 4, 9, 200, 3]))
    assert [group.candidates for group in groups] == [[(0, 3), (3, 7)], [(16, 216)], [(216, 219)]]
    assert [group.events for group in groups] == [[(0, 10), (10, 22)], [(22, 2022)], [(2022, 2033)]]


def test_attention_backward_in_blocks_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inputs = requiring_grad(attention_inputs([400], [100]))
    floats = [x for x in inputs if x.is_floating_point()]
    whole = torch.autograd.grad(broadcast_attention_op(*inputs)[0].square().sum(), floats)
    monkeypatch.setattr("torchrec_adaptive.ops.broadcast_attention_cpu._MOST_PROBABILITIES", 2 * 400 * 7)
    blocks = torch.autograd.grad(broadcast_attention_op(*inputs)[0].square().sum(), floats)
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_candidate_may_see_itself_and_no_other() -> None:
    """A key of the candidate's own equals attention over the history with that one event appended."""
    torch.manual_seed(0)
    query, key, value, lengths, index, logits = attention_inputs([3, 0], [2, 3])
    own_key, own_value = torch.randn_like(query), torch.randn_like(query)
    got = broadcast_attention(query, key, value, lengths, index, own_key, own_value, logits)
    first = [0, 3]
    for b, request in enumerate(index.tolist()):
        events = slice(first[request], first[request] + int(lengths[request]))
        keys, values = torch.cat([key[events], own_key[b : b + 1]]), torch.cat([value[events], own_value[b : b + 1]])
        scores = torch.einsum("hd,thd->ht", query[b], keys) / math.sqrt(8)
        scores[:, :-1] += logits[events].T
        wanted = torch.einsum("ht,thd->hd", scores.softmax(1), values)
        torch.testing.assert_close(got[b], wanted, rtol=1e-12, atol=1e-12)


def test_without_a_null_event_an_empty_history_gives_zeros() -> None:
    inputs = attention_inputs([2, 0], [1, 1])
    out = broadcast_attention(*inputs[:5])
    assert out[0].abs().min() > 0
    assert torch.equal(out[1], torch.zeros(2, 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_attention_is_near_the_exact_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = attention_inputs([50, 7], [30, 9], dtype)
    exact = broadcast_attention_reference(*[x.double() if x.is_floating_point() else x for x in inputs])
    plain = broadcast_attention_reference(*[x.float() if x.is_floating_point() else x for x in inputs])[0].to(dtype)
    out, sums = broadcast_attention_cpu(*inputs)
    assert out.dtype == dtype
    assert sums.dtype == torch.float32
    error = [float((x.double() - exact[0]).abs().mean()) for x in (out, plain)]
    assert error[0] <= 4 * error[1]  # plain rounds once, at its end; flash attention rounds the probabilities too


@pytest.mark.parametrize("counts", [[3, 0, 2], [1]], ids=str)
def test_opcheck(counts: list[int]) -> None:
    torch.manual_seed(0)
    candidate, request, index = sides(counts, 4, 3, 5, torch.float32)
    machine = requiring_grad((torch.randn(7, 2), candidate, request, index))
    torch.library.opcheck(broadcast_factorization_machine_op, machine)
    torch.library.opcheck(broadcast_linear_op, requiring_grad((torch.randn(6, 7), candidate, request, index)))
    attention = requiring_grad(attention_inputs([4] * len(counts), counts, torch.float32))
    torch.library.opcheck(broadcast_attention_op, attention)
    torch.library.opcheck(broadcast_attention_op, (*attention[:-1], None))


def test_linear_over_concatenated_features() -> None:
    """Without a token dim: a linear layer over [x_r; x_c], gradients included."""
    torch.manual_seed(0)
    index = index_of([30, 0, 12])
    request, candidate = torch.randn(3, 9, requires_grad=True), torch.randn(42, 5, requires_grad=True)
    weight = torch.randn(7, 14, requires_grad=True)
    got = broadcast_linear(weight, candidate, Broadcast(request, index))
    wanted = torch.nn.functional.linear(torch.cat([request[index.long()], candidate], dim=1), weight)
    torch.testing.assert_close(got, wanted)
    direction = torch.randn_like(got)
    inputs = (weight, candidate, request)
    for one, other in zip(
        torch.autograd.grad((got * direction).sum(), inputs), torch.autograd.grad((wanted * direction).sum(), inputs)
    ):
        torch.testing.assert_close(one, other)


def test_compiled_gives_what_eager_gives() -> None:
    torch.manual_seed(0)
    candidate, request, index = sides([3, 0, 2], 4, 3, 5, torch.float32)
    weight = torch.randn(6, 7)

    def layer(weight, candidate, request, index):
        return broadcast_linear(weight, candidate, Broadcast(request, index)).relu()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(weight, candidate, request, index), layer(weight, candidate, request, index))


def call_linear(candidate, request, index, device="cpu"):
    weight = torch.randn(6, 7, dtype=torch.float64, device=device)
    return broadcast_linear(weight, candidate, Broadcast(request, index))


def call_machine(candidate, request, index, device="cpu"):
    projection = torch.randn(7, 2, dtype=torch.float64, device=device)
    return broadcast_factorization_machine(projection, candidate, Broadcast(request, index))


def call_attention(candidate, request, index, device="cpu"):
    events = request.flatten(0, 1).unsqueeze(1)
    lengths = torch.full((request.shape[0],), request.shape[1])
    return broadcast_attention(candidate[:, :1].to(device), events, events, lengths, index)


@pytest.mark.parametrize("call", [call_linear, call_machine, call_attention])
def test_one_sentence_for_an_index_that_is_wrong(call) -> None:
    candidate, request, _ = sides([2, 1], 4, 3, 5)
    with pytest.raises(ValueError, match="falls from 1 to 0 at position 2; it must be sorted"):
        call(candidate, request, torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="holds 2, but there are 2 requests; use 0 to 1"):
        call(candidate, request, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="holds -1, but there are 2 requests"):
        call(candidate, request, torch.tensor([-1, 1, 1]))
    with pytest.raises(ValueError, match="shape \\(2,\\), but there are 3 candidates; give one entry a candidate"):
        call(candidate, request, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="lie on different devices"):
        call(candidate, request, torch.tensor([0, 0, 1]), device="meta")


def test_a_request_without_candidates_is_legal() -> None:
    for call in (call_linear, call_machine, call_attention):
        candidate, request, index = sides([0, 3, 0], 4, 3, 5)
        assert call(candidate, request, index).shape[0] == 3
        candidate, request, index = sides([0, 0], 4, 3, 5)
        assert call(candidate, request, index).shape[0] == 0


def test_lengths_must_sum_to_the_events() -> None:
    query, key, value, lengths, index, _ = attention_inputs([3], [2])
    with pytest.raises(ValueError, match="lengths_R sums to 4, its least is 4, and there are 3 events"):
        broadcast_attention(query, key, value, lengths + 1, index)
    with pytest.raises(ValueError, match="give both, or neither"):
        broadcast_attention(query, key, value, lengths, index, query)
    with pytest.raises(ValueError, match="given for 1 candidates, of which there are 2"):
        broadcast_attention(query, key, value, lengths, index, query[:1], query[:1])
