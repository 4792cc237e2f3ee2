"""The encoder of histories: each request by itself, event by event, as the equations have it."""

import math

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_adaptive.sequence import HistoryEncoder


def made(recency: bool = True) -> HistoryEncoder:
    torch.manual_seed(0)
    encoder = HistoryEncoder(event_dim=5, dim=8, num_layers=2, num_heads=2, hidden_width=6, recency=recency).double()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.6)
    return encoder


def by_equations(encoder: HistoryEncoder, events: torch.Tensor) -> torch.Tensor:
    """One request's (T, 5) events, one head and one event at a time."""
    weights = dict(encoder.named_parameters())
    x = events @ weights["projection.weight"].T

    def normed(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(1, keepdim=True) + 1e-6).sqrt() * scale

    for layer in range(2):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
        qkv = normed(x, w["attention_norm.weight"]) @ w["query_key_value.weight"].T
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for h in range(2):
                q, k, v = (qkv[:, part * 8 + h * 4 : part * 8 + h * 4 + 4] for part in range(3))
                logits = k @ q[t] / math.sqrt(4)
                if "recency_H" in w:
                    ages = torch.arange(len(x) - 1, -1, -1, dtype=x.dtype)
                    logits = logits + w["recency_H"][h] * torch.log(1 + ages)
                out[t, h * 4 : h * 4 + 4] = logits.softmax(0) @ v
        x = x + out @ w["out.weight"].T
        x = x + torch.relu(normed(x, w["mlp_norm.weight"]) @ w["up.weight"].T) @ w["down.weight"].T
    return normed(x, weights["norm.weight"])


@pytest.mark.parametrize("recency", [False, True])
@pytest.mark.parametrize("lengths", [[3], [0], [4, 0, 1], [], [1, 60]], ids=str)
def test_each_request_is_encoded_by_itself(lengths: list[int], recency: bool) -> None:
    encoder = made(recency)
    events = torch.randn(sum(lengths), 5, dtype=torch.float64)
    columns = [JaggedTensor(events[:, :2], lengths=torch.tensor(lengths, dtype=torch.int32))]
    columns.append(JaggedTensor(events[:, 2:], lengths=columns[0].lengths()))
    got, got_lengths = encoder(columns)
    assert torch.equal(got_lengths, columns[0].lengths())
    wanted = [by_equations(encoder, part) for part in events.split(lengths)]
    torch.testing.assert_close(got, torch.cat(wanted) if wanted else got.new_zeros(0, 8), rtol=1e-10, atol=1e-10)


def test_gradients_reach_every_weight() -> None:
    encoder = made()
    columns = [JaggedTensor(torch.randn(5, 5, dtype=torch.float64), lengths=torch.tensor([3, 2]))]
    encoder(columns)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in encoder.parameters())


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="dim=7 must divide by num_heads=2; use 6"):
        HistoryEncoder(4, 7, 1, 2)
    with pytest.raises(ValueError, match="num_layers=0 must be 1 or more"):
        HistoryEncoder(4, 8, 0, 2)
