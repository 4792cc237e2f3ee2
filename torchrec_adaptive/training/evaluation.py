"""Metrics of a ranking model: over a window while it trains, and exactly on a held-out set."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics.functional.classification import binary_auroc
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo

from torchrec_adaptive.training.source import BatchSource

WINDOW_EXAMPLES = 100_000


class StreamingMetrics:
    """Normalised entropy, AUC and calibration over a window, by TorchRec's metric module.

    Args:
        tasks: their names, in the order of the columns of the logits.
    """

    def __init__(self, tasks: tuple[str, ...]) -> None:
        self.tasks = tasks
        infos = [RecTaskInfo(name, f"{name}-label", f"{name}-prediction", f"{name}-weight") for name in tasks]
        definition = RecMetricDef(rec_tasks=infos, window_size=WINDOW_EXAMPLES)
        initialised = dist.is_initialized()
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self.module = generate_metric_module(
            RecMetricModule,
            metrics_config=MetricsConfig(
                rec_tasks=infos,
                rec_metrics={
                    RecMetricEnum.NE: definition,
                    RecMetricEnum.AUC: definition,
                    RecMetricEnum.CALIBRATION: definition,
                },
                compute_on_all_ranks=True,
            ),
            batch_size=1,
            world_size=dist.get_world_size() if initialised else 1,
            my_rank=dist.get_rank() if initialised else 0,
            state_metrics_mapping={},
            device=torch.device("cpu"),
        )

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add a batch; it is counted when `compute` is called next.

        Args:
            logits: (B, T).
            labels: (B, T).
            weights: (B,).
        """
        self._pending.append((logits.detach().cpu(), labels.detach().cpu(), weights.detach().cpu()))

    def _count_pending(self) -> None:
        """TorchRec's AUC copies its window at every update: one update for many batches."""
        logits, labels, weights = (torch.cat(parts).double() for parts in zip(*self._pending, strict=True))
        self._pending.clear()
        if not logits.shape[0]:
            return
        out: dict[str, Tensor] = {}
        for column, task in enumerate(self.tasks):
            out[f"{task}-label"] = labels[:, column]
            out[f"{task}-prediction"] = logits[:, column].sigmoid()
            out[f"{task}-weight"] = weights
        self.module.update(out)

    def compute(self) -> dict[str, float]:
        """The window's metrics, over all ranks; collective.

        Returns:
            "ne", "auc" and "calibration", prefixed by the task's name where there are several.
        """
        if self._pending:
            self._count_pending()
        row = {}
        for key, value in self.module.rec_metrics.compute().items():
            for task in self.tasks:
                for metric in ("ne", "auc", "calibration"):
                    if key == f"{metric}-{task}|window_{metric}":
                        row[metric_key(self.tasks, task, metric)] = float(value)
        return row


@torch.no_grad()
def predict(model: nn.Module, source: BatchSource) -> tuple[Tensor, Tensor, Tensor]:
    """Score a held-out set; collective where the model is sharded.

    Args:
        model: `forward(RequestBatch)` gives (B, T) logits; left in the mode it was in.
        source: of the batches.

    Returns:
        Logits (N, T), labels (N, T) and weights (N,) of all ranks, rank by rank.
    """
    initialised = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if initialised else (0, 1)
    was_training = model.training
    model.eval()
    try:
        rows = []
        for step in range(source.num_steps(0)):
            batch = source.batch(0, step, rank, world_size)
            rows.append(torch.cat([model(batch), batch.labels, batch.weights.unsqueeze(1)], dim=1))
    finally:
        model.train(was_training)
    own = torch.cat(rows)
    everything = _gather_rows(own) if world_size > 1 else own
    num_tasks = (everything.shape[1] - 1) // 2
    return everything[:, :num_tasks], everything[:, num_tasks:-1], everything[:, -1]


def evaluate(model: nn.Module, source: BatchSource, tasks: tuple[str, ...]) -> dict[str, float]:
    """Exact metrics on a held-out set; collective where the model is sharded.

    Args:
        model: `forward(RequestBatch)` gives (B, T) logits.
        source: of the batches.
        tasks: their names.

    Returns:
        As `ranking_metrics`.
    """
    return ranking_metrics(*predict(model, source), tasks)


def ranking_metrics(logits: Tensor, labels: Tensor, weights: Tensor, tasks: tuple[str, ...]) -> dict[str, float]:
    """AUC, log loss, normalised entropy (log loss over the entropy of the base rate) and calibration.

    Args:
        logits: (N, T).
        labels: (N, T).
        weights: (N,); rows of weight 0 are left out of the AUC, the others count equally there.
        tasks: their names.

    Returns:
        "auc", "logloss", "ne" and "calibration", prefixed by the task's name where there are several.
    """
    row = {}
    for column, task in enumerate(tasks):
        score, label = logits[:, column].double(), labels[:, column].double()
        weight = weights.double()
        total = weight.sum().clamp(min=1e-12)
        losses = nn.functional.binary_cross_entropy_with_logits(score, label, reduction="none")
        logloss = float((losses * weight).sum() / total)
        rate = float((label * weight).sum() / total)
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else math.nan
        counted = weight > 0
        row |= {
            metric_key(tasks, task, "auc"): float(binary_auroc(score[counted].sigmoid(), label[counted].int())),
            metric_key(tasks, task, "logloss"): logloss,
            metric_key(tasks, task, "ne"): logloss / entropy,
            metric_key(tasks, task, "calibration"): float((score.sigmoid() * weight).sum() / total) / rate
            if rate
            else math.nan,
        }
    return row


def metric_key(tasks: tuple[str, ...], task: str, metric: str) -> str:
    """The name of a task's metric in a row.

    Args:
        tasks: all of them.
        task: whose metric.
        metric: "auc" for one.

    Returns:
        The metric's own name where there is one task only.

    Example:
        >>> metric_key(("liked",), "liked", "auc"), metric_key(("liked", "bought"), "bought", "auc")
        ('auc', 'bought/auc')
    """
    return metric if len(tasks) == 1 else f"{task}/{metric}"


def _gather_rows(own: Tensor) -> Tensor:
    """Rows of every rank, one rank after the other; ranks may differ in rows."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([own.shape[0]]))
    longest = max(int(count) for count in counts)
    padded = torch.cat([own, own.new_zeros(longest - own.shape[0], own.shape[1])])
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([rows[: int(count)] for rows, count in zip(gathered, counts, strict=True)])
