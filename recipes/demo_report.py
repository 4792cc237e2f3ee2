"""What the demo saw: figures, plots, a page and a table on the terminal."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

COLOURS = {"stale": "#9aa0a6", "reloaded": "#e8a33d", "updated": "#1a73e8"}
NUM_RESAMPLES = 400
Floats = NDArray[np.floating]


@dataclass
class Replay:
    """What was seen, slice by slice.

    Args:
        kinds: of servers.
    """

    kinds: tuple[str, ...]
    scores: dict[str, list[Floats]] = field(init=False)
    labels: list[Floats] = field(default_factory=list)
    users: list[NDArray[np.int64]] = field(default_factory=list)
    staleness_s: list[float] = field(default_factory=list)
    delta_bytes: list[int] = field(default_factory=list)
    snapshot_bytes: int = 0
    reloaded_after: int = -1
    latency_ms: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scores = {kind: [] for kind in self.kinds}


def auc(scores: Floats, labels: Floats, weights: Floats | None = None) -> float:
    """Area under the ROC curve, ties counting half.

    Args:
        scores: (N,).
        labels: (N,) of 0 and 1.
        weights: (N,), by default ones.

    Returns:
        NaN where one class is missing.
    """
    order = np.argsort(scores, kind="stable")
    weight = np.ones(len(scores)) if weights is None else weights
    score, positive, negative = scores[order], (labels * weight)[order], ((1 - labels) * weight)[order]
    group = np.cumsum(np.concatenate([[0], score[1:] != score[:-1]]))
    negatives, positives = np.bincount(group, negative), np.bincount(group, positive)
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else math.nan


def normalised_entropy(scores: Floats, labels: Floats) -> float:
    """Log loss over the entropy of the base rate; below 1 is better than knowing only the rate."""
    probability, rate = np.clip(scores.astype(np.float64), 1e-7, 1 - 1e-7), float(labels.mean())
    logloss = -np.mean(labels * np.log(probability) + (1 - labels) * np.log(1 - probability))
    return float(logloss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))) if 0 < rate < 1 else math.nan


def paired_auc_gain(
    better: Floats, worse: Floats, labels: Floats, users: NDArray[np.int64]
) -> tuple[float, float, float]:
    """The difference of two AUCs on the same candidates, and its 95 % interval.

    A bootstrap over users: a user's candidates are drawn together, since they are not independent.

    Args:
        better: (N,) scores.
        worse: (N,) scores.
        labels: (N,).
        users: (N,).

    Returns:
        The difference, and the 2.5th and 97.5th percentiles of its resamples.
    """
    random = np.random.default_rng(0)
    _, user = np.unique(users, return_inverse=True)
    num_users = int(user.max()) + 1
    gains = []
    for _ in range(NUM_RESAMPLES):
        times_drawn = np.bincount(random.integers(0, num_users, num_users), minlength=num_users)
        weights = times_drawn[user].astype(np.float64)
        gains.append(auc(better, labels, weights) - auc(worse, labels, weights))
    low, high = np.percentile(gains, [2.5, 97.5])
    return auc(better, labels) - auc(worse, labels), float(low), float(high)


def figures_of(replay: Replay) -> dict[str, float]:
    """The figures of report.json.

    Args:
        replay: what was seen.

    Returns:
        Name to number.
    """
    labels, users = np.concatenate(replay.labels), np.concatenate(replay.users)
    whole = {kind: np.concatenate(parts) for kind, parts in replay.scores.items()}
    figures = {f"auc_{kind}": auc(scores, labels) for kind, scores in whole.items()}
    figures |= {f"ne_{kind}": normalised_entropy(scores, labels) for kind, scores in whole.items()}
    for kind in ("stale", "reloaded"):
        gain, low, high = paired_auc_gain(whole["updated"], whole[kind], labels, users)
        figures |= {f"auc_gain_over_{kind}": gain, f"auc_gain_over_{kind}_low": low, f"auc_gain_over_{kind}_high": high}
    figures |= {
        "staleness_s": float(np.median(replay.staleness_s)),
        "staleness_max_s": max(replay.staleness_s),
        "num_versions": 1.0 + len(replay.staleness_s),
        "num_candidates": float(len(labels)),
        "delta_bytes": float(np.median(replay.delta_bytes)),
        "snapshot_bytes": float(replay.snapshot_bytes),
    }
    figures |= {f"latency_ms_{count}": median for count, (median, _) in replay.latency_ms.items()}
    return figures


def write_report(replay: Replay, output: Path) -> dict[str, float]:
    """Write report.json and report.html, and print a table.

    Args:
        replay: what was seen.
        output: their folder.

    Returns:
        The figures.
    """
    figures = figures_of(replay)
    date = time.strftime("%Y-%m-%d %H:%M")
    (output / "report.json").write_text(json.dumps({"name": "demo", "figures": figures, "date": date}, indent=1))
    plots = [_quality_plot(replay), _latency_plot(replay), _staleness_plot(replay)]
    (output / "report.html").write_text(_page(figures, plots, date))
    print(f"\n{'server':10s} {'AUC':>8s} {'NE':>8s}")
    for kind in replay.kinds:
        print(f"{kind:10s} {figures[f'auc_{kind}']:8.4f} {figures[f'ne_{kind}']:8.4f}")
    print(
        f"\nupdated over stale: AUC {figures['auc_gain_over_stale']:+.4f} "
        f"(95 % interval {figures['auc_gain_over_stale_low']:+.4f} to {figures['auc_gain_over_stale_high']:+.4f})"
        f"\noptimizer step to served: median {figures['staleness_s']:.2f} s over {len(replay.staleness_s)} deltas"
        f"\nreports: {output / 'report.html'} and {output / 'report.json'}"
    )
    return figures


def _quality_plot(replay: Replay) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    numbers = np.arange(1, len(replay.labels) + 1)
    for axis, name, measure in ((axes[0], "AUC", auc), (axes[1], "normalised entropy", normalised_entropy)):
        for kind in replay.kinds:
            values = [
                measure(np.concatenate(replay.scores[kind][:n]), np.concatenate(replay.labels[:n])) for n in numbers
            ]
            axis.plot(numbers, values, color=COLOURS[kind], label=kind, linewidth=2)
        if replay.reloaded_after >= 0:
            axis.axvline(replay.reloaded_after + 1.5, color=COLOURS["reloaded"], linestyle=":", linewidth=1)
        axis.set(xlabel="slices of the timeline replayed", ylabel=f"{name}, all slices so far")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def _latency_plot(replay: Replay) -> Figure:
    figure, axis = plt.subplots(figsize=(5.4, 3.6))
    counts = sorted(replay.latency_ms)
    axis.plot(counts, [replay.latency_ms[c][0] for c in counts], "o-", color=COLOURS["updated"], label="median")
    axis.plot(counts, [replay.latency_ms[c][1] for c in counts], "o:", color=COLOURS["stale"], label="95th percentile")
    axis.set(xscale="log", xlabel="candidates of one request", ylabel="latency over HTTP (ms)", ylim=(0, None))
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.minorticks_off()
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    return figure


def _staleness_plot(replay: Replay) -> Figure:
    figure, axis = plt.subplots(figsize=(5.4, 3.6))
    axis.bar(np.arange(2, len(replay.staleness_s) + 2), replay.staleness_s, color=COLOURS["updated"])
    axis.set(xlabel="version", ylabel="optimizer step to served (s)")
    axis.grid(alpha=0.3, axis="y")
    return figure


def _page(figures: dict[str, float], plots: list[Figure], date: str) -> str:
    images = []
    for plot in plots:
        buffer = io.BytesIO()
        plot.tight_layout()
        plot.savefig(buffer, format="png", dpi=110)
        plt.close(plot)
        images.append(f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">')
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:.5g}</td></tr>" for name, value in figures.items())
    servers = "".join(
        f"<tr><td>{kind}</td><td>{figures[f'auc_{kind}']:.4f}</td><td>{figures[f'ne_{kind}']:.4f}</td></tr>"
        for kind in ("stale", "reloaded", "updated")
    )
    return f"""<!doctype html><html lang="en"><head>
<meta charset="utf-8"><title>torchrec-adaptive: fresh weights</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#202124}}
table{{border-collapse:collapse}}td,th{{padding:.25em .9em;border-bottom:1px solid #ddd;text-align:left}}
img{{max-width:100%}}td:not(:first-child){{font-variant-numeric:tabular-nums}}</style></head><body>
<h1>A ranker that learns while it serves</h1>
<p>MovieLens-100K: trained on the first part of the timeline, then the rest replayed as traffic. Every slice was scored
over HTTP by three servers before anyone had learnt from it; then it was learnt, published as a delta, and taken in
place by the server called <b>updated</b>. <b>reloaded</b> took one new snapshot where the dotted line stands;
<b>stale</b> never changed. {date}.</p>
<table><tr><th>server</th><th>AUC</th><th>normalised entropy</th></tr>{servers}</table>
<p>Updated over stale: AUC {figures["auc_gain_over_stale"]:+.4f}, 95 % interval
{figures["auc_gain_over_stale_low"]:+.4f} to {figures["auc_gain_over_stale_high"]:+.4f} (paired, bootstrap over users).
From the optimizer step to being served: {figures["staleness_s"]:.2f} s in the median.</p>
<h2>Quality along the timeline</h2>{images[0]}
<h2>Latency against candidates, and freshness</h2>{images[1]}{images[2]}
<h2>All figures</h2><table>{rows}</table></body></html>"""
