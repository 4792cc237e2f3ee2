"""A model that scores one row a pair, made to score requests: what depends on the request alone runs once a request."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.embeddings import RequestBroadcastEBC
from torchrec_adaptive.optimize.report import Operator, RequestOrientReport
from torchrec_adaptive.optimize.rewriting import ORIGIN, Rewriter, module_of
from torchrec_adaptive.optimize.rules import RULES
from torchrec_adaptive.optimize.tracing import trace
from torchrec_adaptive.optimize.values import Mixed, Rows, Sparse, Value
from torchrec_adaptive.request import Feature, FeatureSchema, Kind, RequestBatch, Side, batch_from_rows, nearest_name

_EXAMPLES = ((2, 1, 4), (5, 1, 5))  # candidates of each request, in two batches
_TOLERANCE = 1e-4
_CONSTANT = "_tensor_constant"


class RequestOriented(GraphModule):
    """A model that takes a RequestBatch, with the very parameters of the model that it was made from.

    Names of parameters are those of that model, so that its checkpoints load. `graph` and `code` show what it does.
    """

    report: RequestOrientReport


def request_orient(model: nn.Module, schema: FeatureSchema) -> RequestOriented:
    """Rewrite a model so that it computes the same from a RequestBatch, the request's share once a request.

    The model is traced, run on random batches of the schema, and rewritten: an operator that reads the request alone
    runs at R rows; the first that mixes both sides (a concatenation, a linear layer, products of all pairs of tokens,
    a sum) is decomposed; what can't be runs as it was, at B rows. The result is compared with the model on those
    batches before it is returned. Training mode and gradients are the model's.

    Args:
        model: FX-traceable and unsharded, of (dense features (B, W), KeyedJaggedTensor) or of one of them, in any
            order, annotated so; it looks up in torchrec's EmbeddingBagCollection. Dense columns and features are the
            schema's.
        schema: which of its features belong to the request.

    Returns:
        The rewritten model and, as `report`, what was hoisted, decomposed and left.

    Raises:
        ValueError: the model can't be traced (the message says where), reads the sparse input otherwise, reads features
            that the schema has not, or the schema has histories.
    """
    _check_features(model, schema)
    was_training = model.training
    model.eval()
    try:
        graph = trace(model)
        inputs = _placeholders(model, graph, schema)
        batches = [_random_batch(schema, counts, _device(model)) for counts in _EXAMPLES]
        runs = [_run(model, graph, _arguments(inputs, batch, schema)) for batch in batches]
        examples = {node: (runs[0].values[node], runs[1].values[node]) for node in graph.nodes}
        counts = (batches[0].num_candidates, batches[1].num_candidates)
        rewriter = Rewriter(model, examples, counts, RULES, [f.name for f in schema.request_bags])
        new_graph = rewriter.rewrite(graph, _input_values(rewriter, inputs, schema))
        attributes = _attributes(model, new_graph, rewriter)
        GraphModule(attributes, new_graph).graph.eliminate_dead_code()
        read = {str(node.target) for node in new_graph.nodes}
        attributes = {name: value for name, value in attributes.items() if name in read}
        oriented = RequestOriented(attributes, new_graph, "RequestOriented").eval()
        after = [_run(oriented, oriented.graph, (batch,)) for batch in batches]
        _check_equal(model, after, runs)
        oriented.report = _report(rewriter, graph, batches, runs, after)
    finally:
        model.train(was_training)
        for name in [name for name in vars(model) if name.startswith(_CONSTANT)]:  # the tracer put them there
            delattr(model, name)
    return oriented.train(was_training)


@dataclass(frozen=True)
class _Run:
    """What each node gave, and the FLOPs that it took."""

    values: dict[Node, Any]
    flops: dict[Node, int]
    output: Any


def _run(root: nn.Module, graph: Graph, arguments: Sequence[Any]) -> _Run:
    interpreter = _Counting(root, graph)
    with torch.inference_mode(False), torch.no_grad():
        output = interpreter.run(*arguments)
    return _Run(dict(interpreter.env), interpreter.flops, output)


class _Counting(Interpreter):
    def __init__(self, root: nn.Module, graph: Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.flops: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.flops[n] = counter.get_total_flops()
        return result


def _placeholders(model: nn.Module, graph: Graph, schema: FeatureSchema) -> dict[Node, str]:
    """Each argument of the model: "sparse" or "dense"."""
    try:
        hints = get_type_hints(type(model).forward)
    except (NameError, TypeError, AttributeError):  # a name that exists for type checkers only
        hints = {}
    types = {node: hints.get(str(node.target), node.type) for node in graph.nodes if node.op == "placeholder"}
    kinds = {
        node: "sparse" if kind is KeyedJaggedTensor else "dense" if kind is Tensor else ""
        for node, kind in types.items()
    }
    for node, kind in kinds.items():
        if not kind or list(kinds.values()).count(kind) > 1:
            raise ValueError(
                f"argument {node.target!r} of the model is of type {types[node]}; there may be one Tensor, of dense "
                "features, and one KeyedJaggedTensor, both annotated: annotate forward's arguments"
            )
        if kind == "dense" and not (schema.request_dense_width or schema.candidate_dense_width):
            raise ValueError(f"the model takes {node.target!r}, but the schema has no dense feature; add them")
    return kinds


def _arguments(inputs: dict[Node, str], batch: RequestBatch, schema: FeatureSchema) -> list[Any]:
    """The model's own arguments: every candidate a row, dense columns in the order of the schema."""
    impressions = batch.to_impressions()
    columns = [column for side in _dense_columns(schema) for column in side]
    dense = impressions.dense_features[:, sorted(range(len(columns)), key=columns.__getitem__)]
    return [impressions.sparse_features if kind == "sparse" else dense for kind in inputs.values()]


def _dense_columns(schema: FeatureSchema) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the columns of both sides stand in the order of the schema."""
    columns: dict[Side, list[int]] = {Side.REQUEST: [], Side.CANDIDATE: []}
    first = 0
    for feature in schema.features:
        columns[feature.side] += range(first, first + feature.width)
        first += feature.width
    return tuple(columns[Side.REQUEST]), tuple(columns[Side.CANDIDATE])


def _input_values(rewriter: Rewriter, inputs: dict[Node, str], schema: FeatureSchema) -> dict[Node, Value]:
    request, candidate = _dense_columns(schema)
    shape = (len(request) + len(candidate),)
    dense: Value = Mixed(1, rewriter.request_dense, rewriter.candidate_dense, request, candidate, shape)
    if not candidate:
        dense = Rows(Side.REQUEST, rewriter.request_dense, shape)
    elif not request:
        dense = Rows(Side.CANDIDATE, rewriter.candidate_dense, shape)
    return {node: Sparse(rewriter.features) if kind == "sparse" else dense for node, kind in inputs.items()}


def _attributes(model: nn.Module, graph: Graph, rewriter: Rewriter) -> dict[str, Any]:
    """What the new graph calls and reads, by name."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        name = str(node.target)
        value = rewriter.modules.get(name) or operator.attrgetter(name)(model)
        if isinstance(value, EmbeddingBagCollection):
            own = [feature for config in value.embedding_bag_configs() for feature in config.feature_names]
            value = RequestBroadcastEBC.from_ebc(value, [name for name in own if name in rewriter.request_features])
        found[name] = value
    return found


def _check_features(model: nn.Module, schema: FeatureSchema) -> None:
    if schema.sequences:
        raise ValueError(
            f"the schema has histories ({schema.sequences[0].name!r}); a model of one row a pair reads bags: declare "
            "them as bags of the request"
        )
    known = {feature.name: feature for feature in (*schema.request_bags, *schema.candidate_bags)}
    collections = [module for module in model.modules() if isinstance(module, EmbeddingBagCollection)]
    if not collections:
        raise ValueError(f"{type(model).__name__} has no EmbeddingBagCollection; there is no look-up to orient")
    for collection in collections:
        for config in collection.embedding_bag_configs():
            for name in config.feature_names:
                if name not in known:
                    raise ValueError(
                        f"table {config.name!r} reads the feature {name!r}, which is no bag of the schema "
                        f"({nearest_name(name, list(known))}); add it, on its side"
                    )
                if known[name].num_embeddings > config.num_embeddings:
                    raise ValueError(
                        f"feature {name!r} has num_embeddings={known[name].num_embeddings} in the schema, and table "
                        f"{config.name!r} {config.num_embeddings} rows; use at most as many"
                    )


def _random_batch(schema: FeatureSchema, counts: Sequence[int], device: torch.device) -> RequestBatch:
    generator = torch.Generator().manual_seed(0)

    def value(feature: Feature) -> Any:
        if feature.kind is Kind.DENSE:
            return torch.randn(feature.width, generator=generator).tolist()
        length = int(torch.randint(1, 1 + (feature.max_length or 3), (), generator=generator))
        ids = torch.randint(feature.num_embeddings, (length,), generator=generator).tolist()
        return (ids, torch.rand(length, generator=generator).tolist()) if feature.weighted else ids

    rows = []
    for request, count in enumerate(counts):
        shared = {f.name: value(f) for f in schema.features if f.side is Side.REQUEST} | {"request_id": request}
        for _ in range(count):
            rows.append(shared | {f.name: value(f) for f in schema.features if f.side is Side.CANDIDATE})
    return batch_from_rows(schema, rows).to(device)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _check_equal(model: nn.Module, after: Sequence[_Run], before: Sequence[_Run]) -> None:
    for new, old in zip(after, before, strict=True):
        try:
            torch.testing.assert_close(new.output, old.output, rtol=_TOLERANCE, atol=_TOLERANCE)
        except AssertionError as error:
            raise ValueError(
                f"the rewritten {type(model).__name__} gives something else than the model, which must treat each row "
                f"by itself: {error}"
            ) from None


def _report(
    rewriter: Rewriter, graph: Graph, batches: Sequence[RequestBatch], before: Sequence[_Run], after: Sequence[_Run]
) -> RequestOrientReport:
    num_requests = batches[0].num_requests
    few, many = (batch.num_candidates for batch in batches)
    now: dict[Node, list[int]] = {}
    for run, place in zip(after, range(2), strict=True):
        for node, flops in run.flops.items():
            if (origin := node.meta.get(ORIGIN)) is not None:
                now.setdefault(origin, [0, 0])[place] += flops
    operators = []
    for node in graph.nodes:
        if node not in rewriter.kinds:
            continue
        kind, reason = rewriter.kinds[node]
        one, other = now.get(node, [0, 0])
        candidate = (other - one) // (many - few)
        request = (one - candidate * few) // num_requests
        operators.append(
            Operator(node.name, module_of(node), kind, reason, before[0].flops[node] // few, request, candidate)
        )
    return RequestOrientReport(tuple(operators))
