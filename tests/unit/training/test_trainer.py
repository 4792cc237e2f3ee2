"""The loop: it learns, stops, reports, calls back, and several ranks measure what one measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.training.test_resume import SCHEMA, Source, in_this_process
from torchrec_adaptive.models import AdaptiveRankingConfig, build_model
from torchrec_adaptive.request import RequestBatch
from torchrec_adaptive.testing.gloo import run_ranks
from torchrec_adaptive.training import Trainer, TrainerConfig, evaluate

CONFIG = TrainerConfig(num_epochs=4, num_warmup_steps=5, dense_learning_rate=5e-3, num_metric_steps=6)


class Learnable(Source):
    """Even items are liked."""

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> RequestBatch:
        batch = super().batch(epoch, step, rank, world_size)
        batch.labels = (batch.features.candidate["item"].values() % 2 == 0).float().unsqueeze(1)
        return batch


def make(config: TrainerConfig, **options: object) -> Trainer:
    torch.manual_seed(0)
    model = build_model(SCHEMA, AdaptiveRankingConfig(token_dim=8))
    return Trainer(model, SCHEMA.tasks, config, show_progress=False, **options)  # type: ignore[arg-type]


def learn(rank: int, world_size: int, folder: Path) -> tuple[list[dict[str, float]], int, int]:
    seen: list[tuple[int, int]] = []
    trainer = make(
        CONFIG, tensorboard_folder=folder, on_step=lambda step, batch: seen.append((step, batch.num_candidates))
    )
    untrained = evaluate(trainer.model, Learnable(), SCHEMA.tasks)
    history = [untrained, *trainer.fit(Learnable(), Learnable())]
    assert [step for step, _ in seen] == list(range(1, 49))
    return history, sum(count for _, count in seen), trainer.progress.num_examples


def test_it_learns_reports_and_calls_back(tmp_path: Path) -> None:
    history, counted, num_examples = in_this_process(learn, tmp_path)
    assert len(history) == 1 + 4
    assert history[-1]["auc"] > 0.95
    assert history[-1]["logloss"] < history[0]["logloss"]
    assert counted == num_examples
    scalars = EventAccumulator(str(tmp_path))
    scalars.Reload()
    assert {"validation/auc", "validation/ne", "train/ne", "train/calibration", "train/examples_per_s"} <= set(
        scalars.Tags()["scalars"]
    )
    assert [event.step for event in scalars.Scalars("train/ne")] == list(range(6, 49, 6))
    assert scalars.Scalars("validation/auc")[-1].value == pytest.approx(history[-1]["auc"], abs=1e-6)


def test_two_ranks_learn_and_measure_what_one_does(tmp_path: Path) -> None:
    alone, _, num_examples = in_this_process(learn, tmp_path / "one")
    first, second = run_ranks(learn, 2, tmp_path / "two")
    assert first[0] == second[0]
    assert first[2] == second[2] == num_examples == first[1] + second[1]
    assert first[0][0] == pytest.approx(alone[0], abs=1e-6)  # the same weights: the same measure
    for one, two in zip(alone, first[0], strict=True):
        assert two == pytest.approx(one, abs=2e-3)


class Elsewhere(Source):
    """Random labels that training does not see."""

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> RequestBatch:
        return super().batch(epoch + 1000, step, rank, world_size)


def stop_early(rank: int, world_size: int, folder: Path) -> tuple[list[float], int, int]:
    config = replace(CONFIG, num_epochs=30, patience_epochs=2)
    trainer = make(config, checkpoint_folder=folder)
    history = trainer.fit(Source(), Elsewhere())
    again = make(config, checkpoint_folder=folder)
    assert again.fit(Source(), Elsewhere()) == []  # it has stopped, and a restart does not change that
    return [row["auc"] for row in history], trainer.progress.best_epoch, again.progress.step


def test_it_stops_when_validation_gets_no_better(tmp_path: Path) -> None:
    aucs, best_epoch, step = in_this_process(stop_early, tmp_path)
    assert len(aucs) < 30
    assert best_epoch == int(np.argmax(aucs)) + 1 == len(aucs) - 2
    assert step == 12 * len(aucs)


def decayed(rank: int, world_size: int, fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
    trainer = make(replace(CONFIG, table_decay=fraction, num_warmup_steps=0))
    name = "embeddings.embedding_bags.user.weight"
    before = trainer.weights()[name]
    batch = Source().batch(0, 0, rank, world_size)
    trainer.train_step(batch)
    untouched = np.setdiff1d(np.arange(20), batch.features.request["user"].values().numpy())
    return before[untouched], trainer.weights()[name][untouched]


def test_tables_decay_as_a_whole() -> None:
    before, after = in_this_process(decayed, 0.25)
    assert before.shape[0] > 5
    torch.testing.assert_close(after, before * 0.75)
    before, after = in_this_process(decayed, 0.0)
    assert torch.equal(before, after)


def save_twice(rank: int, world_size: int, folder: Path) -> tuple[int, int, int]:
    trainer = make(
        replace(CONFIG, num_epochs=1, num_checkpoint_steps=12, num_checkpoints_kept=1), checkpoint_folder=folder
    )
    trainer.fit(Source())
    files = {path: path.stat().st_mtime_ns for path in folder.glob("step-*/*.distcp")}
    trainer.save()
    assert {path: path.stat().st_mtime_ns for path in folder.glob("step-*/*.distcp")} == files
    again = make(CONFIG, checkpoint_folder=folder)
    return len(files), again.progress.epoch, again.progress.step_in_epoch


def test_a_step_that_is_saved_twice_keeps_its_tensors(tmp_path: Path) -> None:
    assert in_this_process(save_twice, tmp_path) == (1, 1, 0)
