"""Wukong Turbo: stacked factorization machines, bias-free.

One block (arXiv 2403.02545, equations of sections 3.2 to 3.5), X (n, d) tokens of one example:

    FMB(X) = reshape(MLP(LN(flatten(FM(X)^T))))   (n_F, d),   FM(X) = X (X^T Y)
    LCB(X) = W_L X                              (n_L, d)
    out    = LN(concat(FMB(X), LCB(X)) + residual(X))

The residual is X itself where n_F + n_L = n, and W_R X otherwise. Turbo's difference: no bias terms (Linear layers
without bias, LayerNorm without shift). `bias=True` gives the paper's own form. FM(X) is flattened rank by rank, as it
lies in memory; the paper does not say which way.

Shape letters: R requests, B candidates, N tokens, D embedding dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from torchrec_adaptive.interaction.mlp import make_mlp
from torchrec_adaptive.ops import RMSNorm, broadcast_factorization_machine, broadcast_linear
from torchrec_adaptive.request import Broadcast

Norm = Literal["layer", "rms"]


@dataclass(frozen=True)
class WukongTurboBlockConfig:
    """Sizes of one block.

    Args:
        embedding_dim: D, floats a token.
        num_tokens: N, tokens of the request and the candidate together.
        num_fmb_tokens: n_F, tokens that the factorization machine block gives.
        num_lcb_tokens: n_L, tokens that the linear compression block gives.
        rank: k, columns of Y.
        mlp_widths: hidden widths of the MLP behind the factorization machine.
        bias: whether linear layers and norms have bias terms; False is Turbo.
        norm: LayerNorm or RMSNorm.
        norm_eps: added to the variance.

    Raises:
        ValueError: a size below 1.
    """

    embedding_dim: int
    num_tokens: int
    num_fmb_tokens: int
    num_lcb_tokens: int
    rank: int
    mlp_widths: tuple[int, ...] = (256,)
    bias: bool = False
    norm: Norm = "layer"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp_widths", tuple(self.mlp_widths))
        for name in ("embedding_dim", "num_tokens", "num_fmb_tokens", "num_lcb_tokens", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if any(width < 1 for width in self.mlp_widths):
            raise ValueError(f"mlp_widths={self.mlp_widths} must all be 1 or more")
        if self.norm not in ("layer", "rms"):
            raise ValueError(f"norm={self.norm!r} is unknown; use 'layer' or 'rms'")

    @property
    def num_output_tokens(self) -> int:
        """n_F + n_L."""
        return self.num_fmb_tokens + self.num_lcb_tokens


def make_norm(width: int, norm: Norm, bias: bool, eps: float = 1e-5) -> nn.Module:
    """LayerNorm (with or without shift) or RMSNorm (which has none) over the last dim.

    Args:
        width: its size.
        norm: which of the two.
        bias: whether LayerNorm has a shift.
        eps: added to the variance.

    Returns:
        A module that keeps shapes.
    """
    return nn.LayerNorm(width, eps=eps, bias=bias) if norm == "layer" else RMSNorm(width, eps=eps)


class FactorizationMachineBlock(nn.Module):
    """FMB(X) = reshape(MLP(LN(flatten((X (X^T Y))^T)))).

    Args:
        config: sizes of the block.
    """

    def __init__(self, config: WukongTurboBlockConfig) -> None:
        super().__init__()
        self.output_shape = (config.num_fmb_tokens, config.embedding_dim)
        flat = config.num_tokens * config.rank
        self.projection_NK = nn.Parameter(torch.empty(config.num_tokens, config.rank))
        nn.init.normal_(self.projection_NK, std=1.0 / math.sqrt(config.num_tokens))
        self.norm = make_norm(flat, config.norm, config.bias, config.norm_eps)
        self.mlp = make_mlp((flat, *config.mlp_widths, config.num_fmb_tokens * config.embedding_dim), config.bias)

    def forward(self, candidate_BND: Tensor, request: Broadcast | None = None) -> Tensor:
        """(B, N_c, D) and values (R, N_r, D) to (B, n_F, D)."""
        products_BNK = broadcast_factorization_machine(self.projection_NK, candidate_BND, request)
        return self.mlp(self.norm(products_BNK.mT.flatten(1))).view(-1, *self.output_shape)


class LinearCompressionBlock(nn.Module):
    """LCB(X) = W_L X, plus a shift for each output token where `bias` is set.

    Args:
        num_tokens: N.
        num_output_tokens: n_L.
        bias: whether there is a shift.
    """

    def __init__(self, num_tokens: int, num_output_tokens: int, bias: bool) -> None:
        super().__init__()
        self.weight_MN = nn.Parameter(torch.empty(num_output_tokens, num_tokens))
        nn.init.normal_(self.weight_MN, std=1.0 / math.sqrt(num_tokens))
        self.bias_M = nn.Parameter(torch.zeros(num_output_tokens)) if bias else None

    def forward(self, candidate_BND: Tensor, request: Broadcast | None = None) -> Tensor:
        """(B, N_c, D) and values (R, N_r, D) to (B, n_L, D)."""
        out_BMD = broadcast_linear(self.weight_MN, candidate_BND, request)
        return out_BMD if self.bias_M is None else out_BMD + self.bias_M[:, None]


class WukongTurboBlock(nn.Module):
    """One layer of Wukong Turbo: factorization machine, linear compression, residual and norm.

    Args:
        config: sizes and options.

    Example:
        >>> block = WukongTurboBlock(WukongTurboBlockConfig(8, 5, num_fmb_tokens=2, num_lcb_tokens=2, rank=3))
        >>> user = Broadcast(torch.randn(1, 3, 8), torch.zeros(4, dtype=torch.int32))
        >>> block(torch.randn(4, 2, 8), user).shape
        torch.Size([4, 4, 8])
    """

    def __init__(self, config: WukongTurboBlockConfig) -> None:
        super().__init__()
        self.config = config
        self.fmb = FactorizationMachineBlock(config)
        self.lcb = LinearCompressionBlock(config.num_tokens, config.num_lcb_tokens, config.bias)
        projected = config.num_output_tokens != config.num_tokens
        self.residual = (
            LinearCompressionBlock(config.num_tokens, config.num_output_tokens, config.bias) if projected else None
        )
        self.norm = make_norm(config.embedding_dim, config.norm, config.bias, config.norm_eps)

    def forward(self, candidate_BND: Tensor, request: Broadcast | None = None) -> Tensor:
        """Mix the tokens of both sides.

        Args:
            candidate_BND: (B, N_c, D) floats.
            request: values (R, N_r, D), its tokens coming first in X; None where the candidate has all N.

        Returns:
            (B, n_F + n_L, D).

        Raises:
            ValueError: the tokens of both sides are not `num_tokens`, their dims differ, or the index is of another
                number of candidates.
        """
        self._check_inputs(candidate_BND, request)
        machine_BND = self.fmb(candidate_BND, request)
        if self.residual is not None:
            mixed_BND = self._compress(candidate_BND, request)
            mixed_BND[:, : self.config.num_fmb_tokens] += machine_BND
            return self._normalise(mixed_BND)
        mixed_BND = torch.cat([machine_BND, self.lcb(candidate_BND, request)], dim=1)
        mixed_BND += candidate_BND if request is None else torch.cat([request.expand(), candidate_BND], dim=1)
        return self._normalise(mixed_BND)

    def _normalise(self, mixed_BND: Tensor) -> Tensor:
        return self.norm(mixed_BND, overwrite=True) if isinstance(self.norm, RMSNorm) else self.norm(mixed_BND)

    def _compress(self, candidate_BND: Tensor, request: Broadcast | None) -> Tensor:
        """concat(0, LCB(X)) + residual(X) as one product: both are linear in X."""
        assert self.residual is not None
        first = self.config.num_fmb_tokens
        weight_MN = self.residual.weight_MN
        weight_MN = torch.cat([weight_MN[:first], weight_MN[first:] + self.lcb.weight_MN])
        out_BMD = broadcast_linear(weight_MN, candidate_BND, request)
        if self.residual.bias_M is not None and self.lcb.bias_M is not None:
            out_BMD = out_BMD + self.residual.bias_M[:, None]
            out_BMD[:, first:] += self.lcb.bias_M[:, None]
        return out_BMD

    def _check_inputs(self, candidate_BND: Tensor, request: Broadcast | None) -> None:
        for side, tokens in (("candidate", candidate_BND), ("request", None if request is None else request.values)):
            if tokens is None:
                continue
            if tokens.dim() != 3:
                raise ValueError(f"the {side} tokens are of shape {tuple(tokens.shape)}; give (rows, tokens, dim)")
            if tokens.shape[2] != self.config.embedding_dim:
                raise ValueError(
                    f"the block got {tokens.shape[1]} tokens of dim {tokens.shape[2]}: {side} tokens have dim "
                    f"{tokens.shape[2]}, its config embedding_dim={self.config.embedding_dim}; project them to it"
                )
        given = candidate_BND.shape[1] + (0 if request is None else request.values.shape[1])
        if given != self.config.num_tokens:
            raise ValueError(
                f"the block got {given} tokens of dim {candidate_BND.shape[2]}; its config has num_tokens="
                f"{self.config.num_tokens}, those of the request and the candidate together"
            )
        if request is not None and request.num_candidates != candidate_BND.shape[0]:
            raise ValueError(
                f"candidate_to_request has {request.num_candidates} candidates, the candidate tokens have "
                f"{candidate_BND.shape[0]} rows; give one index a row"
            )


class WukongTurboStack(nn.Module):
    """Blocks in a row; the first takes broadcast input, layer i captures orders 1 to 2^i.

    Args:
        config: of the first block; later blocks have the same sizes and its output tokens as input.
        num_layers: 1 or more.

    Raises:
        ValueError: `num_layers` below 1.
    """

    def __init__(self, config: WukongTurboBlockConfig, num_layers: int) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers={num_layers} must be 1 or more")
        later = replace(config, num_tokens=config.num_output_tokens)
        self.blocks = nn.ModuleList([WukongTurboBlock(config)])
        self.blocks.extend(WukongTurboBlock(later) for _ in range(num_layers - 1))

    def forward(self, candidate_BND: Tensor, request: Broadcast | None = None) -> Tensor:
        """(B, N_c, D) and values (R, N_r, D) to (B, n_F + n_L, D)."""
        first, *rest = self.blocks
        tokens_BND = first(candidate_BND, request)
        for block in rest:
            tokens_BND = block(tokens_BND)
        return tokens_BND
