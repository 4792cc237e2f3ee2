"""What does a request cost, and how does it grow with candidates, against one row for every pair?

    python -m benchmarks.request_scoring [--quick] [--json FILE] [--plot FILE]

The reference model (benchmarks/reference_model.py) scores the same requests three ways, with the same weights:

| name | what it is |
| --- | --- |
| ours | one look-up, one encoding of the history and one tower a request, broadcast into the first joint layer |
| expanded | stock TorchRec on one row a pair, then the same dense layers |
| tiled | embeddings once a request, copied for each candidate, then the same dense layers |

Checked first: scores are equal, on all pairs. The peers' inputs are prepared outside the clock. `mfu` is the model's
FLOPs (matrix products and attention, counted as they run) over the time and over the machine's own rate for a square
float32 product, measured in between.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness, measure
from benchmarks.reference_model import model_flops, reference_batch, reference_model, scores, side_flops
from benchmarks.reference_peers import Expanded, Tiled
from torchrec_adaptive.models import AdaptiveRankingModel
from torchrec_adaptive.request import RequestBatch

ONE, MANY = (1024,), (64,) * 16
GROWTH = tuple(2**power for power in range(14))


def run(options: argparse.Namespace) -> dict[str, float]:
    """Measure.

    Args:
        options: as `harness.parse` gave them.

    Returns:
        Figures by name.
    """
    model = reference_model()
    expanded, tiled, limits = Expanded(model), Tiled(model), measure.Machine()
    batches = {"ours": ONE, "ours 16x64": MANY, "ours 64": (64,), "ours 4096": (4096,)}
    inputs = {name: reference_batch(counts) for name, counts in batches.items()}
    rows, rows_many = expanded.rows(inputs["ours"]), expanded.rows(inputs["ours 16x64"])
    results: dict[str, Tensor] = {}

    def keep(name: str, result: Tensor) -> None:
        results[name] = result

    def ours(name: str, batch: RequestBatch) -> None:
        keep(name, scores(model, batch))

    fast = {name: lambda name=name, batch=batch: ours(name, batch) for name, batch in inputs.items()}
    slow = {
        "expanded": lambda: keep("expanded", expanded(rows)),
        "tiled": lambda: keep("tiled", tiled(inputs["ours"])),
        "expanded 16x64": lambda: keep("expanded 16x64", expanded(rows_many)),
    }
    _check_equal(expanded, tiled, model)
    times = measure.interleaved_with_slow(
        fast | {"gemm": limits.gemm}, slow, rounds=1 if options.quick else 3, fast_calls=4 if options.quick else 8
    )
    measure.show(times)
    diffs = [
        float((results[name] - results[peer]).abs().max())
        for name, peer in (("ours", "expanded"), ("ours", "tiled"), ("ours 16x64", "expanded 16x64"))
    ]
    flops_per_s, took = limits.flops_per_s(times["gemm"]), {name: t.median for name, t in times.items()}
    for_request, for_candidate = side_flops(model)
    figures = {
        "max_abs_diff": max(diffs),
        "latency_ms": took["ours"] * 1e3,
        "speedup_vs_expanded": took["expanded"] / took["ours"],
        "speedup_vs_tiled": took["tiled"] / took["ours"],
        "cost_ratio_4096_over_64": took["ours 4096"] / took["ours 64"],
        "speedup_vs_expanded_16x64": took["expanded 16x64"] / took["ours 16x64"],
        "mfu": model_flops(model, inputs["ours"]) / took["ours"] / flops_per_s,
        "gemm_gflop_per_s": flops_per_s / 1e9,
        "request_mflop": for_request / 1e6,
        "candidate_mflop": for_candidate / 1e6,
    }
    if not options.quick:
        growth = _growth(model)
        figures |= {f"latency_ms_{count}": seconds * 1e3 for count, seconds in growth.items()}
        if options.plot is not None:
            draw(growth, took["expanded"] / ONE[0], options.plot)
    return figures


def _check_equal(expanded: Expanded, tiled: Tiled, model: AdaptiveRankingModel) -> None:
    """A few pairs, which also warms the peers up; the timed runs are compared in full."""
    batch = reference_batch([40, 24], seed=1)
    with torch.inference_mode():
        own = scores(model, batch)
        torch.testing.assert_close(own, expanded(expanded.rows(batch)), rtol=0, atol=1e-5)
        torch.testing.assert_close(own, tiled(batch), rtol=0, atol=1e-5)


def _growth(model: AdaptiveRankingModel) -> dict[int, float]:
    """Seconds of one request by its number of candidates."""
    batches = {count: reference_batch([count]) for count in GROWTH}
    functions = {str(count): lambda batch=batch: scores(model, batch) for count, batch in batches.items()}
    times = measure.interleaved(functions, budget_s=60.0)
    measure.show(times)
    return {count: times[str(count)].median for count in GROWTH}


def draw(growth: dict[int, float], expanded_s: float, path: Path) -> None:
    """Milliseconds a request over its candidates, ours and one row for every pair.

    Args:
        growth: candidates to seconds.
        expanded_s: seconds of an expanded pair.
        path: of the drawing.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    counts = list(growth)
    axes.loglog(counts, [growth[count] * 1e3 for count in counts], "o-", label="request-oriented, measured")
    axes.loglog(
        counts, [expanded_s * count * 1e3 for count in counts], "--", label="a row a pair, from 1,024 measured pairs"
    )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("candidates of the request")
    axes.set_ylabel("latency, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Command line."""
    options = harness.parse("What does a request cost against one row for every pair?", plot=True)
    harness.report("request_scoring", run(options), options)


if __name__ == "__main__":
    main()
