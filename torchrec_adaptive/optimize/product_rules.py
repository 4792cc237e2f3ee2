"""Rules of what adds up over columns: linear layers, products, norms and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node

from torchrec_adaptive.optimize.hoisting import HALVES, arguments, hoist, node_of, row_axis
from torchrec_adaptive.optimize.rewriting import ORIGIN, Rewriter
from torchrec_adaptive.optimize.split import SplitGram, SplitLinear
from torchrec_adaptive.optimize.values import Gram, Mixed, Other, Rows, Value
from torchrec_adaptive.request import Side


def linear_module(rewriter: Rewriter, node: Node) -> Value | None:
    """nn.Linear."""
    value = rewriter.value(node.args[0])
    if isinstance(value, Mixed) and value.axis == len(value.shape) == 1:
        module = rewriter.model.get_submodule(str(node.target))
        weight = rewriter.parameter(f"{node.target}.weight")
        bias = None if module.bias is None else rewriter.parameter(f"{node.target}.bias")
        return _split_linear(rewriter, node, value, weight, bias)
    return hoist(rewriter, node)


def linear_function(rewriter: Rewriter, node: Node) -> Value | None:
    """torch.nn.functional.linear with constant weights."""
    argument, weight, bias = arguments(node, "input", "weight", "bias")
    value, weight, bias = rewriter.value(argument), rewriter.value(weight), rewriter.value(bias)
    if isinstance(value, Mixed) and value.axis == len(value.shape) == 1 and isinstance(weight, Other):
        if not all(isinstance(part, Other) and part.is_constant for part in (weight, bias or weight)):
            return None
        return _split_linear(rewriter, node, value, weight.node, None if bias is None else node_of(bias))
    return hoist(rewriter, node)


def _split_linear(rewriter: Rewriter, node: Node, value: Mixed, weight: Node, bias: Node | None) -> Value | None:
    shape = rewriter.row_shape(node)
    if shape is None:
        return None
    name = rewriter.add_module("split_linear", SplitLinear(value.request_columns, value.candidate_columns))
    rewriter.note(node, "decomposed")
    new = rewriter.emit_module(name, value.candidate, value.request, rewriter.index, weight, bias)
    return Rows(Side.CANDIDATE, new, shape)


def norm_module(rewriter: Rewriter, node: Node) -> Value | None:
    """A norm over the last axes of each row."""
    value = rewriter.value(node.args[0])
    module = rewriter.model.get_submodule(str(node.target))
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    if isinstance(value, Rows) and len(module.normalized_shape) <= len(value.shape):
        return hoist(rewriter, node)
    return None


def product(rewriter: Rewriter, node: Node) -> Value | None:
    """bmm and matmul: of one side; or X Xᵀ of tokens of both."""
    one, other = arguments(node, "input", "mat2")
    if other is None:
        other = node.kwargs.get("other")
    if not (isinstance(one, Node) and isinstance(other, Node)):
        return None
    left, right = rewriter.value(one), rewriter.value(other)
    if isinstance(left, Mixed) and isinstance(right, Mixed):
        is_gram = other.target in (torch.transpose, "transpose") and other.args[0] is one and right.axis == 2
        if is_gram and left.axis == 1 and len(left.shape) == 2:
            rewriter.note(node, "decomposed")
            return Gram(left, (left.shape[0], left.shape[0]), node)
        return None
    if isinstance(left, Rows) and isinstance(right, Rows):
        return hoist(rewriter, node) if len(left.shape) == len(right.shape) == 2 else None
    is_weight = isinstance(right, Other) and right.is_constant and right.dims is not None and len(right.dims) == 2
    return hoist(rewriter, node) if isinstance(left, Rows) and left.shape and is_weight else None


def gram_entries(rewriter: Rewriter, node: Node, value: Gram, index: Any) -> Value | None:
    """Entries of X Xᵀ picked by two constant index tensors, each on its side."""
    shape = rewriter.row_shape(node)
    if shape is None or len(shape) != 1 or not isinstance(index, tuple) or len(index) != 3 or index[0] != slice(None):
        return None
    places: list[list[int]] = []
    for part in index[1:]:
        known, example = rewriter.value(part), rewriter.examples[part][0] if isinstance(part, Node) else None
        if not (isinstance(known, Other) and known.is_constant and isinstance(example, torch.Tensor)):
            return None
        if example.dim() != 1 or example.is_floating_point() or example.dtype == torch.bool:
            return None
        places.append(example.tolist())
    tokens = value.tokens
    numbers = {column: number for number, column in enumerate((*tokens.request_columns, *tokens.candidate_columns))}
    size = len(numbers)
    rows, columns = ([numbers[place % size] for place in part] for part in places)
    gram = SplitGram(len(tokens.request_columns), len(tokens.candidate_columns), rows, columns)
    if not gram.request_entries or not gram.candidate_entries:
        return None
    name = rewriter.add_module("split_gram", gram)
    both = rewriter.emit_module(name, tokens.candidate, tokens.request, rewriter.index)
    both.meta[ORIGIN] = value.source
    request, candidate = (rewriter.emit(_element, both, half) for half in range(2))
    rewriter.note(node, "decomposed")
    return Mixed.of(1, (request, candidate), (gram.request_entries, gram.candidate_entries), shape)


def _element(pair: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
    return pair[number]


def summed(rewriter: Rewriter, node: Node) -> Value | None:
    """sum over one axis, not the rows'."""
    argument, axis, keepdim = arguments(node, "input", "dim", "keepdim")
    value = rewriter.value(argument)
    if isinstance(axis, list | tuple):
        axis = axis[0] if len(axis) == 1 else None
    if not isinstance(value, Rows | Mixed) or not isinstance(axis, int):
        return None
    axis = row_axis(axis, len(value.shape) + 1)
    if axis == 0:
        return None
    if isinstance(value, Rows):
        return hoist(rewriter, node)
    shape = rewriter.row_shape(node)
    assert shape is not None
    request, candidate = (
        rewriter.emit(torch.sum, getattr(value, half), axis, keepdim=bool(keepdim)) for half in HALVES
    )
    rewriter.note(node, "decomposed")
    if axis == value.axis:
        copied = rewriter.emit(torch.index_select, request, 0, rewriter.index)
        return Rows(Side.CANDIDATE, rewriter.emit(torch.add, candidate, copied), shape)
    moved = value.axis if keepdim or value.axis < axis else value.axis - 1
    return Mixed.of(moved, (request, candidate), value.columns, shape)


def over_one_axis(rewriter: Rewriter, node: Node) -> Value | None:
    """mean and softmax over one axis, not the rows', of one side."""
    argument, axis = arguments(node, "input", "dim")
    value = rewriter.value(argument)
    if isinstance(value, Rows) and isinstance(axis, int) and row_axis(axis, len(value.shape) + 1) > 0:
        return hoist(rewriter, node)
    return None
