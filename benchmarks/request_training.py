"""What does training on requests save against training on impressions? 10 impressions a request.

    python -m benchmarks.request_training [--quick] [--json FILE]

The reference model (benchmarks/reference_model.py, no dropout) takes one step on the same 200 candidates, with the same
weights, histories of 200 events:

| name | the step's batch |
| --- | --- |
| requests | 20 requests of 10 candidates each |
| impressions | 200 requests of one candidate each, which carry all that their request says |

A step is forward, weighted binary cross-entropy and backward to every parameter, tables included, whose gradients are
dense in both. The optimizer is left out of the clock: it sees the same gradients either way, and would take the same
time. So is making the batches. Impressions are one batch because smaller ones, whose gradients add up, are no faster.
Checked first: the loss and each parameter's gradient are equal; `max_gradient_diff` is relative to the largest entry
of the parameter's gradient. Sizes are those of benchmarks/request_storage.py.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks import harness, measure
from benchmarks.reference_model import reference_batch, reference_model
from benchmarks.request_storage import CANDIDATES_A_REQUEST, log_of_requests, storage_figures
from torchrec_adaptive.datasets import load_movielens, to_single_impressions
from torchrec_adaptive.models import RankingTask
from torchrec_adaptive.request import RequestBatch

NUM_REQUESTS, NUM_EVENTS = 20, 200
MOST_GRADIENT_DIFF = 1e-4


def step(task: RankingTask, batch: RequestBatch) -> Tensor:
    """Forward and backward, the gradients of an earlier step dropped; also where inference mode is on.

    Args:
        task: whose parameters take the gradients.
        batch: to train on.

    Returns:
        The loss, a scalar, detached.
    """
    with torch.inference_mode(False), torch.enable_grad():
        task.zero_grad()
        loss, _ = task(batch)
        loss.backward()
    return loss.detach()


def gradients(task: RankingTask) -> dict[str, Tensor]:
    """Copies by parameter.

    Args:
        task: after a step.

    Returns:
        Every parameter's.

    Raises:
        ValueError: a parameter has none.
    """
    copies = {}
    for name, parameter in task.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"parameter {name!r} has no gradient")
        copies[name] = parameter.grad.clone()
    return copies


def differences(task: RankingTask, one: RequestBatch, other: RequestBatch) -> tuple[float, float]:
    """How far a step on one batch is from a step on the other.

    Args:
        task: to train.
        one: a batch.
        other: what should give the same step.

    Returns:
        Absolute difference of the losses, and the most that an entry of a gradient differs by, relative to the largest
        entry of the same parameter's.

    Raises:
        AssertionError: a loss or a gradient differs by more than rounding.
    """
    loss, ours = step(task, one), gradients(task)
    other_loss, theirs = step(task, other), gradients(task)
    torch.testing.assert_close(loss, other_loss, rtol=0, atol=1e-5)
    most = 0.0
    for name, expected in theirs.items():
        largest = float(expected.abs().max())
        torch.testing.assert_close(
            ours[name],
            expected,
            rtol=0,
            atol=MOST_GRADIENT_DIFF * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        most = max(most, float((ours[name] - expected).abs().max()) / largest) if largest else most
    return float((loss - other_loss).abs()), most


def run(options: argparse.Namespace) -> dict[str, float]:
    """Steps, then sizes.

    Args:
        options: as `harness.parse` gave them.

    Returns:
        Figures by name.
    """
    task = RankingTask(reference_model().train())
    requests = reference_batch([CANDIDATES_A_REQUEST] * NUM_REQUESTS, NUM_EVENTS)
    impressions = to_single_impressions(requests)
    loss_diff, gradient_diff = differences(task, requests, impressions)
    times = measure.interleaved_with_slow(
        {"requests": lambda: step(task, requests)},
        {"impressions": lambda: step(task, impressions)},
        rounds=3 if options.quick else 10,
    )
    measure.show(times)
    took_s = {name: t.median for name, t in times.items()}
    return {
        "loss_diff": loss_diff,
        "max_gradient_diff": gradient_diff,
        "train_speedup_vs_impressions": took_s["impressions"] / took_s["requests"],
        "requests_ms": took_s["requests"] * 1e3,
        "impressions_ms": took_s["impressions"] * 1e3,
    } | storage_figures(log_of_requests(load_movielens()))


def main() -> None:
    """Command line."""
    options = harness.parse("What does training on requests save against training on impressions?")
    harness.report("request_training", run(options), options)


if __name__ == "__main__":
    main()
