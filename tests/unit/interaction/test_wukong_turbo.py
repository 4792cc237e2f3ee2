import dataclasses

import pytest
import torch

from torchrec_adaptive.interaction import WukongTurboBlock, WukongTurboBlockConfig, WukongTurboStack
from torchrec_adaptive.request import Broadcast

CONFIG = WukongTurboBlockConfig(16, 9, num_fmb_tokens=5, num_lcb_tokens=4, rank=4, mlp_widths=(24,))
PROJECTED = dataclasses.replace(CONFIG, num_fmb_tokens=3)
COUNTS = [[4], [1], [2, 0, 9], [0, 0], [], [1, 200]]


def sides(counts: list[int], num_request_tokens: int = 6, num_candidate_tokens: int = 3):
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)).int()
    values = torch.randn(len(counts), num_request_tokens, 16, requires_grad=True)
    return Broadcast(values, index), torch.randn(sum(counts), num_candidate_tokens, 16, requires_grad=True)


@pytest.mark.parametrize("config", [CONFIG, PROJECTED, dataclasses.replace(PROJECTED, bias=True)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_broadcast_and_materialised_inputs_agree_with_gradients(config, counts: list[int]) -> None:
    torch.manual_seed(0)
    stack = WukongTurboStack(config, num_layers=2)
    request, candidate = sides(counts)
    given = [request.values, candidate, *stack.parameters()]
    shared = stack(candidate, request)
    copied = stack(torch.cat([request.expand(), candidate], dim=1))
    assert shared.shape == (sum(counts), config.num_output_tokens, 16)
    torch.testing.assert_close(shared, copied, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(shared) / max(1, shared.numel()) ** 0.5
    ours = torch.autograd.grad((shared * direction).sum(), given)
    theirs = torch.autograd.grad((copied * direction).sum(), given)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[0, 0], [], [3, 1]], ids=str)
def test_every_weight_gets_a_gradient(counts: list[int]) -> None:
    """A rank without candidates takes part in the all-reduce like any other: its gradients are zeros, not None."""
    stack = WukongTurboStack(PROJECTED, num_layers=2)
    request, candidate = sides(counts)
    stack(candidate, request).sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name


@pytest.mark.parametrize("config", [CONFIG, PROJECTED, dataclasses.replace(CONFIG, norm="rms", bias=True)], ids=str)
def test_gradcheck(config: WukongTurboBlockConfig) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(config, embedding_dim=3, mlp_widths=(4,))
    block = WukongTurboBlock(config).double()
    index = torch.tensor([0, 1, 1], dtype=torch.int32)
    request = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    candidate = torch.randn(3, 3, 3, dtype=torch.float64, requires_grad=True)
    inputs = (candidate, request, *block.parameters())
    assert torch.autograd.gradcheck(lambda c, r, *_: block(c, Broadcast(r, index)), inputs, fast_mode=True)


def test_turbo_has_no_bias_and_the_papers_form_has_every_one() -> None:
    def biases(bias: bool) -> list[str]:
        stack = WukongTurboStack(dataclasses.replace(PROJECTED, bias=bias), num_layers=2)
        return [name for name, _ in stack.named_parameters() if "bias" in name]

    assert biases(False) == []
    ends = ["fmb.norm.bias", "fmb.mlp.0.bias", "fmb.mlp.2.bias", "lcb.bias_M", "residual.bias_M", "norm.bias"]
    wanted = [f"blocks.0.{end}" for end in ends] + [f"blocks.1.{end}" for end in ends if "residual" not in end]
    assert sorted(biases(True)) == sorted(wanted)


def test_bias_free_form_is_the_papers_with_zero_biases() -> None:
    torch.manual_seed(0)
    turbo = WukongTurboBlock(PROJECTED)
    paper = WukongTurboBlock(dataclasses.replace(PROJECTED, bias=True))
    missing, unexpected = paper.load_state_dict(turbo.state_dict(), strict=False)
    assert missing
    assert all("bias" in name for name in missing)
    assert not unexpected
    for name, parameter in paper.named_parameters():
        if "bias" in name:
            torch.nn.init.zeros_(parameter)
    request, candidate = sides([2, 3])
    torch.testing.assert_close(turbo(candidate, request), paper(candidate, request), rtol=0, atol=1e-6)


def test_initial_outputs_are_of_unit_scale_at_depth() -> None:
    torch.manual_seed(0)
    stack = WukongTurboStack(PROJECTED, num_layers=8)
    request, candidate = sides([32, 32])
    out = stack(candidate, request)
    out.pow(2).mean().backward()
    assert 0.5 < float(out.detach().std()) < 2.0
    norms = [float(block.lcb.weight_MN.grad.norm()) for block in stack.blocks]
    assert max(norms) < 1e3 * max(min(norms), 1e-8)


def test_same_seed_same_weights() -> None:
    def made(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in WukongTurboStack(PROJECTED, 2).parameters()])

    assert torch.equal(made(3), made(3))
    assert not torch.equal(made(3), made(4))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: dataclasses.replace(CONFIG, rank=0), "rank=0 must be 1 or more"),
        (lambda: dataclasses.replace(CONFIG, num_lcb_tokens=-1), "num_lcb_tokens=-1"),
        (lambda: dataclasses.replace(CONFIG, mlp_widths=(8, 0)), r"mlp_widths=\(8, 0\)"),
        (lambda: dataclasses.replace(CONFIG, norm="batch"), "norm='batch' is unknown"),
        (lambda: WukongTurboStack(CONFIG, 0), "num_layers=0"),
        (lambda: WukongTurboBlock(CONFIG)(torch.zeros(2, 8, 16)), "8 tokens of dim 16"),
        (lambda: WukongTurboBlock(CONFIG)(torch.zeros(2, 9, 8)), "9 tokens of dim 8"),
        (lambda: WukongTurboBlock(CONFIG)(torch.zeros(2, 9)), "of shape"),
        (
            lambda: WukongTurboBlock(CONFIG)(torch.zeros(2, 3, 16), Broadcast(torch.zeros(1, 6, 8), torch.zeros(2))),
            "request tokens have dim 8",
        ),
        (
            lambda: WukongTurboBlock(CONFIG)(torch.zeros(2, 3, 16), Broadcast(torch.zeros(1, 6, 16), torch.zeros(3))),
            "3 candidates",
        ),
    ],
)
def test_wrong_sizes_are_refused_with_the_value(build, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()
