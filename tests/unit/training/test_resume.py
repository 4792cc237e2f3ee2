"""Killed in the middle of an epoch and resumed: final weights equal an unbroken run's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_adaptive.distributed import full_state_dict, process_group
from torchrec_adaptive.models import AdaptiveRankingConfig, build_model
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, batch_from_rows
from torchrec_adaptive.testing.gloo import run_ranks
from torchrec_adaptive.training import Trainer, TrainerConfig

SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 20, 8),
        Feature.bag("item", "candidate", 30, 8, table="items_table"),
        Feature.sequence("seen", 30, 8, table="items_table"),
    )
)
NUM_STEPS, NUM_EPOCHS = 12, 3


class Source:
    """8 requests a step, of 1 to 3 candidates; the ranks take equal shares of the requests, not of the candidates."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def num_steps(self, epoch: int) -> int:
        return NUM_STEPS

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> RequestBatch:
        time.sleep(self.pause_s)
        random = np.random.default_rng((epoch, step))
        rows: list[dict] = []
        for request in range(8):
            shared = {
                "request_id": request,
                "user": int(random.integers(20)),
                "seen": random.integers(0, 30, 3).tolist(),
            }
            for _ in range(int(random.integers(1, 4))):
                rows.append(shared | {"item": int(random.integers(30)), "labels": {"label": float(random.integers(2))}})
        share = 8 // world_size
        return batch_from_rows(SCHEMA, [row for row in rows if row["request_id"] // share == rank])


def make_trainer(folder: Path | None, dropout: float, every: int = 5) -> Trainer:
    torch.manual_seed(0)
    model = build_model(SCHEMA, AdaptiveRankingConfig(token_dim=8, dropout=dropout))
    config = TrainerConfig(
        num_epochs=NUM_EPOCHS, num_warmup_steps=5, num_checkpoint_steps=every, final_learning_rate_fraction=0.5
    )
    return Trainer(model, SCHEMA.tasks, config, checkpoint_folder=folder, show_progress=False)


def train_whole(rank: int, world_size: int, folder: Path | None, dropout: float) -> dict[str, np.ndarray]:
    trainer = make_trainer(folder, dropout)
    started_at = trainer.progress.step
    trainer.fit(Source())
    assert trainer.progress.step == NUM_STEPS * NUM_EPOCHS
    return {name: value.numpy() for name, value in full_state_dict(trainer.sharded).items()} | {
        "started_at": np.array(started_at)
    }


def train_part(rank: int, world_size: int, folder: Path, dropout: float) -> None:
    trainer = make_trainer(folder, dropout)
    for step in range(7):
        trainer.train_step(Source().batch(0, step, rank, world_size), trainer._schedule(NUM_STEPS * NUM_EPOCHS))
        trainer.progress.step_in_epoch = step + 1
    trainer.save()


SLOW_RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from torchrec_adaptive.distributed import process_group
from tests.unit.training.test_resume import Source, make_trainer
with process_group():
    trainer = make_trainer(Path(sys.argv[1]), dropout=0.2)
    print("step", trainer.progress.step, flush=True)
    trainer.fit(Source(pause_s=0.1))
"""


def in_this_process(function, *arguments):
    """As rank 0 of a world of one."""
    with process_group():
        return function(0, 1, *arguments)


def test_killed_in_mid_epoch_and_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    unbroken = in_this_process(train_whole, None, 0.2)
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, str(folder)], cwd=Path(__file__).parents[3])
    deadline = time.monotonic() + 120
    while not list(folder.glob("step-*5")):  # a step of the middle of an epoch
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = in_this_process(train_whole, folder, 0.2)
    assert 0 < resumed.pop("started_at") < NUM_STEPS * NUM_EPOCHS
    unbroken.pop("started_at")
    for name, value in unbroken.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    unbroken = in_this_process(train_whole, None, 0.0)
    if before == 1:
        in_this_process(train_part, tmp_path, 0.0)
        resumed = run_ranks(train_whole, after, tmp_path, 0.0)[0]
    else:
        run_ranks(train_part, before, tmp_path, 0.0)
        resumed = in_this_process(train_whole, tmp_path, 0.0)
    assert resumed.pop("started_at") == 7
    unbroken.pop("started_at")
    for name, value in unbroken.items():
        np.testing.assert_allclose(resumed[name], value, atol=2e-5, err_msg=name)


def resume_another_model(rank: int, world_size: int, folder: Path) -> str:
    torch.manual_seed(0)
    model = build_model(SCHEMA, AdaptiveRankingConfig(token_dim=8, mlp_widths=(32,)))
    try:
        Trainer(model, SCHEMA.tasks, TrainerConfig(), checkpoint_folder=folder, show_progress=False)
    except ValueError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    in_this_process(train_part, tmp_path, 0.0)
    assert "does not fit this model" in in_this_process(resume_another_model, tmp_path)


def keep_last_two(rank: int, world_size: int, folder: Path) -> list[str]:
    (folder / ".writing-step-000000000099").mkdir(parents=True)
    trainer = make_trainer(folder, 0.0, every=4)
    trainer.fit(Source())
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoints_stay_and_a_torn_one_goes(tmp_path: Path) -> None:
    assert in_this_process(keep_last_two, tmp_path) == ["step-000000000032", "step-000000000036"]
