"""The low-rank cross network, its first layer reading each side at its own rows.

x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l,  x_0 = [x_r; x_c]

V_0 x_0 is a linear layer over both sides. From there on every element is a product with one of the candidate's, so that
nothing more belongs to the request alone.
Source: DCN V2, arXiv 2008.13535, equation 2, the matrix factored as in TorchRec's LowRankCrossNet.

Shape letters: R requests, B candidates, N features of both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_adaptive.ops import broadcast_linear
from torchrec_adaptive.request import Broadcast


class LowRankCrossNetwork(nn.Module):
    """Cross layers over the features of both sides.

    Args:
        request_width: floats of a request's row; 0 for none.
        candidate_width: floats of a candidate's row.
        num_layers: 1 or more.
        rank: rows of V.
        bias: whether there is b; False in a bias-free model.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self, request_width: int, candidate_width: int, num_layers: int, rank: int, bias: bool = False
    ) -> None:
        super().__init__()
        for name, value in (("num_layers", num_layers), ("rank", rank), ("candidate_width", candidate_width)):
            if value < 1:
                raise ValueError(f"{name}={value} must be 1 or more")
        width = request_width + candidate_width
        self.down_KN = nn.ParameterList(torch.empty(rank, width) for _ in range(num_layers))
        self.up_NK = nn.ParameterList(torch.empty(width, rank) for _ in range(num_layers))
        self.bias_N = nn.ParameterList(torch.zeros(width) for _ in range(num_layers if bias else 0))
        for weight in (*self.down_KN, *self.up_NK):
            nn.init.xavier_normal_(weight)

    def forward(self, candidate_BN: Tensor, request: Broadcast | None = None) -> Tensor:
        """(B, candidate_width) and values (R, request_width) to (B, N), the request's columns first.

        Raises:
            ValueError: the widths of both sides are not those of the weights.
        """
        reduced_BK = broadcast_linear(self.down_KN[0], candidate_BN, request)
        first_BN = candidate_BN if request is None else torch.cat([request.expand(), candidate_BN], dim=1)
        crossed_BN = first_BN
        for layer, up_NK in enumerate(self.up_NK):
            if layer:
                reduced_BK = nn.functional.linear(crossed_BN, self.down_KN[layer])
            product_BN = nn.functional.linear(reduced_BK, up_NK, self.bias_N[layer] if len(self.bias_N) else None)
            crossed_BN = torch.addcmul(crossed_BN, first_BN, product_BN)
        return crossed_BN
