"""Publish the newest checkpoint as a snapshot that a server loads.

    torchx run -s local_cwd recipes/publish_component.py:publish --output build/recipe \\
        --artifacts build/recipe/artifacts
    .venv/bin/python -m recipes.publish --output build/recipe --artifacts build/recipe/artifacts

Hardware: 1 CPU core. `--artifacts` may be any URL that fsspec knows. Docs: docs/recipes/publish.md.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

from recipes import movielens_ranker as ranker
from torchrec_adaptive.distributed import process_group
from torchrec_adaptive.models import build_model
from torchrec_adaptive.publishing import Publisher
from torchrec_adaptive.training import Trainer


@dataclass(frozen=True)
class PublishRecipe:
    """What to do.

    Args:
        output: of the train recipe; its checkpoints are read.
        artifacts: where versions go.
        model: name of the model there.
    """

    output: Path
    artifacts: str
    model: str = ranker.MODEL_NAME


def load_trainer(output: Path) -> Trainer:
    """The trainer of the newest checkpoint, within a process group.

    Args:
        output: of the train recipe.

    Raises:
        ValueError: there is no checkpoint.
    """
    schema = ranker.schema()
    trainer = Trainer(
        build_model(schema, ranker.model_config()),
        schema.tasks,
        ranker.online_trainer_config(),
        checkpoint_folder=output / "checkpoints",
        show_progress=False,
    )
    if not trainer.progress.step:
        raise ValueError(f"there is no checkpoint in {output / 'checkpoints'}; run the train recipe with this --output")
    return trainer


def make_publisher(artifacts: str, model: str) -> Publisher:
    """A publisher of the recipes' model."""
    return Publisher(artifacts, model, ranker.schema(), ranker.model_config().to_dict())


def publish(recipe: PublishRecipe) -> int:
    """Load and publish.

    Args:
        recipe: what to do.

    Returns:
        The version published.
    """
    with process_group():
        trainer = load_trainer(recipe.output)
        manifest = make_publisher(recipe.artifacts, recipe.model).publish_snapshot(
            trainer.weights(), step=trainer.progress.step
        )
    print(f"published {recipe.model} version {manifest.version} of step {manifest.step} to {recipe.artifacts}")
    return manifest.version


def main() -> None:
    """Command line."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    parser = argparse.ArgumentParser(description="Publish the newest checkpoint as a snapshot.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--artifacts", required=True)
    parser.add_argument("--model", default=PublishRecipe.model)
    publish(PublishRecipe(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
