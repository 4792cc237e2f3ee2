import math

import numpy as np
import pytest
import torch

from torchrec_adaptive.models import RankingTask
from torchrec_adaptive.request import Feature, FeatureSchema, batch_from_rows
from torchrec_adaptive.training import StreamingMetrics, TrainerConfig, ranking_metrics


def auc_by_pairs(score: np.ndarray, label: np.ndarray) -> float:
    positive, negative = score[label == 1], score[label == 0]
    difference = positive[:, None] - negative[None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def test_metrics_equal_their_definitions() -> None:
    random = np.random.default_rng(0)
    score, label = random.normal(size=300).round(1), random.integers(0, 2, 300)
    probability = 1 / (1 + np.exp(-score))
    logloss = -np.mean(label * np.log(probability) + (1 - label) * np.log(1 - probability))
    rate = label.mean()
    row = ranking_metrics(
        torch.tensor(score).unsqueeze(1), torch.tensor(label).unsqueeze(1), torch.ones(300), ("click",)
    )
    assert row["auc"] == pytest.approx(auc_by_pairs(score, label), abs=1e-6)
    assert row["logloss"] == pytest.approx(logloss, abs=1e-9)
    assert row["ne"] == pytest.approx(logloss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), abs=1e-9)
    assert row["calibration"] == pytest.approx(probability.mean() / rate, abs=1e-9)


def test_streaming_metrics_agree_with_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(400, 2, generator=generator),
        torch.randint(0, 2, (400, 2), generator=generator).float(),
    )
    metrics = StreamingMetrics(("click", "buy"))
    for part in range(0, 400, 50):
        metrics.update(logits[part : part + 50], labels[part : part + 50], torch.ones(50))
    streamed, exact = metrics.compute(), ranking_metrics(logits, labels, torch.ones(400), ("click", "buy"))
    assert set(streamed) == {f"{task}/{name}" for task in ("click", "buy") for name in ("ne", "auc", "calibration")}
    for name, value in streamed.items():
        assert value == pytest.approx(exact[name], abs=1e-5), name


def test_the_loss_is_the_weighted_mean() -> None:
    schema = FeatureSchema((Feature.dense("x", "candidate"),))
    rows = [
        {"request_id": 0, "x": x, "labels": {"label": y}, "weight": w} for x, y, w in [(1, 1, 1), (-2, 1, 3), (0, 0, 0)]
    ]

    class Identity(torch.nn.Module):
        def forward(self, batch):
            return batch.candidate_dense

    loss, (_, logits, labels, weights) = RankingTask(Identity())(batch_from_rows(schema, rows))
    expected = (math.log1p(math.exp(-1)) + 3 * math.log1p(math.exp(2))) / 4
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert (logits.shape, labels.shape, weights.shape) == ((3, 1), (3, 1), (3,))


@pytest.mark.parametrize(
    "wrong", [{"num_epochs": 0}, {"dense_learning_rate": 0.0}, {"final_learning_rate_fraction": 0.0}]
)
def test_a_wrong_config_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainerConfig(**wrong)
