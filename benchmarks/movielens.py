"""How well does the ranker rank? MovieLens-100K, random 8:1:1, seeds 0 to 2, RecBole's protocol.

    python -m benchmarks.movielens [--quick] [--json FILE]

Public figure on the same files and protocol: RecBole's LR, test AUC .7765, log loss .5620. Ours learns from the
training ratings in ways that LR does not: as a history that candidates attend over, as three more labels (a rating of
at least 2, 3 and 5), and as means of the ratings given around a candidate's timestamp, before and
after it (the random split has both in its training part; LR reads the timestamp itself).
Valid and test ratings are in no history, in no mean, and are never trained on. What is tested is the average of
the weights after three epochs in a row, chosen on the validation part; the test part is looked at once a seed.
"""

from __future__ import annotations

import argparse
import warnings
from collections import deque

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from torchrec_adaptive.datasets import (
    FixedRequests,
    MovieLens,
    RandomSplitTraining,
    load_movielens,
    movielens_schema,
    random_split,
)
from torchrec_adaptive.distributed import load_full_state_dict, process_group
from torchrec_adaptive.models import AdaptiveRankingConfig, build_model
from torchrec_adaptive.request import FeatureSchema, Kind
from torchrec_adaptive.training import Trainer, TrainerConfig, evaluate

EMBEDDING_DIM = 16
REQUESTS_A_STEP = 20
NUM_EPOCHS = 10
NUM_AVERAGED_EPOCHS = 3


def train_and_test(data: MovieLens, schema: FeatureSchema, seed: int, num_epochs: int) -> dict[str, float]:
    """One seed.

    Args:
        data: all ratings.
        schema: with or without the history.
        seed: of the split, the weights and the order.
        num_epochs: at most; training stops after two without a better validation AUC.

    Returns:
        Test metrics of the average weights with the best validation AUC.
    """
    nearby = any(feature.name == "nearby" for feature in schema.features)
    rows, valid, test = random_split(data, seed, nearby)
    source, valid_batches = (
        RandomSplitTraining(valid.data, rows, seed, requests_a_step=REQUESTS_A_STEP),
        FixedRequests(valid),
    )
    torch.manual_seed(seed)
    model = build_model(schema, AdaptiveRankingConfig(token_dim=EMBEDDING_DIM, num_layers=1, dropout=0.2))
    config = TrainerConfig(
        num_epochs=num_epochs,
        dense_learning_rate=2e-3,
        dense_weight_decay=0.05,
        num_warmup_steps=200,
        final_learning_rate_fraction=0.05,
        table_decay=0.003,
        num_metric_steps=10_000,
        seed=seed,
    )
    trainer = Trainer(model, schema.tasks, config, show_progress=False)
    best, best_epoch, best_weights = -1.0, 0, {}
    recent: deque[dict[str, Tensor]] = deque(maxlen=NUM_AVERAGED_EPOCHS)
    for epoch in range(num_epochs):
        trainer.fit_epoch(source)
        recent.append(trainer.weights())
        average = {name: torch.stack([weights[name] for weights in recent]).mean(0) for name in recent[0]}
        load_full_state_dict(trainer.model, average)
        auc = evaluate(trainer.model, valid_batches, schema.tasks)["liked/auc"]
        load_full_state_dict(trainer.model, recent[-1])
        print(f"seed {seed} epoch {epoch + 1}: validation AUC {auc:.4f}", flush=True)
        if auc > best:
            best, best_epoch, best_weights = auc, epoch, average
        elif epoch - best_epoch >= 2:
            break
    load_full_state_dict(trainer.model, best_weights)
    return evaluate(trainer.model, FixedRequests(test), schema.tasks)


def without_history(schema: FeatureSchema) -> FeatureSchema:
    """The same inputs, all that comes of the user's rated films left out."""
    kept = tuple(f for f in schema.features if f.kind is not Kind.SEQUENCE and f.name != "nearby")
    return FeatureSchema(kept, schema.tasks)


def run(options: argparse.Namespace) -> dict[str, float]:
    """All seeds, with the history and without.

    Args:
        options: `quick` for one seed, one epoch and no ablation.

    Returns:
        Figures.
    """
    data, schema = load_movielens(), movielens_schema(EMBEDDING_DIM, nearby=True)
    seeds, num_epochs = ((0,), 1) if options.quick else ((0, 1, 2), NUM_EPOCHS)
    figures: dict[str, float] = {}
    with process_group():
        rows = [train_and_test(data, schema, seed, num_epochs) for seed in seeds]
        figures["test_auc"] = float(np.mean([row["liked/auc"] for row in rows]))
        figures["test_logloss"] = float(np.mean([row["liked/logloss"] for row in rows]))
        figures["test_ne"] = float(np.mean([row["liked/ne"] for row in rows]))
        figures |= {f"test_auc_seed_{seed}": row["liked/auc"] for seed, row in zip(seeds, rows, strict=True)}
        if not options.quick:
            plain = [train_and_test(data, without_history(schema), seed, num_epochs) for seed in seeds]
            gains = [row["liked/auc"] - other["liked/auc"] for row, other in zip(rows, plain, strict=True)]
            figures["auc_gain_history"] = float(np.mean(gains))
            figures |= {f"auc_gain_history_seed_{seed}": gain for seed, gain in zip(seeds, gains, strict=True)}
    return figures


def main() -> None:
    """Command line."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)  # the batches are small: a second thread costs more than it brings
    options = harness.parse("How well does the ranker rank MovieLens-100K?")
    harness.report("movielens", run(options), options)


if __name__ == "__main__":
    main()
