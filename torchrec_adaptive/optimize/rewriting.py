"""A traced graph rewritten node by node: each becomes a value of the request, of the candidate, or of both.

An operator that no rule knows runs as it was, at B rows: that is always right, and reported where it reads the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from torchrec_adaptive.optimize.report import Kind
from torchrec_adaptive.optimize.split import Undivided
from torchrec_adaptive.optimize.values import Gram, Mixed, Other, Pooled, RowCount, Rows, Shape, Sparse, Value
from torchrec_adaptive.request import Side

Rule = Callable[["Rewriter", Node], "Value | None"]
ORIGIN = "request_orient_origin"
_AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imatmul")
_TIED = "ties the request's values to the candidate's element by element: no part of the result is the request's alone"
_UNKNOWN = "no rule knows that it treats every row by itself"


class CannotOrient(ValueError):
    """The graph does with the sparse input what has no request-level form."""


class Rewriter:
    """Builds the new graph.

    Args:
        model: whose graph it is.
        examples: for every node, its value in two runs of different numbers of candidates.
        num_candidates: of the two runs.
        rules: operator to rule.
        request_features: names of the features that belong to the request.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: dict[Node, tuple[Any, Any]],
        num_candidates: tuple[int, int],
        rules: Mapping[str, Rule],
        request_features: Sequence[str],
    ) -> None:
        self.request_features = frozenset(request_features)
        self.model, self.examples, self.num_candidates, self.rules = model, examples, num_candidates, rules
        self.graph = Graph()
        self.values: dict[Node, Value] = {}
        self.modules: dict[str, nn.Module] = {}
        self.kinds: dict[Node, tuple[Kind, str]] = {}
        self.has_in_place = False
        self._origin: Node | None = None
        self._materialised: dict[Value, Node] = {}
        batch = self.graph.placeholder("batch")
        self.features, self.request_dense, self.candidate_dense = (
            self.graph.call_function(getattr, (batch, part))
            for part in ("features", "request_dense", "candidate_dense")
        )
        self.index = self.graph.call_function(getattr, (self.features, "candidate_to_request"))

    def rewrite(self, graph: Graph, inputs: dict[Node, Value]) -> Graph:
        """All nodes.

        Args:
            graph: of the model.
            inputs: what its placeholders are.

        Returns:
            The new graph.
        """
        self.has_in_place = any(is_in_place(node, self.model) for node in graph.nodes)
        for node in graph.nodes:
            self._origin = node
            if node.op == "placeholder":
                self.values[node] = inputs[node]
            elif node.op == "output":
                self.graph.output(self._replaced(node.args[0], self.at_candidates))
            else:
                rule = self.rules.get(operator_name(node, self.model))
                value = None if rule is None else rule(self, node)
                self.values[node] = self._as_it_was(node) if value is None else value
                if is_in_place(node, self.model) and isinstance(node.args[0], Node):
                    self.values[node.args[0]] = self.values[node]
                    self._materialised.clear()
        return self.graph

    # --- for rules ---

    def value(self, argument: Any) -> Value | None:
        """What an argument of an old node is; None for a plain Python value."""
        return self.values[argument] if isinstance(argument, Node) else None

    def emit(self, target: Any, *arguments: Any, **keywords: Any) -> Node:
        """A call of a function in the new graph."""
        return self._marked(self.graph.call_function(target, arguments, keywords))

    def emit_module(self, name: str, *arguments: Any) -> Node:
        """A call of a module in the new graph."""
        return self._marked(self.graph.call_module(name, arguments))

    def emit_like(self, node: Node, into: Callable[[Value], Node]) -> Node:
        """The old node's own operator, on what `into` makes of each value that it reads."""
        arguments, keywords = self._replaced(node.args, into), self._replaced(node.kwargs, into)
        return self._marked(self.graph.create_node(node.op, node.target, arguments, keywords))

    def add_module(self, stem: str, module: nn.Module) -> str:
        """Put a module of the new graph's own beside the model's; returns its name."""
        name = f"{stem}_{len(self.modules)}"
        self.modules[name] = module
        return name

    def parameter(self, name: str) -> Node:
        """A parameter of the model, by its path."""
        return self._marked(self.graph.get_attr(name))

    def note(self, node: Node, kind: Kind, reason: str = "") -> None:
        """Say in the report what was done with a node."""
        self.kinds[node] = (kind, reason)

    def row_shape(self, node: Node) -> tuple[int, ...] | None:
        """The shape of a row of what an old node gives; None where it is no tensor with one row a candidate."""
        one, other = self.examples[node]
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.dim() == 0:
            return None
        rows = (one.shape[0], other.shape[0])
        return tuple(one.shape[1:]) if rows == self.num_candidates and one.shape[1:] == other.shape[1:] else None

    def at_candidates(self, value: Value) -> Node:
        """A node at B rows of a value, copies made once."""
        if isinstance(value, Other | Pooled):
            return value.node
        if isinstance(value, Rows) and value.side is Side.CANDIDATE:
            return value.node
        if value not in self._materialised:
            self._materialised[value] = self._materialise(value)
        return self._materialised[value]

    # --- the node as it was ---

    def _materialise(self, value: Value) -> Node:
        if isinstance(value, Rows):
            return self.emit(torch.index_select, value.node, 0, self.index)
        if isinstance(value, Mixed):
            name = self.add_module("undivided", Undivided(value.axis, *value.columns))
            return self.emit_module(name, value.candidate, value.request, self.index)
        if isinstance(value, Gram):
            tokens = self.at_candidates(value.tokens)
            return self.emit(torch.matmul, tokens, self.emit(torch.transpose, tokens, 1, 2))
        if isinstance(value, RowCount):
            return self.emit(len, self.index)
        if isinstance(value, Shape):
            return self.emit(_shape, self.at_candidates(RowCount()), value.rest)
        assert isinstance(value, Sparse)
        assert self._origin is not None
        raise CannotOrient(
            f"{place_of(self._origin)} reads the sparse input; it may be given to an EmbeddingBagCollection and asked "
            "for its stride(), no more: move what reads it into a module of its own, behind the look-up"
        )

    def _replaced(self, argument: Any, into: Callable[[Value], Node]) -> Any:
        return map_aggregate(argument, lambda a: into(self.values[a]) if isinstance(a, Node) else a)

    def _as_it_was(self, node: Node) -> Value:
        if node.op == "get_attr":
            example = self.examples[node][0]
            dims = tuple(example.shape) if isinstance(example, Tensor) else None
            return Other(self._marked(self.graph.get_attr(str(node.target))), True, dims)
        read = [self.values[argument] for argument in node.all_input_nodes]
        new = self.emit_like(node, self.at_candidates)
        if any(_reads_request(value) for value in read):
            alone = all(_reads_request(value) or (isinstance(value, Other) and value.is_constant) for value in read)
            self.note(node, "left", _UNKNOWN if alone and len(read) == 1 else _TIED)
        elif any(not isinstance(value, Other) or not value.is_constant for value in read):
            self.note(node, "candidate")
        if (shape := self.row_shape(node)) is not None:
            return Rows(Side.CANDIDATE, new, shape)
        return Other(new, bool(read) and all(isinstance(v, Other) and v.is_constant for v in read))

    def _marked(self, node: Node) -> Node:
        node.meta[ORIGIN] = self._origin
        return node


def operator_name(node: Node, model: nn.Module) -> str:
    """The name that rules are found by: that of the function or method, or the module's class behind "module:"."""
    if node.op == "call_module":
        return f"module:{type(model.get_submodule(str(node.target))).__name__}"
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else ""


def is_in_place(node: Node, model: nn.Module) -> bool:
    """Whether a traced node changes its first operand."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace") is True:
        return True
    name = operator_name(node, model)
    return name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


def module_of(node: Node) -> str:
    """Path of the module that a traced node stands in; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack)[-1] if stack else ""


def place_of(node: Node) -> str:
    """A traced node and the module that it stands in, for a message."""
    where = module_of(node)
    return f"node {node.name!r}" + (f" in module {where!r}" if where else "")


def _reads_request(value: Value) -> bool:
    return isinstance(value, Mixed | Gram | Pooled) or (isinstance(value, Rows) and value.side is Side.REQUEST)


def _shape(rows: int, rest: tuple[int, ...]) -> torch.Size:
    return torch.Size((rows, *rest))
