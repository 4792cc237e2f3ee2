"""The ranking model: request and candidate features and the history, through Wukong Turbo, to a logit a task.

Shape letters: R requests, B candidates, T events, N tokens of a side, D token dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_adaptive.embeddings import BroadcastKeyedTensor, RequestBroadcastEBC
from torchrec_adaptive.interaction import LinearCompressionBlock, WukongTurboBlockConfig, WukongTurboStack, make_mlp
from torchrec_adaptive.models.config import AdaptiveRankingConfig
from torchrec_adaptive.models.tokens import TokenProjection
from torchrec_adaptive.request import Broadcast, FeatureSchema, RequestBatch
from torchrec_adaptive.sequence import HistoryAttention, HistoryEncoder, HistoryMean

_CANDIDATES_A_RUN = 512  # in inference on a CPU; fewer make small matrix products


class AdaptiveRankingModel(nn.Module):
    """Request features, candidate features and history, mixed by Wukong Turbo, to logits.

    What belongs to the request is looked up, projected and, where the config says so, encoded (its history) and mixed
    (its tokens) at R rows, and meets the candidates inside the first joint block.
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
        self.history_encoder = self.history_mean = self.history_attention = None
        if schema.sequences:
            event_dim = sum(f.embedding_dim for f in schema.sequences)
            if config.num_encoder_layers:
                self.history_encoder = HistoryEncoder(
                    event_dim,
                    config.event_dim,
                    config.num_encoder_layers,
                    config.num_encoder_heads,
                    recency=config.recency,
                )
                event_dim = config.event_dim
            query_dim = num_candidate * config.token_dim
            self.history_mean = HistoryMean(event_dim, config.token_dim)
            self.history_attention = HistoryAttention(
                event_dim, query_dim, config.token_dim, config.num_history_heads, config.recency
            )
            num_request, num_candidate = num_request + 1, num_candidate + 1
        self.request_tower = self.request_compression = None
        if num_request and config.num_request_layers:
            self.request_tower = WukongTurboStack(_block_config(config, num_request), config.num_request_layers)
            num_request = config.num_fmb_tokens + config.num_lcb_tokens
        if num_request and config.num_request_tokens:
            self.request_compression = LinearCompressionBlock(num_request, config.num_request_tokens, config.bias)
            num_request = config.num_request_tokens
        self.has_request_tokens = num_request > 0
        block = _block_config(config, num_request + num_candidate)
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
            if self.history_encoder is not None:
                encoded_TD, lengths_R = self.history_encoder(columns)
                columns = [JaggedTensor(encoded_TD, lengths=lengths_R)]
            attended_BD = self.history_attention(candidate_BND.flatten(1), columns, index)
            candidate_BND = torch.cat([candidate_BND, attended_BD.unsqueeze(1)], dim=1)
            request_RND = torch.cat([request_RND, self.history_mean(columns).unsqueeze(1)], dim=1)
        request_RND = self._encode_request(self.dropout(request_RND))
        if torch.is_grad_enabled() or candidate_BND.device.type != "cpu":
            return self._mix(candidate_BND, request_RND, index)
        parts = [
            self._mix(candidate_BND[rows], request_RND[requests], index[rows] - requests.start)
            for rows, requests in _runs(index)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _mix(self, candidate_BND: Tensor, request_RND: Tensor, index: Tensor) -> Tensor:
        """The layers that see both sides."""
        request = Broadcast(request_RND, index) if self.has_request_tokens else None
        mixed_BND = self.interaction(self.dropout(candidate_BND), request)
        return self.logits(self.head_activation(self.head(self.dropout(mixed_BND.flatten(1)))))

    def _encode_request(self, request_RND: Tensor) -> Tensor:
        """The request's own layers, at R rows."""
        if self.request_tower is not None:
            request_RND = self.request_tower(request_RND)
        return request_RND if self.request_compression is None else self.request_compression(request_RND)

    def _request_rows(self, looked_up: BroadcastKeyedTensor) -> list[Tensor]:
        return [looked_up.broadcast(f.name).values for f in self.schema.request_bags]

    def _candidate_rows(self, looked_up: BroadcastKeyedTensor) -> list[Tensor]:
        return [looked_up.candidate(f.name) for f in self.schema.candidate_bags]


def _runs(candidate_to_request: Tensor) -> Iterator[tuple[slice, slice]]:
    """Runs of candidates whose activations stay in a CPU's cache, and the requests that each reads; one at least."""
    num_candidates = candidate_to_request.shape[0]
    for low in range(0, max(num_candidates, 1), _CANDIDATES_A_RUN):
        rows = slice(low, min(low + _CANDIDATES_A_RUN, num_candidates))
        own = candidate_to_request[rows]
        yield rows, slice(int(own[0]), int(own[-1]) + 1) if len(own) else slice(0, 0)


def _block_config(config: AdaptiveRankingConfig, num_tokens: int) -> WukongTurboBlockConfig:
    return WukongTurboBlockConfig(
        embedding_dim=config.token_dim,
        num_tokens=num_tokens,
        num_fmb_tokens=config.num_fmb_tokens,
        num_lcb_tokens=config.num_lcb_tokens,
        rank=config.rank,
        mlp_widths=config.mlp_widths,
        bias=config.bias,
        norm=config.norm,
    )


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
