"""What a node of the model's graph is, once requests and candidates are told apart.

Shapes leave out the rows: `shape` of a (B, N, D) tensor is (N, D), and its axis 1 has N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from torchrec_adaptive.request import Side


@dataclass(frozen=True)
class Rows:
    """A tensor of one side: R rows or B rows.

    Args:
        side: whose rows.
        node: of the new graph.
        shape: of a row.
    """

    side: Side
    node: Node
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Mixed:
    """A tensor whose columns along one axis belong to one side each, so that each half has its own number of rows.

    Args:
        axis: 1 or more, of the undivided tensor.
        request: node of the new graph, (R, ...).
        candidate: node of the new graph, (B, ...).
        request_columns: for each column of `request`, its place in the undivided tensor.
        candidate_columns: for each column of `candidate`, likewise.
        shape: of a row of the undivided tensor.
    """

    axis: int
    request: Node
    candidate: Node
    request_columns: tuple[int, ...]
    candidate_columns: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        axis: int,
        halves: Sequence[Node],
        columns: Sequence[Sequence[int]],
        shape: tuple[int, ...],
    ) -> Mixed:
        """From nodes and columns, the request's first.

        Args:
            axis: along which it is divided.
            halves: two nodes.
            columns: of both.
            shape: of a row of the undivided tensor.
        """
        (request, candidate), (request_columns, candidate_columns) = halves, columns
        return cls(axis, request, candidate, tuple(request_columns), tuple(candidate_columns), shape)

    @property
    def columns(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of both sides, the request's first."""
        return self.request_columns, self.candidate_columns

    def same_columns(self, other: Mixed) -> bool:
        """Whether both are divided alike."""
        return (self.axis, self.shape, self.request_columns, self.candidate_columns) == (
            other.axis,
            other.shape,
            other.request_columns,
            other.candidate_columns,
        )


@dataclass(frozen=True)
class Gram:
    """X Xᵀ of tokens of both sides, not yet computed: what is read of it decides.

    Args:
        tokens: X, axis 1.
        shape: of a row, (N, N).
        source: node of the old graph.
    """

    tokens: Mixed
    shape: tuple[int, ...]
    source: Node


@dataclass(frozen=True)
class Pooled:
    """What an embedding collection gave, or the dict of it.

    Args:
        node: a BroadcastKeyedTensor in the new graph.
        dims: of each feature.
        is_dict: whether `to_dict` was called on it.
    """

    node: Node
    dims: dict[str, int]
    is_dict: bool = False


@dataclass(frozen=True)
class Sparse:
    """The sparse input."""

    node: Node


@dataclass(frozen=True)
class RowCount:
    """B, as an integer."""


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor that has rows.

    Args:
        rest: without the rows.
    """

    rest: tuple[int, ...]


@dataclass(frozen=True)
class Other:
    """A parameter, a constant, or what an operator at B rows gave that is no tensor with rows.

    Args:
        node: of the new graph.
        is_constant: whether it depends on no input.
        dims: of a tensor; None of anything else.
    """

    node: Node
    is_constant: bool
    dims: tuple[int, ...] | None = None


Value = Rows | Mixed | Gram | Pooled | Sparse | RowCount | Shape | Other
