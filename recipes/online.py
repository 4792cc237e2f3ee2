"""Learn from the rest of the timeline as if it came now, and publish a delta after each slice.

    torchx run -s local_cwd recipes/online_component.py:online --output build/recipe --artifacts build/recipe/artifacts
    .venv/bin/python -m recipes.online --output build/recipe --artifacts build/recipe/artifacts

Start the serve recipe beside it: the server takes each delta in place. Hardware: 1 CPU core.
What to expect: docs/recipes/online.md.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes import movielens_ranker as ranker
from recipes.publish import load_trainer, make_publisher
from torchrec_adaptive.artifact import Manifest
from torchrec_adaptive.datasets import FixedRequests, Requests, slice_requests
from torchrec_adaptive.distributed import process_group
from torchrec_adaptive.publishing import Publisher, TouchedRows
from torchrec_adaptive.training import Trainer


@dataclass(frozen=True)
class OnlineRecipe:
    """What to do.

    Args:
        output: of the train recipe; its newest checkpoint is where learning goes on.
        artifacts: where the publish recipe put a snapshot.
        model: name of the model there.
        past_fraction: of the timeline that the train recipe had.
        num_slices: deltas to publish.
        max_slices: stop after so many; 0 for all.
        requests_a_step: of a training step.
        pause_s: between two slices.
    """

    output: Path
    artifacts: str
    model: str = ranker.MODEL_NAME
    past_fraction: float = 0.5
    num_slices: int = 24
    max_slices: int = 0
    requests_a_step: int = 128
    pause_s: float = 0.0


def slices(present: Requests, num_slices: int) -> Iterator[Requests]:
    """The present in equal parts, in order."""
    bounds = [present.num_requests * part // num_slices for part in range(num_slices + 1)]
    for first, last in itertools.pairwise(bounds):
        yield slice_requests(present, first, last)


def learn_and_publish(
    trainer: Trainer, touched: TouchedRows, publisher: Publisher, part: Requests, requests_a_step: int
) -> Manifest:
    """One pass over a slice, then a delta of what it changed.

    Args:
        trainer: of one process.
        touched: empties itself into the delta.
        publisher: of the model.
        part: the slice.
        requests_a_step: of a training step.

    Returns:
        The delta's manifest.
    """
    source = FixedRequests(part, requests_a_step)
    for step in range(source.num_steps()):
        batch = source.batch(0, step)
        trainer.train_step(batch)
        touched.observe(batch)
    trained_at_s = time.time()
    return publisher.publish_delta(trainer.weights(), touched.take(), trainer.progress.step, trained_at_s)


def online(recipe: OnlineRecipe) -> int:
    """Replay, learn, publish.

    Args:
        recipe: what to do.

    Returns:
        The last version published.
    """
    _, present = ranker.past_and_present(recipe.past_fraction)
    publisher = make_publisher(recipe.artifacts, recipe.model)
    version = 0
    with process_group():
        trainer, touched = load_trainer(recipe.output), TouchedRows(ranker.schema())
        for number, part in enumerate(slices(present, recipe.num_slices)):
            if recipe.max_slices and number >= recipe.max_slices:
                break
            manifest = learn_and_publish(trainer, touched, publisher, part, recipe.requests_a_step)
            num_bytes = sum(entry.num_bytes for entry in manifest.files.values())
            version = manifest.version
            print(f"slice {number + 1}: version {version}, {num_bytes} bytes, step {manifest.step}", flush=True)
            time.sleep(recipe.pause_s)
    return version


def main() -> None:
    """Command line."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)  # the batches are small: a second thread costs more than it brings
    parser = argparse.ArgumentParser(description="Learn from the rest of the timeline and publish deltas.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--artifacts", required=True)
    parser.add_argument("--model", default=OnlineRecipe.model)
    parser.add_argument("--past-fraction", type=float, default=OnlineRecipe.past_fraction)
    parser.add_argument("--num-slices", type=int, default=OnlineRecipe.num_slices)
    parser.add_argument("--max-slices", type=int, default=OnlineRecipe.max_slices)
    parser.add_argument("--requests-a-step", type=int, default=OnlineRecipe.requests_a_step)
    parser.add_argument("--pause-s", type=float, default=OnlineRecipe.pause_s)
    online(OnlineRecipe(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
