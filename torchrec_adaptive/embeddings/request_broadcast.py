"""Embedding look-ups once a request.

| side | rows looked up | returned as |
| --- | --- | --- |
| request-side bag | R, one a request | `Broadcast` (R, D) |
| candidate-side bag | B, one a candidate | tensor (B, D) |
| history sequence | T, one an event (a bag of one) | JaggedTensor (T, D) |

Stock TorchRec looks every feature up at B rows. Tables read from several sides stay one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_adaptive.embeddings.broadcast_keyed_tensor import BroadcastKeyedTensor
from torchrec_adaptive.request import FeatureSchema, RequestFeatures, nearest_name


class RequestBroadcastEBC(EmbeddingBagCollection):
    """An EmbeddingBagCollection that knows which features belong to the request.

    State-dict keys are those of a plain EmbeddingBagCollection, so that its checkpoints load. Under several ranks, wrap
    the model with `torchrec_adaptive.distributed.shard_model`, which brings the sharder that this class needs.

    Args:
        tables: as for EmbeddingBagCollection; the names of sequences stand among a table's `feature_names`.
        request_features: bags that belong to the request; every other bag is the candidate's.
        sequence_features: columns of the history, looked up unpooled.
        is_weighted: whether ids carry weights; ids without any then weigh 1.
        device: of the weights.

    Raises:
        ValueError: a table with the name of a method of nn.ModuleDict, a request or sequence feature that no table
            reads, one named on both sides, or a feature that several tables read.

    Example:
        >>> from torchrec_adaptive.request import Feature, batch_from_rows
        >>> schema = FeatureSchema((Feature.bag("user", "request", 9, 4), Feature.bag("item", "candidate", 9, 4)))
        >>> ebc = RequestBroadcastEBC.from_schema(schema)
        >>> batch = batch_from_rows(schema, [{"request_id": 0, "user": 1, "item": item} for item in (5, 6, 7)])
        >>> out = ebc(batch.features)
        >>> out.broadcast("user").values.shape, out["user"].shape, out.keys()
        (torch.Size([1, 4]), torch.Size([3, 4]), ['user', 'item'])
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        request_features: Sequence[str] = (),
        sequence_features: Sequence[str] = (),
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        for table in tables:
            if hasattr(nn.ModuleDict, table.name):
                raise ValueError(
                    f"table {table.name!r} has the name of a method of nn.ModuleDict, which holds the tables; rename "
                    f"it, to {table.name + '_table'!r} for one"
                )
        super().__init__(tables, is_weighted=is_weighted, device=device)
        self.request_features = tuple(request_features)
        self.sequence_features = tuple(sequence_features)
        check_sides(tables, self.request_features, self.sequence_features)

    @classmethod
    def from_schema(cls, schema: FeatureSchema, device: torch.device | None = None) -> RequestBroadcastEBC:
        """Tables and sides as a schema has them.

        Args:
            schema: of the model's inputs.
            device: of the weights.

        Returns:
            A collection with one table a `TableSpec`.
        """
        tables = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
            )
            for table in schema.tables
        ]
        return cls(
            tables,
            request_features=[f.name for f in schema.request_bags],
            sequence_features=[f.name for f in schema.sequences],
            is_weighted=any(f.weighted for f in schema.features),
            device=device,
        )

    @classmethod
    def from_ebc(
        cls,
        ebc: EmbeddingBagCollection,
        request_features: Sequence[str] = (),
        sequence_features: Sequence[str] = (),
    ) -> RequestBroadcastEBC:
        """Take over an existing collection: its tables and the very same parameters.

        Args:
            ebc: an unsharded EmbeddingBagCollection.
            request_features: as for the constructor.
            sequence_features: likewise.

        Returns:
            A collection whose parameters are those of `ebc`, not copies.
        """
        configs = ebc.embedding_bag_configs()
        made = cls(configs, request_features, sequence_features, ebc.is_weighted(), torch.device("meta"))
        made.embedding_bags = ebc.embedding_bags
        made._device = ebc.device
        return made

    def forward(self, features: RequestFeatures | KeyedJaggedTensor) -> KeyedTensor:  # pyrefly: ignore[bad-override]
        """Look up.

        Args:
            features: of both sides; or a KeyedJaggedTensor, all at one stride, for which this is the stock module.

        Returns:
            BroadcastKeyedTensor for RequestFeatures, KeyedTensor for a KeyedJaggedTensor.

        Raises:
            ValueError: a feature is missing, or stands on the other side.
        """
        if not isinstance(features, RequestFeatures):
            return super().forward(features)
        check_features(features, self._feature_names, self.request_features, self.sequence_features)
        request: dict[str, Tensor] = {}
        candidate: dict[str, Tensor] = {}
        sequences: dict[str, JaggedTensor] = {}
        request_bags, candidate_bags = self._bags(features.request), self._bags(features.candidate)
        for config, names in zip(self._embedding_bag_configs, self._feature_names, strict=True):
            weight = cast(nn.EmbeddingBag, self.embedding_bags[config.name]).weight
            for name in names:
                if name in self.sequence_features:
                    events = features.history[name]
                    rows = nn.functional.embedding(events.values(), weight).float()
                    sequences[name] = JaggedTensor(rows, lengths=events.lengths())
                elif name in self.request_features:
                    request[name] = _look_up(weight, config.pooling, request_bags[name])
                else:
                    candidate[name] = _look_up(weight, config.pooling, candidate_bags[name])
        keys = [name for names in self._feature_names for name in names if name not in self.sequence_features]
        return BroadcastKeyedTensor(keys, request, candidate, features.candidate_to_request, sequences)

    def _bags(self, side: KeyedJaggedTensor) -> dict[str, _Bags]:
        """Every feature of a side: one pass over the offsets, where indexing by name would take one a feature."""
        names = side.keys()
        if not names:
            return {}
        ids = side.values()
        starts_FR = side.offsets()[:-1].view(len(names), -1).to(ids.dtype)
        starts_FR = starts_FR - starts_FR[:, :1]
        sizes = side.length_per_key()
        weights = side.weights_or_none() if self.is_weighted() else None
        if self.is_weighted() and weights is None:
            weights = torch.ones_like(ids, dtype=torch.float32)
        weights_of = [None] * len(names) if weights is None else weights.split(sizes)
        return dict(zip(names, map(_Bags, ids.split(sizes), starts_FR.unbind(0), weights_of), strict=True))


@dataclass(frozen=True)
class _Bags:
    """One feature: (V,) ids, (N,) where each row's bag begins, and (V,) weights or None."""

    ids: Tensor
    starts: Tensor
    weights: Tensor | None


def _look_up(weight: Tensor, pooling: PoolingType, bags: _Bags) -> Tensor:
    """(N, D) float32; the function behind nn.EmbeddingBag, whose checks cost as much as a request's look-up."""
    mode = 1 if pooling is PoolingType.MEAN else 0
    return torch.embedding_bag(weight, bags.ids, bags.starts, False, mode, False, bags.weights)[0].float()


def check_sides(
    tables: Sequence[EmbeddingBagConfig], request_features: Sequence[str], sequence_features: Sequence[str]
) -> None:
    """Refuse sides that name no feature, or one feature twice.

    Args:
        tables: of the collection.
        request_features: names on the request side.
        sequence_features: names of the history's columns.

    Raises:
        ValueError: as said.
    """
    known = [name for table in tables for name in table.feature_names]
    if repeated := sorted({name for name in known if known.count(name) > 1}):
        raise ValueError(f"features {repeated} are read by several tables; give each table's reader a name of its own")
    for what, names in (("request_features", request_features), ("sequence_features", sequence_features)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what} names {name!r}, which no table reads; {nearest_name(name, known)}")
    if both := sorted(set(request_features) & set(sequence_features)):
        raise ValueError(
            f"{both} are both request and sequence features; a sequence is looked up unpooled: name it once"
        )


def check_features(
    features: RequestFeatures,
    feature_names: Sequence[Sequence[str]],
    request_features: Sequence[str],
    sequence_features: Sequence[str],
) -> None:
    """Refuse features that are missing or stand on the wrong side.

    Args:
        features: what was given.
        feature_names: of each table.
        request_features: names on the request side.
        sequence_features: names of the history's columns.

    Raises:
        ValueError: the message names the feature and where it should be.
    """
    sides = {
        "request": set(features.request.keys()),
        "candidate": set(features.candidate.keys()),
        "history": set(features.history.keys()),
    }
    for names in feature_names:
        for name in names:
            wanted = "history" if name in sequence_features else "request" if name in request_features else "candidate"
            if name not in sides[wanted]:
                found = [side for side, keys in sides.items() if name in keys]
                where = f"it is on the {found[0]} side" if found else "it is missing"
                raise ValueError(f"feature {name!r} belongs to the {wanted} side, but {where}; move it there")
