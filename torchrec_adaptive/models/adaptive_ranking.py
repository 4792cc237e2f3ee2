"""The ranking model: request and candidate features and the history, through Wukong Turbo, to a logit a task.

Shape letters: R requests, B candidates, N tokens of a side, D token dim, T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_adaptive.embeddings import BroadcastKeyedTensor, RequestBroadcastEBC
from torchrec_adaptive.interaction import WukongTurboBlockConfig, WukongTurboStack, make_mlp
from torchrec_adaptive.request import Broadcast, Feature, FeatureSchema, RequestBatch, nearest_name
from torchrec_adaptive.sequence import HistoryAttention, HistoryMean


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
        recency: whether the attention over the history knows how old an event is.
        dropout: of the embeddings and of the head's input, in training.
        bias: bias terms in the blocks; False is Turbo.
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
    dropout: float = 0.0
    bias: bool = False
    table_init_std: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp_widths", tuple(self.mlp_widths))
        object.__setattr__(self, "head_widths", tuple(self.head_widths))
        for name in ("token_dim", "num_layers", "num_fmb_tokens", "num_lcb_tokens", "rank", "num_history_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in ("mlp_widths", "head_widths"):
            if any(width < 1 for width in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must all be 1 or more")
        if self.token_dim % self.num_history_heads:
            raise ValueError(
                f"num_history_heads={self.num_history_heads} must divide token_dim={self.token_dim}; use "
                f"{math.gcd(self.num_history_heads, self.token_dim)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not self.table_init_std > 0.0:
            raise ValueError(f"table_init_std={self.table_init_std} must be above 0")

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


class AdaptiveRankingModel(nn.Module):
    """Request features, candidate features and history, mixed by Wukong Turbo, to logits.

    What belongs to the request is looked up and projected at R rows, and meets the candidates inside the first block.
    The blocks are bias-free; the last linear layer keeps its bias, which is the base rate of each task.

    Args:
        schema: of the inputs and tasks.
        config: sizes.
        device: of the tables; `build_model` puts the rest there too.

    Raises:
        ValueError: the schema has no candidate-side feature.
    """

    def __init__(
        self, schema: FeatureSchema, config: AdaptiveRankingConfig, device: torch.device | None = None
    ) -> None:
        super().__init__()
        if not schema.candidate_bags and not schema.candidate_dense:
            raise ValueError(
                "the schema has no candidate-side feature, so that all candidates would score alike; add one"
            )
        self.schema, self.config = schema, config
        self.embeddings = RequestBroadcastEBC.from_schema(schema, device=device)
        for table in self.embeddings.parameters():
            nn.init.normal_(table, std=config.table_init_std)
        self.request_tokens = TokenProjection(schema.request_bags, schema.request_dense_width, config.token_dim)
        self.candidate_tokens = TokenProjection(schema.candidate_bags, schema.candidate_dense_width, config.token_dim)
        num_request, num_candidate = self.request_tokens.num_tokens, self.candidate_tokens.num_tokens
        self.history_mean = self.history_attention = None
        if schema.sequences:
            event_dim = sum(f.embedding_dim for f in schema.sequences)
            query_dim = num_candidate * config.token_dim
            self.history_mean = HistoryMean(event_dim, config.token_dim)
            self.history_attention = HistoryAttention(
                event_dim, query_dim, config.token_dim, config.num_history_heads, config.recency
            )
            num_request, num_candidate = num_request + 1, num_candidate + 1
        self.has_request_tokens = num_request > 0
        block = WukongTurboBlockConfig(
            embedding_dim=config.token_dim,
            num_tokens=num_request + num_candidate,
            num_fmb_tokens=config.num_fmb_tokens,
            num_lcb_tokens=config.num_lcb_tokens,
            rank=config.rank,
            mlp_widths=config.mlp_widths,
            bias=config.bias,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.interaction = WukongTurboStack(block, config.num_layers)
        head_input = block.num_output_tokens * config.token_dim
        self.head = make_mlp((head_input, *config.head_widths), config.bias)
        self.head_activation = nn.ReLU() if config.head_widths else nn.Identity()
        self.logits = nn.Linear((head_input, *config.head_widths)[-1], len(schema.tasks))

    def forward(self, batch: RequestBatch) -> Tensor:
        """Score every candidate of every request.

        Args:
            batch: as the schema has it.

        Returns:
            (B, T) logits, float32.
        """
        return self.score(self.embeddings(batch.features), batch)

    def score(self, looked_up: BroadcastKeyedTensor, batch: RequestBatch) -> Tensor:
        """Score from embeddings that are looked up already.

        Args:
            looked_up: what `embeddings` gave for the batch's features.
            batch: as the schema has it.

        Returns:
            (B, T) logits, float32.
        """
        index = batch.candidate_to_request
        request_RND = self.request_tokens(self._request_rows(looked_up), batch.request_dense)
        candidate_BND = self.candidate_tokens(self._candidate_rows(looked_up), batch.candidate_dense)
        if self.history_attention is not None and self.history_mean is not None:
            columns = [looked_up.sequence(f.name) for f in self.schema.sequences]
            attended_BD = self.history_attention(candidate_BND.flatten(1), columns, index)
            candidate_BND = torch.cat([candidate_BND, attended_BD.unsqueeze(1)], dim=1)
            request_RND = torch.cat([request_RND, self.history_mean(columns).unsqueeze(1)], dim=1)
        request = Broadcast(self.dropout(request_RND), index) if self.has_request_tokens else None
        mixed_BND = self.interaction(self.dropout(candidate_BND), request)
        return self.logits(self.head_activation(self.head(self.dropout(mixed_BND.flatten(1)))))

    def _request_rows(self, looked_up: BroadcastKeyedTensor) -> list[Tensor]:
        return [looked_up.broadcast(f.name).values for f in self.schema.request_bags]

    def _candidate_rows(self, looked_up: BroadcastKeyedTensor) -> list[Tensor]:
        return [looked_up.candidate(f.name) for f in self.schema.candidate_bags]


class TokenProjection(nn.Module):
    """Embeddings of one side as tokens of one dim; dense numbers, where there are any, as one more token.

    Args:
        bags: features of that side.
        dense_width: floats a row.
        token_dim: D.
    """

    def __init__(self, bags: tuple[Feature, ...], dense_width: int, token_dim: int) -> None:
        super().__init__()
        self.token_dim = token_dim
        self.num_tokens = len(bags) + (1 if dense_width else 0)
        self.projections = nn.ModuleList(
            nn.Identity() if f.embedding_dim == token_dim else nn.Linear(f.embedding_dim, token_dim, bias=False)
            for f in bags
        )
        self.dense = nn.Linear(dense_width, token_dim, bias=False) if dense_width else None

    def forward(self, embeddings: list[Tensor], dense: Tensor) -> Tensor:
        """A list of (rows, dim of the feature) and (rows, dense_width) to (rows, N, D)."""
        tokens = [project(rows) for project, rows in zip(self.projections, embeddings, strict=True)]
        if self.dense is not None:
            tokens.append(self.dense(dense))
        return torch.stack(tokens, dim=1) if tokens else dense.new_zeros(dense.shape[0], 0, self.token_dim)


def build_model(
    schema: FeatureSchema, config: AdaptiveRankingConfig | Mapping[str, Any], device: torch.device | None = None
) -> AdaptiveRankingModel:
    """The model of a schema and a config, as an artifact's manifest has them.

    Args:
        schema: of the inputs and tasks.
        config: sizes, or the dict that `AdaptiveRankingConfig.to_dict` gave.
        device: of the weights.

    Returns:
        A model with fresh weights.

    Raises:
        ValueError: the config has an unknown key.
    """
    if not isinstance(config, AdaptiveRankingConfig):
        config = AdaptiveRankingConfig.from_dict(config)
    with nullcontext() if device is None else device:
        return AdaptiveRankingModel(schema, config, device)
