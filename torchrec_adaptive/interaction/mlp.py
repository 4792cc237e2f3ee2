"""Multi-layer perceptrons, and one whose first layer reads both sides.

Shape letters: R requests, B candidates.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from torchrec_adaptive.ops import broadcast_linear
from torchrec_adaptive.request import Broadcast


def make_mlp(widths: tuple[int, ...], bias: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, none after the last.

    Args:
        widths: input, hidden and output widths.
        bias: whether the layers have bias terms.

    Returns:
        (..., widths[0]) -> (..., widths[-1]).
    """
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class BroadcastLinear(nn.Module):
    """A linear layer over [x_r; x_c], the request's product done once a request.

    Args:
        request_width: floats of a request's row; 0 for none.
        candidate_width: floats of a candidate's row.
        output_width: floats of the result.
        bias: whether there is a bias term.

    Example:
        >>> layer = BroadcastLinear(3, 2, 4)
        >>> layer(torch.randn(5, 2), Broadcast(torch.randn(1, 3), torch.zeros(5, dtype=torch.int32))).shape
        torch.Size([5, 4])
    """

    def __init__(self, request_width: int, candidate_width: int, output_width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight_MK = nn.Parameter(torch.empty(output_width, request_width + candidate_width))
        nn.init.uniform_(self.weight_MK, -1.0, 1.0)
        self.weight_MK.data.mul_(1.0 / math.sqrt(request_width + candidate_width))
        self.bias_M = nn.Parameter(torch.zeros(output_width)) if bias else None

    def forward(self, candidate_BK: Tensor, request: Broadcast | None = None) -> Tensor:
        """(B, candidate_width) and values (R, request_width) to (B, output_width).

        Raises:
            ValueError: the widths of both sides are not those of the weight.
        """
        out_BM = broadcast_linear(self.weight_MK, candidate_BK, request)
        return out_BM if self.bias_M is None else out_BM + self.bias_M


class BroadcastMLP(nn.Module):
    """`make_mlp` over [x_r; x_c]: the first layer reads each side at its own rows, the others see candidates.

    Args:
        request_width: floats of a request's row; 0 for none.
        candidate_width: floats of a candidate's row.
        widths: hidden and output widths.
        bias: whether the layers have bias terms.

    Raises:
        ValueError: no width.
    """

    def __init__(self, request_width: int, candidate_width: int, widths: tuple[int, ...], bias: bool = False) -> None:
        super().__init__()
        if not widths:
            raise ValueError("widths=() leaves no layer; give at least the output's")
        self.first = BroadcastLinear(request_width, candidate_width, widths[0], bias)
        self.rest = nn.Sequential(nn.ReLU(), *make_mlp(widths, bias)) if len(widths) > 1 else nn.Identity()

    def forward(self, candidate_BK: Tensor, request: Broadcast | None = None) -> Tensor:
        """(B, candidate_width) and values (R, request_width) to (B, widths[-1]).

        Raises:
            ValueError: the widths of both sides are not those of the weight.
        """
        return self.rest(self.first(candidate_BK, request))
