"""Rules of what moves columns about: joining, reshaping, transposing, and asking for shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from torchrec_adaptive.optimize.hoisting import HALVES, arguments, hoist, row_axis
from torchrec_adaptive.optimize.rewriting import Rewriter
from torchrec_adaptive.optimize.split import with_row_shape
from torchrec_adaptive.optimize.values import Gram, Mixed, Other, RowCount, Rows, Shape, Value
from torchrec_adaptive.request import Side


def concatenation(rewriter: Rewriter, node: Node) -> Value | None:
    """torch.cat along any axis but the rows'."""
    tensors, axis = arguments(node, "tensors", "dim")
    axis = node.kwargs.get("axis", 0) if axis is None else axis
    if isinstance(tensors, Node) or not isinstance(axis, int):
        return None
    return joined(rewriter, node, [rewriter.value(tensor) for tensor in tensors], axis)


def flattened(rewriter: Rewriter, node: Node) -> Value | None:
    """torchrec's DeepFM: each tensor flattened to one axis, then all beside each other."""
    (tensors,) = arguments(node, "inputs")
    return joined(rewriter, node, [_flat(rewriter, rewriter.value(tensor)) for tensor in tensors], 1)


def _flat(rewriter: Rewriter, value: Value | None) -> Value | None:
    if isinstance(value, Rows) and len(value.shape) != 1:
        shape = (math.prod(value.shape),)
        return Rows(value.side, rewriter.emit(with_row_shape, value.node, shape), shape)
    return value


def joined(rewriter: Rewriter, node: Node, parts: Sequence[Value | None], axis: int) -> Value | None:
    """Values beside each other along an axis.

    Args:
        rewriter: at work.
        node: of the old graph, which gives the same.
        parts: in order.
        axis: of the undivided tensors, not the rows'.
    """
    values = [value for value in parts if isinstance(value, Rows | Mixed)]
    shape = rewriter.row_shape(node)
    if len(values) < len(parts) or shape is None or any(len(value.shape) != len(shape) for value in values):
        return None
    axis = row_axis(axis, len(shape) + 1)
    if axis == 0 or any(isinstance(value, Mixed) and value.axis != axis for value in values):
        return None
    nodes: dict[str, list[Node]] = {half: [] for half in HALVES}
    columns: dict[str, list[int]] = {half: [] for half in HALVES}
    first = 0
    for value in values:
        width = value.shape[axis - 1]
        if isinstance(value, Rows):
            half = "request" if value.side is Side.REQUEST else "candidate"
            nodes[half].append(value.node)
            columns[half] += range(first, first + width)
        else:
            for half in HALVES:
                nodes[half].append(getattr(value, half))
                columns[half] += [first + column for column in getattr(value, f"{half}_columns")]
        first += width
    whole = {
        half: own[0] if len(own) == 1 and not rewriter.has_in_place else rewriter.emit(torch.cat, own, axis)
        for half, own in nodes.items()
        if own
    }
    if len(whole) == 2:
        rewriter.note(node, "decomposed")
        return Mixed.of(axis, [whole[half] for half in HALVES], [columns[half] for half in HALVES], shape)
    side = Side.REQUEST if "request" in whole else Side.CANDIDATE
    rewriter.note(node, "hoisted" if side is Side.REQUEST else "candidate")
    return Rows(side, next(iter(whole.values())), shape)


def stacked(rewriter: Rewriter, node: Node) -> Value | None:
    """torch.stack along any axis but the rows'."""
    tensors, axis = arguments(node, "tensors", "dim")
    shape = rewriter.row_shape(node)
    if isinstance(tensors, Node) or shape is None:
        return None
    values = [rewriter.value(tensor) for tensor in tensors]
    axis = row_axis(axis or 0, len(shape) + 1)
    if axis == 0 or not all(isinstance(value, Rows) for value in values):
        return None
    raised = []
    for value in values:
        assert isinstance(value, Rows)
        new_shape = (*value.shape[: axis - 1], 1, *value.shape[axis - 1 :])
        raised.append(Rows(value.side, rewriter.emit(torch.unsqueeze, value.node, axis), new_shape))
    return joined(rewriter, node, raised, axis)


def reshaped(rewriter: Rewriter, node: Node) -> Value | None:
    """reshape, view, flatten, unsqueeze, squeeze: what leaves the rows where they are."""
    value, shape = rewriter.value(node.args[0]), rewriter.row_shape(node)
    if shape is None or not isinstance(value, Rows | Mixed) or math.prod(value.shape) != math.prod(shape):
        return None
    if isinstance(value, Rows):
        if value.side is Side.REQUEST:
            rewriter.note(node, "hoisted")
        return Rows(value.side, rewriter.emit(with_row_shape, value.node, shape), shape)
    prefix = math.prod(value.shape[: value.axis - 1])
    for axis in range(1, len(shape) + 1):
        columns = _regrouped(value, shape, axis) if math.prod(shape[: axis - 1]) == prefix else None
        if columns is not None:
            break
    else:
        return None
    nodes = [
        rewriter.emit(with_row_shape, getattr(value, half), (*shape[: axis - 1], len(own), *shape[axis:]))
        for half, own in zip(HALVES, columns, strict=True)
    ]
    rewriter.note(node, "decomposed")
    return Mixed.of(axis, nodes, columns, shape)


def _regrouped(value: Mixed, shape: tuple[int, ...], axis: int) -> list[list[int]] | None:
    """The columns of both sides along another axis, where each new column belongs to one side and keeps its order."""
    behind, new_behind = math.prod(value.shape[value.axis :]), math.prod(shape[axis:])
    halves = []
    for columns in value.columns:
        elements = [column * behind + place for column in columns for place in range(behind)]
        if len(elements) % new_behind:
            return None
        groups = [elements[first : first + new_behind] for first in range(0, len(elements), new_behind)]
        if any(g[0] % new_behind or g != list(range(g[0], g[0] + new_behind)) for g in groups):
            return None
        halves.append([group[0] // new_behind for group in groups])
    return halves


def transposed(rewriter: Rewriter, node: Node) -> Value | None:
    """transpose of two axes, neither of them the rows'."""
    argument, one, other = arguments(node, "input", "dim0", "dim1")
    value = rewriter.value(argument)
    if not isinstance(value, Rows | Mixed):
        return None
    one, other = (row_axis(axis, len(value.shape) + 1) for axis in (one, other))
    if 0 in (one, other):
        return None
    if isinstance(value, Rows):
        return hoist(rewriter, node)
    shape = rewriter.row_shape(node)
    assert shape is not None
    nodes = [rewriter.emit(torch.transpose, getattr(value, half), one, other) for half in HALVES]
    axis = {one: other, other: one}.get(value.axis, value.axis)
    rewriter.note(node, "decomposed")
    return Mixed.of(axis, nodes, value.columns, shape)


def attribute(rewriter: Rewriter, node: Node) -> Value | None:
    """tensor.shape, and what is the same on both sides."""
    value = rewriter.value(node.args[0])
    if node.args[1] in ("device", "dtype") and isinstance(value, Rows | Mixed):
        own = value.node if isinstance(value, Rows) else value.candidate
        return Other(rewriter.emit(getattr, own, node.args[1]), True)
    if node.args[1] == "shape" and isinstance(value, Rows | Mixed | Gram):
        return Shape(value.shape)
    return None


def size(rewriter: Rewriter, node: Node) -> Value | None:
    """tensor.size() and tensor.size(0)."""
    value = rewriter.value(node.args[0])
    if not isinstance(value, Rows | Mixed | Gram):
        return None
    (axis,) = arguments(node, "input", "dim")[1:]
    return Shape(value.shape) if axis is None else RowCount() if axis % (len(value.shape) + 1) == 0 else None
