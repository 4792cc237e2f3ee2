"""What all rules share: arguments, halves, and an operator moved to the request's rows.

Rules hold for operators that treat every row by itself. An axis below 0 counts from the end of the undivided tensor.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from torchrec_adaptive.optimize.rewriting import Rewriter
from torchrec_adaptive.optimize.values import Other, Rows, Value
from torchrec_adaptive.request import Side


def arguments(node: Node, *names: str) -> list[Any]:
    """Arguments by position or name; None where absent."""
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in enumerate(names)]


def row_axis(axis: int, rank: int) -> int:
    """An axis counted from the front, of a tensor of that rank with its rows."""
    return axis + rank if axis < 0 else axis


def is_request(value: Value | None) -> bool:
    """Whether a value has R rows."""
    return isinstance(value, Rows) and value.side is Side.REQUEST


def node_of(value: Value) -> Node:
    """The node of a value that is a tensor of one side or a constant."""
    assert isinstance(value, Rows | Other)
    return value.node


def hoist(rewriter: Rewriter, node: Node) -> Value | None:
    """An operator on the request's rows and constants alone, at R rows."""
    read = [rewriter.values[argument] for argument in node.all_input_nodes]
    shape = rewriter.row_shape(node)
    if shape is None or not any(is_request(value) for value in read):
        return None
    if not all(is_request(value) or (isinstance(value, Other) and value.is_constant) for value in read):
        return None
    rewriter.note(node, "hoisted")
    return Rows(Side.REQUEST, rewriter.emit_like(node, node_of), shape)


HALVES = ("request", "candidate")
