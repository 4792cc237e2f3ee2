"""MLP, cross layers and dot products: shared inputs give what copied inputs give, gradients included."""

import pytest
import torch
from torch import nn

from torchrec_adaptive.interaction import BroadcastMLP, DotInteraction, LowRankCrossNetwork
from torchrec_adaptive.request import Broadcast

COUNTS = [[4], [1], [2, 0, 9], [0, 0], [], [1, 200]]


def index_of(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)).int()


def dot_then_mlp() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dots = DotInteraction(4, 3)
            self.mlp = BroadcastMLP(self.dots.request_width, self.dots.candidate_width, (8, 2))

        def forward(self, candidate: torch.Tensor, request: Broadcast) -> torch.Tensor:
            shared, own = self.dots(candidate.view(-1, 3, 5), request.map(lambda values: values.view(-1, 4, 5)))
            return self.mlp(own, shared)

        def copied(self, candidate: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
            x = torch.cat([request, candidate], dim=1).view(-1, 7, 5)
            dots = torch.einsum("bnd,bmd->bnm", x, x)
            pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
            pairs += [(i, j) for j in range(4, 7) for i in range(4)]
            pairs += [(i, j) for i in range(4, 7) for j in range(i + 1, 7)]
            return self.mlp(torch.stack([dots[:, i, j] for i, j in pairs], dim=1))

    return Net()


class Whole(nn.Module):
    """A block, and the same over concatenated rows."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, candidate: torch.Tensor, request: Broadcast) -> torch.Tensor:
        return self.block(candidate, request)

    def copied(self, candidate: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
        return self.block(torch.cat([request, candidate], dim=1))


MAKERS = {
    "mlp": lambda: Whole(BroadcastMLP(20, 15, (16, 3))),
    "biased mlp": lambda: Whole(BroadcastMLP(20, 15, (16,), bias=True)),
    "cross": lambda: Whole(LowRankCrossNetwork(20, 15, num_layers=2, rank=4)),
    "biased cross": lambda: Whole(LowRankCrossNetwork(20, 15, num_layers=3, rank=2, bias=True)),
    "dot": dot_then_mlp,
}


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_shared_and_copied_inputs_agree_with_gradients(name: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    net = MAKERS[name]().double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    index = index_of(counts)
    request = torch.randn(len(counts), 20, dtype=torch.float64, requires_grad=True)
    candidate = torch.randn(sum(counts), 15, dtype=torch.float64, requires_grad=True)
    given = [request, candidate, *net.parameters()]
    shared, copied = net(candidate, Broadcast(request, index)), net.copied(candidate, request[index.long()])
    torch.testing.assert_close(shared, copied, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(shared)
    ours = torch.autograd.grad((shared * direction).sum(), given)
    theirs = torch.autograd.grad((copied * direction).sum(), given)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_cross_layers_follow_the_equation() -> None:
    torch.manual_seed(0)
    net = LowRankCrossNetwork(2, 3, num_layers=2, rank=2, bias=True)
    nn.init.normal_(net.bias_N[0])
    x0 = x = torch.randn(4, 5)
    for down, up, bias in zip(net.down_KN, net.up_NK, net.bias_N, strict=True):
        x = x0 * (x @ down.T @ up.T + bias) + x
    torch.testing.assert_close(net(x0), x)


def test_request_pairs_are_computed_at_the_requests_rows() -> None:
    dots = DotInteraction(3, 2)
    shared, own = dots(torch.randn(6, 2, 4), Broadcast(torch.randn(2, 3, 4), index_of([4, 2])))
    assert shared is not None
    assert shared.values.shape == (2, dots.request_width)
    assert own.shape == (6, dots.candidate_width)
    alone, own = DotInteraction(0, 5)(torch.randn(6, 5, 4))
    assert alone is None
    assert own.shape == (6, 10)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: BroadcastMLP(2, 2, ()), "leaves no layer"),
        (lambda: LowRankCrossNetwork(2, 2, 0, 1), "num_layers=0 must be 1 or more"),
        (lambda: DotInteraction(2, 0), "num_candidate_tokens=0"),
        (lambda: DotInteraction(2, 1)(torch.zeros(1, 2, 4)), "the request has 0 tokens and the candidate 2"),
        (lambda: BroadcastMLP(2, 3, (4,))(torch.zeros(1, 3)), "weight has 5 columns"),
    ],
)
def test_sizes_that_do_not_fit(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
