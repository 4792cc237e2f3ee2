"""Train the MovieLens ranker on the first part of the timeline.

    torchx run -s local_cwd recipes/train_component.py:train --output build/recipe --num_epochs 2
    .venv/bin/python -m recipes.train --output build/recipe --num-epochs 2          (the same, one process)

Hardware: 2 CPU cores, 2 GiB. Stop it at any time: the same command goes on from the newest checkpoint. TensorBoard
scalars are in OUTPUT/tensorboard. What to expect, and when that was last checked: docs/recipes/train.md.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from recipes import movielens_ranker as ranker
from torchrec_adaptive.datasets import FixedRequests, ShuffledRequests, slice_requests
from torchrec_adaptive.distributed import process_group
from torchrec_adaptive.models import build_model
from torchrec_adaptive.training import Trainer, evaluate


@dataclass(frozen=True)
class TrainRecipe:
    """What to do.

    Args:
        output: folder for checkpoints, TensorBoard scalars and metrics.json.
        num_epochs: passes over the past.
        past_fraction: of the timeline.
        num_validation_requests: pages right after the past.
        requests_a_step: over all ranks.
        num_checkpoint_steps: between two checkpoints.
        max_requests: of the past, its last ones; 0 for all (a few make a quick try).
        seed: of weights, order and dropout.
    """

    output: Path
    num_epochs: int = 2
    past_fraction: float = 0.5
    num_validation_requests: int = 2000
    requests_a_step: int = 256
    num_checkpoint_steps: int = 100
    max_requests: int = 0
    seed: int = 0


def train(recipe: TrainRecipe) -> dict[str, float]:
    """Train, save, evaluate.

    Args:
        recipe: what to do.

    Returns:
        Metrics on the pages right after the past.
    """
    past, present = ranker.past_and_present(recipe.past_fraction)
    if recipe.max_requests:
        past = slice_requests(past, max(0, past.num_requests - recipe.max_requests), past.num_requests)
    source = ShuffledRequests(past, recipe.seed, recipe.requests_a_step)
    validation = FixedRequests(slice_requests(present, 0, recipe.num_validation_requests), recipe.requests_a_step)
    with process_group():
        torch.manual_seed(recipe.seed)
        schema = ranker.schema()
        trainer = Trainer(
            build_model(schema, ranker.model_config()),
            schema.tasks,
            ranker.trainer_config(recipe.num_epochs, recipe.num_checkpoint_steps),
            checkpoint_folder=recipe.output / "checkpoints",
            tensorboard_folder=recipe.output / "tensorboard",
        )
        trainer.fit(source, validation)
        metrics = evaluate(trainer.model, validation, schema.tasks)
        if dist.get_rank() == 0:
            (recipe.output / "metrics.json").write_text(json.dumps(metrics, indent=1))
            print("trained:", "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return metrics


def main() -> None:
    """Command line."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)  # the batches are small: a second thread costs more than it brings
    parser = argparse.ArgumentParser(description="Train the MovieLens ranker on the first part of the timeline.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-epochs", type=int, default=TrainRecipe.num_epochs)
    parser.add_argument("--past-fraction", type=float, default=TrainRecipe.past_fraction)
    parser.add_argument("--requests-a-step", type=int, default=TrainRecipe.requests_a_step)
    parser.add_argument("--num-checkpoint-steps", type=int, default=TrainRecipe.num_checkpoint_steps)
    parser.add_argument("--max-requests", type=int, default=TrainRecipe.max_requests)
    parser.add_argument("--seed", type=int, default=TrainRecipe.seed)
    train(TrainRecipe(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
