"""What each operator does to values of the request, of the candidate, and of both.

A rule gives the node's value, or None to leave the operator as it was.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_adaptive.optimize import layout_rules as layout
from torchrec_adaptive.optimize import product_rules as products
from torchrec_adaptive.optimize.hoisting import HALVES, hoist
from torchrec_adaptive.optimize.rewriting import Rewriter, Rule
from torchrec_adaptive.optimize.values import Gram, Mixed, Other, Pooled, RowCount, Rows, Shape, Sparse, Value
from torchrec_adaptive.request import Side

# Element by element: each output depends on the inputs at its own place only.
_ELEMENTWISE = (
    "relu relu_ sigmoid sigmoid_ tanh tanh_ gelu silu mish softplus leaky_relu elu selu hardtanh hardswish exp log "
    "log1p sqrt rsqrt square abs neg clamp clamp_min clamp_max pow add sub rsub mul div truediv true_divide float half "
    "bfloat16 double contiguous clone detach dropout nan_to_num sign minimum maximum "
    "module:ReLU module:ReLU6 module:Sigmoid module:Tanh module:GELU module:SiLU module:Mish module:Softplus "
    "module:LeakyReLU module:ELU module:SELU module:Hardtanh module:Hardswish module:Identity module:Dropout"
)


def elementwise(rewriter: Rewriter, node: Node) -> Value | None:
    """Tensors of one side and of one rank at R rows; mixed ones that are divided alike, half by half."""
    read = [rewriter.values[argument] for argument in node.all_input_nodes]
    mixed = [value for value in read if isinstance(value, Mixed)]
    if not mixed:
        ranks = {len(value.shape) for value in read if isinstance(value, Rows)}
        aligned = len(ranks) == 1 and all(_is_below(value, min(ranks)) for value in read if isinstance(value, Other))
        return hoist(rewriter, node) if aligned else None
    if len(mixed) < len(read) or not all(value.same_columns(mixed[0]) for value in mixed):
        return None
    halves = [rewriter.emit_like(node, operator.attrgetter(half)) for half in HALVES]
    rewriter.note(node, "decomposed")
    first = mixed[0]
    return Mixed.of(first.axis, halves, first.columns, first.shape)


def _is_below(value: Other, rank: int) -> bool:
    """Whether a constant's axes stay behind the rows' axis."""
    return value.dims is not None and len(value.dims) <= rank


def item(rewriter: Rewriter, node: Node) -> Value | None:
    """Indexing: a feature of a look-up, an axis of a shape, columns of rows, entries of X Xᵀ."""
    value, index = rewriter.value(node.args[0]), node.args[1]
    if isinstance(value, Pooled):
        return _feature(rewriter, node, value, index)
    if isinstance(value, Shape) and isinstance(index, int):
        if index % (len(value.rest) + 1) == 0:
            return RowCount()
        return None
    if isinstance(value, Gram):
        return products.gram_entries(rewriter, node, value, index)
    if isinstance(value, Rows) and isinstance(index, tuple) and index[:1] == (slice(None),):
        return hoist(rewriter, node)
    return None


def _feature(rewriter: Rewriter, node: Node, value: Pooled, name: Any) -> Value | None:
    if name not in value.dims:
        return None
    if name in rewriter.request_features:
        broadcast = rewriter.emit(_broadcast_values, value.node, name)
        rewriter.note(node, "hoisted")
        return Rows(Side.REQUEST, broadcast, (value.dims[name],))
    rewriter.note(node, "candidate")
    return Rows(Side.CANDIDATE, rewriter.emit(_candidate_values, value.node, name), (value.dims[name],))


def _broadcast_values(looked_up: Any, name: str) -> torch.Tensor:
    return looked_up.broadcast(name).values


def _candidate_values(looked_up: Any, name: str) -> torch.Tensor:
    return looked_up.candidate(name)


def stride(rewriter: Rewriter, node: Node) -> Value | None:
    """KeyedJaggedTensor.stride()."""
    return RowCount() if isinstance(rewriter.value(node.args[0]), Sparse) else None


def look_up(rewriter: Rewriter, node: Node) -> Value | None:
    """EmbeddingBagCollection on the sparse input."""
    value = rewriter.value(node.args[0]) if node.args else rewriter.value(node.kwargs.get("features"))
    if not isinstance(value, Sparse):
        return None
    collection = rewriter.model.get_submodule(str(node.target))
    assert isinstance(collection, EmbeddingBagCollection)
    dims = {
        name: config.embedding_dim for config in collection.embedding_bag_configs() for name in config.feature_names
    }
    rewriter.note(node, "decomposed")
    return Pooled(rewriter.emit_module(str(node.target), value.node), dims)


def to_dict(rewriter: Rewriter, node: Node) -> Value | None:
    """KeyedTensor.to_dict()."""
    value = rewriter.value(node.args[0])
    return Pooled(value.node, value.dims, True) if isinstance(value, Pooled) and not value.is_dict else None


def all_values(rewriter: Rewriter, node: Node) -> Value | None:
    """KeyedTensor.values(): all features beside each other."""
    value = rewriter.value(node.args[0])
    if not isinstance(value, Pooled) or value.is_dict:
        return None
    return layout.joined(rewriter, node, [_feature(rewriter, node, value, name) for name in value.dims], 1)


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(_ELEMENTWISE.split(), elementwise)
    rules |= dict.fromkeys(["reshape", "view", "flatten", "unsqueeze", "squeeze", "module:Flatten"], layout.reshaped)
    rules |= dict.fromkeys(["cat", "concat", "concatenate"], layout.concatenation)
    rules |= dict.fromkeys(["bmm", "matmul"], products.product)
    rules |= dict.fromkeys(["module:LayerNorm", "module:RMSNorm"], products.norm_module)
    rules |= dict.fromkeys(["mean", "softmax"], products.over_one_axis)
    rules |= dict.fromkeys(["transpose", "swapaxes"], layout.transposed)
    rules |= {
        "module:Linear": products.linear_module,
        "linear": products.linear_function,
        "_get_flatten_input": layout.flattened,
        "stack": layout.stacked,
        "sum": products.summed,
        "getitem": item,
        "getattr": layout.attribute,
        "size": layout.size,
        "stride": stride,
        "to_dict": to_dict,
        "values": all_values,
        "module:EmbeddingBagCollection": look_up,
    }
    return rules


RULES = _rules()
