"""What does `request_orient` make of torchrec's own models, against one row a pair?

    python -m benchmarks.request_orient [--quick] [--json FILE]

DLRM and DLRM_DCN with MLPerf's layer sizes: 13 dense features of the candidate, 64 categorical features of the request
and 16 of the candidate, one id each, embeddings of 128; one request with 1,024 candidates. The same model, the same
weights: as it is, on rows expanded outside the clock, and rewritten, on the request. Checked first: outputs are equal.

What the counts allow is the ratio of two sums, of the model as it is and rewritten: counted FLOPs over the machine's
measured rate of matrix products, and counted bytes over its measured copy rate. Bytes are those of each operator's
operands and result, once each; views count nothing. `*_of_allowed` is the speed-up over that ratio.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from benchmarks import harness, measure
from benchmarks.reference_model import categorical_features, reference_batch
from torchrec_adaptive.optimize import request_orient
from torchrec_adaptive.optimize.tracing import trace
from torchrec_adaptive.request import Feature, FeatureSchema

NUM_CANDIDATES, NUM_DENSE, TABLE_ROWS, EMBEDDING_DIM = 1024, 13, 2000, 128
DENSE_ARCH, OVER_ARCH = [512, 256, EMBEDDING_DIM], [1024, 1024, 512, 256, 1]
DCN_LAYERS, DCN_RANK = 3, 512


def make_schema() -> FeatureSchema:
    """Sides as the docstring above has them."""
    counters = Feature.dense("counters", "candidate", NUM_DENSE)
    return FeatureSchema((counters, *categorical_features(TABLE_ROWS, EMBEDDING_DIM)))


def make_models(schema: FeatureSchema) -> dict[str, nn.Module]:
    """torchrec's models with random weights, in evaluation mode."""
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {}
    for name in ("dlrm", "dcn"):
        collection = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"table_{bag.name}",
                    num_embeddings=TABLE_ROWS,
                    embedding_dim=EMBEDDING_DIM,
                    feature_names=[bag.name],
                )
                for bag in (*schema.request_bags, *schema.candidate_bags)
            ]
        )
        if name == "dlrm":
            models[name] = DLRM(collection, NUM_DENSE, DENSE_ARCH, OVER_ARCH).eval()
        else:
            models[name] = DLRM_DCN(collection, NUM_DENSE, DENSE_ARCH, OVER_ARCH, DCN_LAYERS, DCN_RANK).eval()
    return models


class _Traffic(Interpreter):
    """Counts the bytes of operands and results, node by node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.num_bytes = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op not in ("call_module", "call_function", "call_method") or n.target is getattr:
            return result
        operands = _tensors(list(self.fetch_args_kwargs_from_env(n)))
        storages = {tensor.untyped_storage().data_ptr() for tensor in operands}
        results = [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in storages]
        if results:
            self.num_bytes += sum(map(_bytes, results)) + sum(map(_bytes, operands))
            if n.op == "call_module":
                module = self.fetch_attr(str(n.target))
                looks_up = isinstance(module, EmbeddingBagCollection)  # which reads as many rows as it writes
                self.num_bytes += sum(map(_bytes, results if looks_up else module.parameters()))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, KeyedTensor):
        own = [*getattr(value, "_request", {}).values(), *getattr(value, "_candidate", {}).values()]
        return own or [value.values()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def traffic(module: GraphModule, *arguments: Any) -> int:
    """Bytes that a graph's operators read and write.

    Args:
        module: traced.
        arguments: of its forward.

    Returns:
        Bytes.
    """
    counter = _Traffic(module)
    with torch.inference_mode():
        counter.run(*arguments)
    return counter.num_bytes


def run(options: argparse.Namespace) -> dict[str, float]:
    """Measure.

    Args:
        options: as `harness.parse` gave them.

    Returns:
        Figures by name.
    """
    schema = make_schema()
    batch = reference_batch([NUM_CANDIDATES], schema=schema, bag_lengths=(1, 1))
    limits = measure.Machine()
    expanded = (batch.candidate_dense, batch.features.expand())
    figures: dict[str, float] = {}
    for name, model in make_models(schema).items():
        oriented = request_orient(model, schema)
        print(oriented.report)
        with torch.inference_mode():
            diff = float((oriented(batch).sigmoid() - model(*expanded).sigmoid()).abs().max())
        times = measure.interleaved(
            {
                "gemm": limits.gemm,
                f"{name} rewritten": lambda oriented=oriented: oriented(batch),
                f"{name} as it is": lambda model=model: model(*expanded),
                "copy": limits.copy,
            },
            budget_s=6.0 if options.quick else 20.0,
        )
        measure.show(times)
        flops_per_s, bytes_per_s = limits.flops_per_s(times["gemm"]), limits.bytes_per_s(times["copy"])
        flops = oriented.report.flops(1, NUM_CANDIDATES)
        num_bytes = (
            traffic(GraphModule(model, trace(model)), *expanded),
            traffic(oriented, batch),
        )
        before_s, after_s = (f / flops_per_s + b / bytes_per_s for f, b in zip(flops, num_bytes, strict=True))
        speedup = times[f"{name} as it is"].median / times[f"{name} rewritten"].median
        figures |= {
            f"{name}_max_abs_diff": diff,
            f"{name}_latency_ms": times[f"{name} rewritten"].median * 1e3,
            f"{name}_speedup": speedup,
            f"{name}_allowed_speedup": before_s / after_s,
            f"{name}_of_allowed": speedup * after_s / before_s,
            f"{name}_gflop_before": flops[0] / 1e9,
            f"{name}_gflop_after": flops[1] / 1e9,
            f"{name}_mbyte_before": num_bytes[0] / 1e6,
            f"{name}_mbyte_after": num_bytes[1] / 1e6,
            f"{name}_operators_left": len(oriented.report.left),
        }
    return figures


def main() -> None:
    """Command line."""
    options = harness.parse("What does request_orient make of torchrec's DLRM and DLRM_DCN?")
    harness.report("request_orient", run(options), options)


if __name__ == "__main__":
    main()
