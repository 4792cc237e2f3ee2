"""The sizes of the ranking model.

Shape letters: N tokens, D token dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchrec_adaptive.interaction import Norm
from torchrec_adaptive.request import nearest_name


@dataclass(frozen=True)
class AdaptiveRankingConfig:
    """Sizes of the model.

    Args:
        token_dim: D; features of another embedding dim are projected to it.
        num_layers: Wukong Turbo blocks.
        num_fmb_tokens: tokens that a block's factorization machine gives.
        num_lcb_tokens: tokens that a block's linear compression gives.
        rank: columns of a block's Y.
        mlp_widths: hidden widths behind the factorization machine.
        head_widths: hidden widths of the head.
        num_history_heads: heads of the attention over the history.
        recency: whether attention over the history knows how old an event is.
        num_encoder_layers: self-attention layers over the history before candidates attend to it; 0 for none.
        encoder_dim: floats of an encoded event; 0 for the token dim.
        num_encoder_heads: heads of the encoder's self-attention.
        num_request_layers: Wukong Turbo blocks over the request's tokens alone, of the same sizes as the joint ones; 0
            for none.
        num_request_tokens: tokens that the request's are compressed to before they meet the candidate's; 0 for all.
        dropout: of the embeddings and of the head's input, in training.
        bias: bias terms in the blocks; False is Turbo.
        norm: LayerNorm or RMSNorm in the blocks.
        table_init_std: of every table's weights. TorchRec's own default falls with the number of rows, so that large
            tables would begin too small for the norms behind them to see.

    Raises:
        ValueError: a size below 1, heads that do not divide the token dim, or dropout outside [0, 1).
    """

    token_dim: int = 32
    num_layers: int = 2
    num_fmb_tokens: int = 8
    num_lcb_tokens: int = 8
    rank: int = 8
    mlp_widths: tuple[int, ...] = (128,)
    head_widths: tuple[int, ...] = (64,)
    num_history_heads: int = 2
    recency: bool = False
    num_encoder_layers: int = 0
    encoder_dim: int = 0
    num_encoder_heads: int = 2
    num_request_layers: int = 0
    num_request_tokens: int = 0
    dropout: float = 0.0
    bias: bool = False
    norm: Norm = "layer"
    table_init_std: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp_widths", tuple(self.mlp_widths))
        object.__setattr__(self, "head_widths", tuple(self.head_widths))
        for name in (
            "token_dim",
            "num_layers",
            "num_fmb_tokens",
            "num_lcb_tokens",
            "rank",
            "num_history_heads",
            "num_encoder_heads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in ("num_encoder_layers", "encoder_dim", "num_request_layers", "num_request_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("mlp_widths", "head_widths"):
            if any(width < 1 for width in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must all be 1 or more")
        if self.token_dim % self.num_history_heads:
            raise ValueError(
                f"num_history_heads={self.num_history_heads} must divide token_dim={self.token_dim}; use "
                f"{math.gcd(self.num_history_heads, self.token_dim)}"
            )
        if self.num_encoder_layers and self.event_dim % self.num_encoder_heads:
            raise ValueError(
                f"num_encoder_heads={self.num_encoder_heads} must divide the encoder's dim of {self.event_dim}; use "
                f"{math.gcd(self.num_encoder_heads, self.event_dim)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not self.table_init_std > 0.0:
            raise ValueError(f"table_init_std={self.table_init_std} must be above 0")

    @property
    def event_dim(self) -> int:
        """Floats of an encoded event."""
        return self.encoder_dim or self.token_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `from_dict` is the inverse."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AdaptiveRankingConfig:
        """The config that `to_dict` wrote.

        Raises:
            ValueError: an unknown key; the message has the nearest.
        """
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"unknown key {key!r} of a model config; {nearest_name(key, known)}")
        return cls(**data)
