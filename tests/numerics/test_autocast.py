"""bfloat16 autocast: sharing the request's part costs no accuracy against copying it."""

import pytest
import torch

from torchrec_adaptive.interaction import WukongTurboBlockConfig, WukongTurboStack
from torchrec_adaptive.request import Broadcast


@pytest.mark.parametrize("bias", [False, True])
def test_shared_request_is_as_near_to_float64_as_the_copied_one(bias: bool) -> None:
    torch.manual_seed(0)
    config = WukongTurboBlockConfig(32, 24, num_fmb_tokens=6, num_lcb_tokens=6, rank=8, mlp_widths=(64,), bias=bias)
    stack = WukongTurboStack(config, num_layers=2)
    index = torch.repeat_interleave(torch.arange(4), torch.tensor([30, 1, 0, 65])).int()
    request, candidate = Broadcast(torch.randn(4, 16, 32), index), torch.randn(96, 8, 32)
    copied = torch.cat([request.expand(), candidate], dim=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, plain = stack(candidate, request), stack(copied)
    with torch.no_grad():
        exact = stack.double()(copied.double())
    error = [float((low.double() - exact).abs().mean()) for low in (ours, plain)]
    assert error[0] <= 1.1 * error[1]
    assert 1e-5 < error[1] < 0.1
