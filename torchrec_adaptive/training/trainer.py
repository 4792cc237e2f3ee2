"""The training loop: one process or several, resumable at any step.

Tables are trained by row-wise Adagrad, fused into the backward pass; the dense part by Adam, with warm-up and clipping
by the global norm. The loss is the weighted mean over all candidates of a step on all ranks, so that the number of
ranks changes no result beyond the order of additions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizerWrapper
from tqdm import tqdm

from torchrec_adaptive.distributed import SparseOptimizerConfig, full_state_dict, shard_model
from torchrec_adaptive.models import RankingTask
from torchrec_adaptive.request import RequestBatch
from torchrec_adaptive.training.checkpoint import CheckpointFolder, Progress
from torchrec_adaptive.training.evaluation import StreamingMetrics, evaluate, metric_key
from torchrec_adaptive.training.source import BatchSource


@dataclass(frozen=True)
class TrainerConfig:
    """How to train.

    Args:
        num_epochs: passes over the source.
        dense_learning_rate: of Adam, after the warm-up.
        dense_weight_decay: of Adam, decoupled.
        num_warmup_steps: steps in which the dense learning rate rises from 0.
        final_learning_rate_fraction: what both learning rates fall to, linearly, at the end; 1 keeps them.
        max_gradient_norm: global norm that the dense gradients are clipped to; 0 for no clipping.
        sparse: optimizer of the tables.
        table_decay: what every row of every table loses of itself a step, at the full learning rate. It touches all
            rows, which a delta of touched rows would not carry: for training before the first snapshot only.
        embedding_l2: weight of the squared length of the embeddings of each candidate, added to its loss.
        num_checkpoint_steps: steps between checkpoints; 0 for one an epoch, where a folder is given.
        num_checkpoints_kept: the newest ones.
        num_metric_steps: steps between two rows of the progress bar and of TensorBoard.
        patience_epochs: epochs without a better validation AUC (first task's) after which training stops; 0: never.
        seed: of dropout.
    """

    num_epochs: int = 1
    dense_learning_rate: float = 1e-3
    dense_weight_decay: float = 0.0
    num_warmup_steps: int = 100
    final_learning_rate_fraction: float = 1.0
    max_gradient_norm: float = 1.0
    sparse: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    table_decay: float = 0.0
    embedding_l2: float = 0.0
    num_checkpoint_steps: int = 0
    num_checkpoints_kept: int = 2
    num_metric_steps: int = 20
    patience_epochs: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_epochs", "num_metric_steps", "num_checkpoints_kept"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in ("dense_learning_rate", "final_learning_rate_fraction"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")


class Trainer:
    """Trains a ranking model over the ranks of the default process group.

    Args:
        model: unsharded, the same on every rank; `forward(RequestBatch)` gives (B, T) logits.
        tasks: names of the T tasks.
        config: how to train.
        checkpoint_folder: where checkpoints go; None for none. Training resumes from the newest whole one there.
        tensorboard_folder: where scalars go; None for none.
        on_step: called after each step with the step's number and this rank's batch.
        show_progress: whether rank 0 shows a bar.

    Raises:
        ValueError: no process group is initialised.
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: tuple[str, ...],
        config: TrainerConfig,
        checkpoint_folder: Path | str | None = None,
        tensorboard_folder: Path | str | None = None,
        on_step: Callable[[int, RequestBatch], None] | None = None,
        show_progress: bool = True,
    ) -> None:
        self.config, self.tasks, self.on_step = config, tasks, on_step
        self.sharded = shard_model(RankingTask(model, config.embedding_l2), optimizer=config.sparse)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        dense = {n: p for n, p in self.sharded.named_parameters() if "embedding_bags." not in n}
        self.dense_parameters = list(dense.values())
        self.dense_optimizer = KeyedOptimizerWrapper(dense, self._adam)  # pyrefly: ignore[bad-argument-type]
        self.sparse_optimizer = self.sharded.fused_optimizer
        self.progress = Progress()
        self.show_progress = show_progress and self.rank == 0
        self.checkpoints = None if checkpoint_folder is None else CheckpointFolder(Path(checkpoint_folder))
        if self.checkpoints is not None:
            self._resume(self.checkpoints)
        self._writer = _tensorboard_writer(tensorboard_folder) if self.rank == 0 else None

    def _resume(self, checkpoints: CheckpointFolder) -> None:
        if checkpoints.newest() is None:
            return
        self.dense_optimizer.init_state()  # tensors to load into; it counts as a step, which loading overwrites
        self.progress = checkpoints.load_newest(self._state()) or self.progress

    def _adam(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.AdamW(parameters, lr=config.dense_learning_rate, weight_decay=config.dense_weight_decay)

    @property
    def model(self) -> nn.Module:
        """The model that scores, its tables sharded."""
        return self.sharded.module.model  # pyrefly: ignore[bad-return]

    def fit(self, source: BatchSource, validation: BatchSource | None = None) -> list[dict[str, float]]:
        """Train from where the progress stands to the last epoch.

        Args:
            source: of the training batches.
            validation: evaluated after each epoch, and what `patience_epochs` looks at.

        Returns:
            A row of validation metrics an epoch; empty without validation.
        """
        history: list[dict[str, float]] = []
        config = self.config
        num_steps = self._num_steps(source)
        while self.progress.epoch < config.num_epochs and not self._out_of_patience():
            self._train_epoch(source, num_steps)
            if validation is not None:
                history.append(evaluate(self.model, validation, self.tasks))
                self._judge(history[-1])
            if self.checkpoints is not None:
                self.save()
        return history

    def fit_epoch(self, source: BatchSource) -> None:
        """Train to the end of the epoch that is under way, for loops that decide between epochs.

        Args:
            source: of the training batches.
        """
        self._train_epoch(source, self._num_steps(source))

    def _num_steps(self, source: BatchSource) -> int:
        return sum(source.num_steps(epoch) for epoch in range(self.config.num_epochs))

    def _train_epoch(self, source: BatchSource, num_steps: int) -> None:
        progress, metrics = self.progress, StreamingMetrics(self.tasks)
        steps = range(progress.step_in_epoch, source.num_steps(progress.epoch))
        for step in self._bar(steps):
            batch = source.batch(progress.epoch, step, self.rank, self.world_size)
            self.train_step(batch, self._schedule(num_steps), metrics)
            progress.step_in_epoch = step + 1
            every = self.config.num_checkpoint_steps
            if self.checkpoints is not None and every and progress.step % every == 0:
                self.save()
            if progress.step % self.config.num_metric_steps == 0:
                self._report(metrics)
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0

    def train_step(
        self, batch: RequestBatch, learning_rate_fraction: float = 1.0, metrics: StreamingMetrics | None = None
    ) -> float:
        """One optimizer step; collective.

        Args:
            batch: this rank's part.
            learning_rate_fraction: what the configured learning rates are multiplied by.
            metrics: updated with this rank's predictions.

        Returns:
            The mean loss over all ranks' candidates.
        """
        config, progress = self.config, self.progress
        torch.manual_seed(config.seed + 1_000_003 * progress.step + self.rank)  # dropout: the same after a resume
        warmup = min(1.0, (progress.step + 1) / config.num_warmup_steps) if config.num_warmup_steps else 1.0
        _set_learning_rate(self.dense_optimizer, config.dense_learning_rate * learning_rate_fraction * warmup)
        _set_learning_rate(self.sparse_optimizer, config.sparse.learning_rate * learning_rate_fraction)
        self.sparse_optimizer.zero_grad()  # hands the learning rate to the kernels
        self.sharded.train()
        self.dense_optimizer.zero_grad()
        loss, (_, logits, labels, weights) = self.sharded(batch)
        share, total = self._share_of_loss(loss.detach(), weights)
        (loss * share).backward()
        if config.max_gradient_norm:
            nn.utils.clip_grad_norm_(self.dense_parameters, config.max_gradient_norm)
        self.dense_optimizer.step()
        if config.table_decay:
            self._decay_tables(config.table_decay * learning_rate_fraction)
        progress.step += 1
        progress.num_examples += int(total[2])
        if metrics is not None:
            metrics.update(logits, labels, weights)
        if self.on_step is not None:
            self.on_step(progress.step, batch)
        return float(total[0] / total[1])

    @cached_property
    def _table_shards(self) -> list[Tensor]:
        """This rank's shards: the tables' own memory."""
        tables = [value for value in self.sharded.state_dict().values() if isinstance(value, ShardedTensor)]
        return [shard.tensor for table in tables for shard in table.local_shards()]

    @torch.no_grad()
    def _decay_tables(self, fraction: float) -> None:
        for rows in self._table_shards:
            rows.mul_(1.0 - fraction)

    def _share_of_loss(self, loss: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share, scaled so that the average over ranks is the mean over all candidates."""
        own = weights.sum()
        total = torch.stack([loss * own, own, torch.tensor(float(weights.shape[0]))])
        if self.world_size > 1:
            dist.all_reduce(total)
        return own * self.world_size / total[1].clamp(min=torch.finfo(torch.float32).tiny), total

    def _schedule(self, num_steps: int) -> float:
        final = self.config.final_learning_rate_fraction
        return 1.0 - (1.0 - final) * min(1.0, self.progress.step / max(1, num_steps))

    def weights(self) -> dict[str, Tensor]:
        """The model's weights, whole, under the unsharded model's names; collective.

        Returns:
            Name to CPU tensor; on ranks other than 0 sharded tables are left out.
        """
        return {name.removeprefix("model."): value for name, value in full_state_dict(self.sharded).items()}

    def save(self) -> None:
        """Write a checkpoint; collective.

        Raises:
            ValueError: the trainer has no checkpoint folder.
        """
        if self.checkpoints is None:
            raise ValueError("the trainer has no checkpoint_folder; pass one to the constructor")
        self.checkpoints.save(self._state(), self.progress, self.config.num_checkpoints_kept)

    def _state(self) -> dict[str, object]:
        return {
            "model": self.sharded.state_dict(),
            "dense_optimizer": self.dense_optimizer.state_dict(),
            "sparse_optimizer": self.sparse_optimizer.state_dict(),
        }

    def _judge(self, row: dict[str, float]) -> None:
        progress = self.progress
        auc = row[metric_key(self.tasks, self.tasks[0], "auc")]
        if auc > progress.best_auc:
            progress.best_auc, progress.best_epoch = auc, progress.epoch
        if self.show_progress:
            tqdm.write(f"epoch {progress.epoch}: " + "  ".join(f"{k} {v:.4f}" for k, v in row.items()))
        self._write("validation", row)

    def _out_of_patience(self) -> bool:
        patience, progress = self.config.patience_epochs, self.progress
        return bool(patience) and progress.epoch - progress.best_epoch >= patience and not math.isinf(progress.best_auc)

    def _bar(self, steps: range) -> Iterator[int]:
        total = steps.stop
        self._reported = (time.monotonic(), self.progress.num_examples)
        self._shown = tqdm(
            steps, initial=steps.start, total=total, unit="step", disable=not self.show_progress, leave=False
        )
        yield from self._shown

    def _report(self, metrics: StreamingMetrics) -> None:
        row = metrics.compute()
        now = time.monotonic()
        rate = (self.progress.num_examples - self._reported[1]) / max(1e-9, now - self._reported[0])
        self._reported = (now, self.progress.num_examples)
        if self.show_progress:
            self._shown.set_postfix({k: f"{v:.4f}" for k, v in row.items()} | {"examples/s": f"{rate:.0f}"})
        self._write("train", row | {"examples_per_s": rate})

    def _write(self, group: str, row: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in row.items():
                self._writer.add_scalar(f"{group}/{name}", value, self.progress.step)  # pyrefly: ignore
            self._writer.flush()  # pyrefly: ignore


def _set_learning_rate(optimizer: object, value: float) -> None:
    for group in optimizer.param_groups:  # pyrefly: ignore[missing-attribute]
        group["lr"] = value


def _tensorboard_writer(folder: Path | str | None) -> object | None:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "tensorboard_folder is set, but tensorboard is not installed: pip install tensorboard"
        ) from None
    return SummaryWriter(str(folder))
