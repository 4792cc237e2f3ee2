"""What does an LLM-scale ranker cost a request? 512 candidates, a history of 1,024 events, float32 on a CPU.

    python -m benchmarks.llm_scale [--quick] [--json FILE]

The reference model (benchmarks/reference_model.py) with a wider encoder of the history. A pair of user and candidate
costs F_request + F_candidate as tradition counts it, one row a pair: `effective_gflop_per_candidate`. A request of B
candidates costs F_request + B F_candidate here. Meta's Adaptive Ranking Model is published with O(10 GFLOP) a candidate
at O(100 ms): `mission_latency_ms` is that order of magnitude, not a measurement; `latency_ms` is read beside it.

| figure | against |
| --- | --- |
| latency_over_floor | the larger of FLOPs over the rate of a 2048 x 2048 product and bytes over the rate of a copy |
| speedup_vs_expanded | stock TorchRec on one row a pair, then the same dense layers |

FLOPs are those of matrix products and attention, counted as the request runs; bytes are the weights of dense layers,
once, and an embedding row for every id of the request, once. The rates are measured in between. One row a pair takes
the better part of a minute, so that it is measured on 16 of the 512 pairs, 8 at a time, and multiplied by 32: it is
extrapolated from a sample. Checked first: scores of the sampled pairs are equal.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import harness, measure
from benchmarks.reference_model import (
    CONFIG,
    EMBEDDING_DIM,
    model_flops,
    reference_batch,
    reference_model,
    scores,
    side_flops,
)
from benchmarks.reference_peers import Expanded
from torchrec_adaptive.models import AdaptiveRankingModel
from torchrec_adaptive.request import RequestBatch

NUM_CANDIDATES, NUM_EVENTS = 512, 1024
NUM_SAMPLED, CHUNK = 16, 8  # pairs; chunks of 1 to 16 are equally fast on the machine of docs/benchmarks
LLM_SCALE = replace(CONFIG, encoder_dim=384, num_encoder_heads=4)
MISSION_LATENCY_MS = 100.0


def counted_bytes(model: AdaptiveRankingModel, batch: RequestBatch) -> int:
    """Weights of dense layers and embedding rows, each read once.

    Args:
        model: of float32 weights.
        batch: what it scores.

    Returns:
        Bytes; activations are not counted.
    """
    tables = sum(table.numel() for table in model.embeddings.parameters())
    dense = sum(parameter.numel() for parameter in model.parameters()) - tables
    features = batch.features
    ids = sum(side.values().numel() for side in (features.request, features.candidate, features.history))
    return 4 * (dense + ids * EMBEDDING_DIM)


def run(options: argparse.Namespace) -> dict[str, float]:
    """Measure.

    Args:
        options: as `harness.parse` gave them.

    Returns:
        Figures by name.
    """
    model, batch = reference_model(LLM_SCALE), reference_batch([NUM_CANDIDATES], NUM_EVENTS)
    expanded, limits = Expanded(model), measure.Machine()
    chunks = expanded.rows(batch, CHUNK)
    every = NUM_CANDIDATES // NUM_SAMPLED
    sample = chunks[::every]
    pairs = torch.arange(NUM_CANDIDATES).view(len(chunks), CHUNK)[::every].flatten()

    def ours() -> Tensor:
        return scores(model, batch)

    with torch.inference_mode():
        own, theirs = ours()[pairs], expanded(sample)
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)
    times = measure.interleaved(
        {"gemm": limits.gemm, "copy": limits.copy, "ours": ours, "expanded, 16 pairs": lambda: expanded(sample)},
        budget_s=12.0 if options.quick else 120.0,
    )
    measure.show(times)
    expanded_s = times["expanded, 16 pairs"].median * NUM_CANDIDATES / NUM_SAMPLED
    print(
        f"expanded: {expanded_s:.1f} s for {NUM_CANDIDATES} pairs, extrapolated from a sample of {NUM_SAMPLED} pairs "
        "that were measured"
    )
    flops_per_s, bytes_per_s = limits.flops_per_s(times["gemm"]), limits.bytes_per_s(times["copy"])
    floor_s = max(model_flops(model, batch) / flops_per_s, counted_bytes(model, batch) / bytes_per_s)
    for_request, for_candidate = side_flops(model, NUM_EVENTS)
    took_s = times["ours"].median
    return {
        "max_abs_diff": float((own - theirs).abs().max()),
        "effective_gflop_per_candidate": (for_request + for_candidate) / 1e9,
        "latency_ms": took_s * 1e3,
        "mission_latency_ms": MISSION_LATENCY_MS,
        "latency_over_floor": took_s / floor_s,
        "speedup_vs_expanded": expanded_s / took_s,
        "request_gflop": for_request / 1e9,
        "candidate_mflop": for_candidate / 1e6,
        "gemm_gflop_per_s": flops_per_s / 1e9,
        "copy_gb_per_s": bytes_per_s / 1e9,
    }


def main() -> None:
    """Command line."""
    options = harness.parse("What does an LLM-scale ranker cost a request?")
    harness.report("llm_scale", run(options), options)


if __name__ == "__main__":
    main()
