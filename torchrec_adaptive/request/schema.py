"""What a feature is: its side, its kind, and the table that it reads."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal


class Side(str, Enum):
    """Whom a feature belongs to: the request (one user, one context) or each candidate."""

    REQUEST = "request"
    CANDIDATE = "candidate"


class Kind(str, Enum):
    """How a feature is read: a pooled bag of ids, a sequence of ids (one an event), or floats."""

    BAG = "bag"
    SEQUENCE = "sequence"
    DENSE = "dense"


Pooling = Literal["sum", "mean"]


def nearest_name(name: str, known: Sequence[str]) -> str:
    """The end of an error sentence about an unknown name: the nearest known one, or all of them.

    Args:
        name: what was given.
        known: what would be right.

    Returns:
        A clause without a full stop.

    Example:
        >>> nearest_name("itme_id", ["item_id", "user_id"])
        "did you mean 'item_id'?"
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known names: {sorted(known)}"


@dataclass(frozen=True)
class Feature:
    """One input feature of a ranking model.

    Use the constructors `bag`, `sequence` and `dense`.

    Args:
        name: unique in its schema.
        side: whom it belongs to; a sequence always belongs to the request.
        kind: bag, sequence or dense.
        num_embeddings: rows of the table that its ids index, ids being 0 to `num_embeddings - 1`.
        embedding_dim: floats a row.
        table: the table's name, by default the feature's own; features that name one table share one weight.
        pooling: how the rows of a bag become one, as in TorchRec.
        weighted: whether each id of a bag carries a float32 weight.
        max_length: most ids a bag or events a sequence may hold in one row; 0 for no bound.
        width: floats a row of a dense feature.

    Raises:
        ValueError: a size that its kind needs is missing, or one is given that its kind ignores.
    """

    name: str
    side: Side
    kind: Kind
    num_embeddings: int = 0
    embedding_dim: int = 0
    table: str = ""
    pooling: Pooling = "sum"
    weighted: bool = False
    max_length: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "side", Side(self.side))
        object.__setattr__(self, "kind", Kind(self.kind))
        if not self.name or "." in self.name:
            raise ValueError(f"feature name {self.name!r} must be a non-empty string without a dot")
        if self.kind is Kind.DENSE:
            if self.width < 1:
                raise ValueError(f"dense feature {self.name!r} has width={self.width}; give a width of 1 or more")
            if self.num_embeddings or self.embedding_dim or self.table or self.weighted or self.max_length:
                raise ValueError(
                    f"dense feature {self.name!r} reads no table; drop num_embeddings, embedding_dim, table, "
                    "weighted and max_length, or make it a bag"
                )
            return
        if self.width:
            raise ValueError(f"{self.kind.value} feature {self.name!r} has width={self.width}; only dense ones do")
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"feature {self.name!r} has num_embeddings={self.num_embeddings}, "
                f"embedding_dim={self.embedding_dim}; both must be 1 or more"
            )
        if self.max_length < 0:
            raise ValueError(f"feature {self.name!r} has max_length={self.max_length}; use 0 for no bound")
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"feature {self.name!r} has pooling={self.pooling!r}; use 'sum' or 'mean'")
        if self.kind is Kind.SEQUENCE and (self.side is not Side.REQUEST or self.weighted):
            raise ValueError(f"sequence feature {self.name!r} must be on the request side and unweighted")
        object.__setattr__(self, "table", self.table or self.name)

    @classmethod
    def bag(cls, name: str, side: Side | str, num_embeddings: int, embedding_dim: int, **options: Any) -> Feature:
        """A bag of ids, pooled to one row. `options`: table, pooling, weighted, max_length."""
        return cls(name, Side(side), Kind.BAG, num_embeddings, embedding_dim, **options)

    @classmethod
    def sequence(cls, name: str, num_embeddings: int, embedding_dim: int, **options: Any) -> Feature:
        """A column of the user's history: one id an event, oldest first. `options`: table, max_length."""
        return cls(name, Side.REQUEST, Kind.SEQUENCE, num_embeddings, embedding_dim, **options)

    @classmethod
    def dense(cls, name: str, side: Side | str, width: int = 1) -> Feature:
        """`width` float32 numbers a row."""
        return cls(name, Side(side), Kind.DENSE, width=width)


@dataclass(frozen=True)
class TableSpec:
    """An embedding table and the features that read it."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: Pooling
    feature_names: tuple[str, ...]


@dataclass(frozen=True)
class FeatureSchema:
    """All inputs of a ranking model, in order, and the tasks that it answers.

    Args:
        features: unique by name.
        tasks: names of the labels and of the logits, in order.

    Raises:
        ValueError: a name twice, no task, or two features that disagree on a shared table.

    Example:
        >>> schema = FeatureSchema((
        ...     Feature.bag("user_id", "request", 1000, 16),
        ...     Feature.bag("item_id", "candidate", 500, 16, table="item"),
        ...     Feature.sequence("seen_item", 500, 16, table="item"),
        ... ))
        >>> [(table.name, table.feature_names) for table in schema.tables]
        [('user_id', ('user_id',)), ('item', ('item_id', 'seen_item'))]
    """

    features: tuple[Feature, ...]
    tasks: tuple[str, ...] = ("label",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))
        object.__setattr__(self, "tasks", tuple(self.tasks))
        for what, names in (("feature", [f.name for f in self.features]), ("task", list(self.tasks))):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{what} names must be unique, but {repeated} come more than once; rename them")
        if not self.tasks:
            raise ValueError("tasks=() leaves nothing to predict; name at least one task")
        self.tables  # noqa: B018  (raises where features disagree on a table)

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables, in the order of their first feature; those of sequences included."""
        readers: dict[str, list[Feature]] = {}
        for feature in self.features:
            if feature.kind is not Kind.DENSE:
                readers.setdefault(feature.table, []).append(feature)
        specs = []
        for table, group in readers.items():
            poolings = {f.pooling for f in group if f.kind is Kind.BAG}
            shapes = {(f.num_embeddings, f.embedding_dim) for f in group}
            if len(shapes) > 1 or len(poolings) > 1:
                raise ValueError(
                    f"table {table!r} is read by {[f.name for f in group]} with sizes {sorted(shapes)} and poolings "
                    f"{sorted(poolings)}; one table has one size and one pooling: make them equal, or rename one table"
                )
            ((rows, dim),) = shapes
            pooling = poolings.pop() if poolings else group[0].pooling
            specs.append(TableSpec(table, rows, dim, pooling, tuple(f.name for f in group)))
        return tuple(specs)

    def _select(self, kind: Kind, side: Side) -> tuple[Feature, ...]:
        return tuple(f for f in self.features if f.kind is kind and f.side is side)

    @cached_property
    def request_bags(self) -> tuple[Feature, ...]:
        """Bags of the request, in schema order."""
        return self._select(Kind.BAG, Side.REQUEST)

    @cached_property
    def candidate_bags(self) -> tuple[Feature, ...]:
        """Bags of the candidates, in schema order."""
        return self._select(Kind.BAG, Side.CANDIDATE)

    @cached_property
    def sequences(self) -> tuple[Feature, ...]:
        """Columns of the history, in schema order."""
        return self._select(Kind.SEQUENCE, Side.REQUEST)

    @cached_property
    def request_dense(self) -> tuple[Feature, ...]:
        """Dense features of the request; their columns stand in this order."""
        return self._select(Kind.DENSE, Side.REQUEST)

    @cached_property
    def candidate_dense(self) -> tuple[Feature, ...]:
        """Dense features of the candidates; their columns stand in this order."""
        return self._select(Kind.DENSE, Side.CANDIDATE)

    @property
    def request_dense_width(self) -> int:
        """Columns of `RequestBatch.request_dense`."""
        return sum(f.width for f in self.request_dense)

    @property
    def candidate_dense_width(self) -> int:
        """Columns of `RequestBatch.candidate_dense`."""
        return sum(f.width for f in self.candidate_dense)

    def feature(self, name: str) -> Feature:
        """The feature of that name.

        Raises:
            ValueError: there is none; the message has the nearest.
        """
        for feature in self.features:
            if feature.name == name:
                return feature
        raise ValueError(f"unknown feature {name!r}; {nearest_name(name, [f.name for f in self.features])}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `from_dict` is the inverse."""
        return {
            "features": [asdict(f) | {"side": f.side.value, "kind": f.kind.value} for f in self.features],
            "tasks": list(self.tasks),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FeatureSchema:
        """The schema that `to_dict` wrote.

        Raises:
            ValueError: a key is missing or unknown.
        """
        known = [f.name for f in fields(Feature)]
        if not isinstance(data, Mapping) or set(data) != {"features", "tasks"}:
            raise ValueError(f"a schema has the keys 'features' and 'tasks', not {sorted(data)}")
        for entry in data["features"]:
            for key in entry:
                if key not in known:
                    raise ValueError(f"unknown key {key!r} of a feature; {nearest_name(key, known)}")
        return cls(tuple(Feature(**entry) for entry in data["features"]), tuple(data["tasks"]))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON: equal exactly where two schemas are."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
