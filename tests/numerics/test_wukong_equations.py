"""The block against the equations of arXiv 2403.02545, evaluated in float64 by plain loops over NumPy arrays."""

import numpy as np
import pytest
import torch

from torchrec_adaptive.interaction import WukongTurboBlock, WukongTurboBlockConfig, WukongTurboStack
from torchrec_adaptive.request import Broadcast


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matrix product by three loops."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for k in range(a.shape[1]):
                out[i, j] += a[i, k] * b[k, j]
    return out


def normalised(row: np.ndarray, weights: dict, prefix: str, norm: str, eps: float) -> np.ndarray:
    centre = sum(row) / len(row) if norm == "layer" else 0.0
    spread = sum((x - centre) ** 2 for x in row) / len(row)
    out = np.array([(x - centre) / np.sqrt(spread + eps) for x in row]) * weights[prefix + "weight"]
    return out + weights.get(prefix + "bias", 0.0)


def mlp(row: np.ndarray, weights: dict, prefix: str) -> np.ndarray:
    layers = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in weights if name.startswith(prefix)})
    for layer in layers:
        row = product(weights[f"{prefix}{layer}.weight"], row[:, None])[:, 0] + weights.get(
            f"{prefix}{layer}.bias", 0.0
        )
        if layer != layers[-1]:
            row = np.maximum(row, 0.0)
    return row


def compressed(x: np.ndarray, weights: dict, prefix: str) -> np.ndarray:
    shift = weights.get(prefix + "bias_M")
    return product(weights[prefix + "weight_MN"], x) + (0.0 if shift is None else shift[:, None])


def block_by_equations(x: np.ndarray, weights: dict, config: WukongTurboBlockConfig) -> np.ndarray:
    """X_{i+1} = LN(concat(FMB(X), LCB(X)) + residual(X)) of one example x (n, d)."""
    machine = product(x, product(x.T, weights["fmb.projection_NK"]))  # X (X^T Y)
    flat = normalised(machine.T.reshape(-1), weights, "fmb.norm.", config.norm, config.norm_eps)
    fmb = mlp(flat, weights, "fmb.mlp.").reshape(config.num_fmb_tokens, config.embedding_dim)
    lcb = compressed(x, weights, "lcb.")
    residual = x if x.shape[0] == fmb.shape[0] + lcb.shape[0] else compressed(x, weights, "residual.")
    rows = np.concatenate([fmb, lcb]) + residual
    return np.stack([normalised(row, weights, "norm.", config.norm, config.norm_eps) for row in rows])


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Every weight random, so that scales of 1 and shifts of 0 hide nothing."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in module.state_dict().items()}


CASES = [
    WukongTurboBlockConfig(6, 5, num_fmb_tokens=2, num_lcb_tokens=3, rank=2, mlp_widths=(7,)),
    WukongTurboBlockConfig(6, 5, num_fmb_tokens=3, num_lcb_tokens=1, rank=4, mlp_widths=(9, 4)),
    WukongTurboBlockConfig(6, 5, num_fmb_tokens=2, num_lcb_tokens=3, rank=3, mlp_widths=(7,), bias=True),
    WukongTurboBlockConfig(6, 5, num_fmb_tokens=4, num_lcb_tokens=4, rank=1, mlp_widths=(), bias=True),
    WukongTurboBlockConfig(6, 5, num_fmb_tokens=1, num_lcb_tokens=2, rank=2, mlp_widths=(3,), norm="rms"),
]


@pytest.mark.parametrize("config", CASES, ids=str)
@pytest.mark.parametrize("num_request_tokens", [0, 1, 4])
def test_block_equals_the_papers_equations(config: WukongTurboBlockConfig, num_request_tokens: int) -> None:
    torch.manual_seed(num_request_tokens)
    block = randomised(WukongTurboBlock(config))
    index = torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32)
    request = Broadcast(torch.randn(3, num_request_tokens, 6), index) if num_request_tokens else None
    candidate = torch.randn(5, 5 - num_request_tokens, 6)
    x = candidate if request is None else torch.cat([request.expand(), candidate], dim=1)
    wanted = np.stack([block_by_equations(row.double().numpy(), arrays(block), config) for row in x])
    exact = block.double()(candidate.double(), request and request.map(torch.Tensor.double))
    np.testing.assert_allclose(exact.detach().numpy(), wanted, rtol=1e-10, atol=1e-10)
    single = block.float()(candidate, request)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(single.detach().numpy() / scale, wanted / scale, atol=1e-5)


def test_stack_equals_the_equations_layer_by_layer() -> None:
    torch.manual_seed(0)
    config = CASES[1]
    stack = randomised(WukongTurboStack(config, num_layers=3)).double()
    request = Broadcast(torch.randn(2, 2, 6, dtype=torch.float64), torch.tensor([0, 1, 1], dtype=torch.int32))
    candidate = torch.randn(3, 3, 6, dtype=torch.float64)
    rows = []
    for x in torch.cat([request.expand(), candidate], dim=1).numpy():
        for block in stack.blocks:
            x = block_by_equations(x, arrays(block), block.config)
        rows.append(x)
    np.testing.assert_allclose(stack(candidate, request).detach().numpy(), np.stack(rows), rtol=1e-8, atol=1e-8)
