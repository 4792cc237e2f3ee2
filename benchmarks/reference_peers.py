"""The reference model as it is served today: one row for every pair of a request and a candidate.

| peer | embeddings | dense layers |
| --- | --- | --- |
| expanded | TorchRec's EmbeddingBagCollection and EmbeddingCollection on expanded rows | at B rows |
| tiled | each side once, then the request's copied a candidate, as TorchEasyRec's INPUT_TILE=3 does | at B rows |

Both have the very weights of the model that they are made from, and PyTorch's own operators on dense tensors; pairs are
taken in chunks, so that activations stay in the cache. Every history has the same number of events, so that nothing is
padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.models import AdaptiveRankingModel
from torchrec_adaptive.request import RequestBatch, expand_kjt
from torchrec_adaptive.sequence import HistoryAttention, HistoryEncoder

CHUNK = 64  # pairs; of 16 to 256 the fastest on the machine of docs/benchmarks


class PairModel:
    """The dense layers of a model, row by row of pairs.

    Args:
        model: whose weights are used, not copied; every history has the same number of events.
    """

    def __init__(self, model: AdaptiveRankingModel) -> None:
        self.model = model

    def __call__(self, request: list[Tensor], candidate: list[Tensor], events_BTE: Tensor) -> Tensor:
        """Score pairs.

        Args:
            request: of each request feature (b, D).
            candidate: of each candidate feature (b, D).
            events_BTE: (b, T, E), the history's columns side by side.

        Returns:
            (b,) probabilities.
        """
        model, pairs = self.model, events_BTE.shape[0]
        assert model.history_attention is not None and model.history_mean is not None  # noqa: PT018
        no_dense = events_BTE.new_empty(pairs, 0)
        request_BND, candidate_BND = (
            model.request_tokens(request, no_dense),
            model.candidate_tokens(candidate, no_dense),
        )
        if model.history_encoder is not None:
            events_BTE = encode(model.history_encoder, events_BTE)
        attended_BD = attend(model.history_attention, candidate_BND.flatten(1), events_BTE)
        candidate_BND = torch.cat([candidate_BND, attended_BD.unsqueeze(1)], dim=1)
        mean_BD = model.history_mean.projection(events_BTE.mean(1))
        request_BND = torch.cat([request_BND, mean_BD.unsqueeze(1)], dim=1)
        if model.request_tower is not None:
            request_BND = model.request_tower(request_BND)
        if model.request_compression is not None:
            request_BND = model.request_compression(request_BND)
        mixed_BND = model.interaction(torch.cat([request_BND, candidate_BND], dim=1))
        return model.logits(model.head_activation(model.head(mixed_BND.flatten(1))))[:, 0].sigmoid()


def encode(encoder: HistoryEncoder, events_BTE: Tensor) -> Tensor:
    """The encoder on dense histories, PyTorch's own attention: (b, T, E) to (b, T, D)."""
    encoded_BTD = encoder.projection(events_BTE)
    for layer in encoder.layers:
        query_key_value = layer.query_key_value(layer.attention_norm(encoded_BTD)).unflatten(2, (3, *layer.heads))
        query, key, value = (part.transpose(1, 2) for part in query_key_value.unbind(2))
        attended_BTD = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        encoded_BTD = encoded_BTD + layer.out(attended_BTD)
        encoded_BTD = encoded_BTD + layer.down(layer.up(layer.mlp_norm(encoded_BTD)).relu_())
    return encoder.norm(encoded_BTD)


def attend(attention: HistoryAttention, query_BQ: Tensor, events_BTE: Tensor) -> Tensor:
    """Candidates' attention with keys and values of every pair: (b, Q) and (b, T, E) to (b, D)."""
    heads = tuple(attention.null_key_HD.shape)
    query = attention.query(query_BQ).unflatten(1, heads).unsqueeze(2)
    rows = []
    for project, null in ((attention.key, attention.null_key_HD), (attention.value, attention.null_value_HD)):
        own = project(events_BTE).unflatten(2, heads)
        rows.append(torch.cat([null.expand(own.shape[0], 1, *heads), own], dim=1).transpose(1, 2))
    return attention.out(scaled_dot_product_attention(query, *rows).flatten(1))


class Expanded:
    """Stock TorchRec collections over rows of pairs, then the dense layers.

    Args:
        model: whose weights are used, not copied.
    """

    def __init__(self, model: AdaptiveRankingModel) -> None:
        schema, self.pairs = model.schema, PairModel(model)
        self.request = [f.name for f in schema.request_bags]
        self.candidate = [f.name for f in schema.candidate_bags]
        self.sequences = [f.name for f in schema.sequences]
        configs = []
        for table in model.embeddings.embedding_bag_configs():
            table.feature_names = [name for name in table.feature_names if name not in self.sequences]
            configs += [table] if table.feature_names else []
        self.bags = EmbeddingBagCollection(configs, device=torch.device("meta"))
        for name in self.bags.embedding_bags:
            self.bags.embedding_bags[name] = model.embeddings.embedding_bags[name]
        self.bags._device = torch.device("cpu")
        self.histories = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=f"sequence_{f.name}",
                    num_embeddings=f.num_embeddings,
                    embedding_dim=f.embedding_dim,
                    feature_names=[f.name],
                )
                for f in schema.sequences
            ]
        )
        for f in schema.sequences:
            weight = model.embeddings.embedding_bags[f.table].weight
            self.histories.embeddings[f"sequence_{f.name}"] = nn.Embedding.from_pretrained(weight.detach())

    def rows(self, batch: RequestBatch, chunk: int = CHUNK) -> list[tuple[KeyedJaggedTensor, KeyedJaggedTensor]]:
        """What a client would have sent: bags and histories of each chunk of pairs.

        Args:
            batch: of requests.
            chunk: pairs a chunk.

        Returns:
            Both inputs, chunk by chunk.
        """
        bags, index = batch.features.expand(), batch.candidate_to_request
        pieces = torch.arange(index.shape[0]).split(chunk)
        return [(expand_kjt(bags, piece), expand_kjt(batch.features.history, index[piece])) for piece in pieces]

    def __call__(self, rows: Sequence[tuple[KeyedJaggedTensor, KeyedJaggedTensor]]) -> Tensor:
        """(B,) probabilities of `rows`."""
        scored = []
        for bags, histories in rows:
            pooled, events = self.bags(bags), self.histories(histories)
            columns = [
                events[name].values().view(bags.stride(), -1, events[name].values().shape[1]) for name in self.sequences
            ]
            request, candidate = ([pooled[name] for name in names] for names in (self.request, self.candidate))
            scored.append(self.pairs(request, candidate, torch.cat(columns, dim=2)))
        return torch.cat(scored)


class Tiled:
    """Each side looked up once, the request's rows copied for each candidate, then the dense layers.

    Args:
        model: whose weights are used, not copied.
    """

    def __init__(self, model: AdaptiveRankingModel) -> None:
        self.model, self.pairs = model, PairModel(model)

    def __call__(self, batch: RequestBatch, chunk: int = CHUNK) -> Tensor:
        """(B,) probabilities."""
        schema, looked_up = self.model.schema, self.model.embeddings(batch.features)
        request = torch.stack([looked_up.broadcast(f.name).values for f in schema.request_bags], dim=1)
        candidate = torch.stack([looked_up.candidate(f.name) for f in schema.candidate_bags], dim=1)
        columns = [looked_up.sequence(f.name).values() for f in schema.sequences]
        events = torch.cat(columns, dim=1).view(batch.num_requests, -1, sum(column.shape[1] for column in columns))
        scored = []
        for index, own in zip(batch.candidate_to_request.split(chunk), candidate.split(chunk), strict=True):
            copied = request.index_select(0, index)
            scored.append(self.pairs(list(copied.unbind(1)), list(own.unbind(1)), events.index_select(0, index)))
        return torch.cat(scored)
