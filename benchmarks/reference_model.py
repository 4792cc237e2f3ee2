"""The model that the benchmarks of request-oriented computation share, and random requests for it.

| side | inputs |
| --- | --- |
| request | 64 categorical features, bags of 20 ids; a history of 512 events, an item and an action each |
| candidate | 16 categorical features, bags of 3 ids |

All embeddings have 64 floats. The request's tokens pass a tower of two Wukong Turbo layers and are
compressed to 16; the history passes two self-attention layers; candidates attend to it, and two joint layers follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.models import AdaptiveRankingConfig, AdaptiveRankingModel, build_model
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, RequestFeatures, empty_kjt

EMBEDDING_DIM, TABLE_ROWS = 64, 10_000
NUM_REQUEST_BAGS, REQUEST_BAG_LENGTH = 64, 20
NUM_CANDIDATE_BAGS, CANDIDATE_BAG_LENGTH = 16, 3
NUM_EVENTS = 512

CONFIG = AdaptiveRankingConfig(
    token_dim=EMBEDDING_DIM,
    num_layers=2,
    num_fmb_tokens=16,
    num_lcb_tokens=16,
    rank=16,
    mlp_widths=(1280,),
    head_widths=(256,),
    num_history_heads=2,
    num_encoder_layers=2,
    encoder_dim=160,
    num_encoder_heads=2,
    num_request_layers=2,
    num_request_tokens=16,
    norm="rms",
)


def reference_schema() -> FeatureSchema:
    """Inputs as the table above has them; the history's items read the table of the candidates' first feature."""
    history = [
        Feature.sequence("event_item", TABLE_ROWS, EMBEDDING_DIM, table="item_00"),
        Feature.sequence("event_action", 32, EMBEDDING_DIM),
    ]
    return FeatureSchema((*categorical_features(TABLE_ROWS, EMBEDDING_DIM), *history))


def categorical_features(num_embeddings: int, embedding_dim: int) -> list[Feature]:
    """The bags of both sides, `user_00` on for the request's and `item_00` on for the candidate's.

    Args:
        num_embeddings: of each.
        embedding_dim: of each.

    Returns:
        The request's, then the candidate's.
    """
    return [
        Feature.bag(f"{stem}_{number:02d}", side, num_embeddings, embedding_dim)
        for stem, side, count in (("user", "request", NUM_REQUEST_BAGS), ("item", "candidate", NUM_CANDIDATE_BAGS))
        for number in range(count)
    ]


def reference_model(config: AdaptiveRankingConfig = CONFIG, seed: int = 0) -> AdaptiveRankingModel:
    """The model with random weights, every one of which matters to the logits.

    Args:
        config: sizes.
        seed: of the weights.

    Returns:
        In evaluation mode.
    """
    torch.manual_seed(seed)
    model = build_model(reference_schema(), replace(config, table_init_std=0.2))
    for name, parameter in model.named_parameters():
        if name.endswith(("null_value_HD", "logits.bias")):
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def reference_batch(
    candidates: Sequence[int],
    num_events: int = NUM_EVENTS,
    seed: int = 0,
    schema: FeatureSchema | None = None,
    bag_lengths: tuple[int, int] = (REQUEST_BAG_LENGTH, CANDIDATE_BAG_LENGTH),
) -> RequestBatch:
    """Random requests.

    Args:
        candidates: of each request.
        num_events: of each history.
        seed: of the ids and labels.
        schema: None for `reference_schema`; its dense features are random too.
        bag_lengths: ids of every bag of the request, and of the candidate.

    Returns:
        A valid batch.
    """
    schema = schema or reference_schema()
    generator = torch.Generator().manual_seed(seed)
    num_requests, num_candidates = len(candidates), sum(candidates)

    def bags(features: Sequence[Feature], rows: int, length: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=[feature.name for feature in features],
            values=torch.cat(
                [torch.randint(f.num_embeddings, (rows * length,), generator=generator) for f in features]
            ),
            lengths=torch.full((len(features) * rows,), length, dtype=torch.int32),
            stride=rows,
        )

    features = RequestFeatures(
        bags(schema.request_bags, num_requests, bag_lengths[0]),
        bags(schema.candidate_bags, num_candidates, bag_lengths[1]),
        bags(schema.sequences, num_requests, num_events) if schema.sequences else empty_kjt(num_requests),
        torch.repeat_interleave(torch.arange(num_requests, dtype=torch.int32), torch.tensor(candidates)),
    )
    labels = torch.randint(2, (num_candidates, 1), generator=generator).float()
    request_dense, candidate_dense = (
        torch.randn(rows, width, generator=generator)
        for rows, width in (
            (num_requests, schema.request_dense_width),
            (num_candidates, schema.candidate_dense_width),
        )
    )
    return RequestBatch(features, request_dense, candidate_dense, labels, torch.ones(num_candidates))


def model_flops(model: AdaptiveRankingModel, batch: RequestBatch) -> int:
    """Multiplications and additions of matrix products and attention, counted by PyTorch as they run.

    Args:
        model: any.
        batch: what it scores.

    Returns:
        FLOPs; what norms, activations and look-ups do is not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(batch)
    return counter.get_total_flops()


def side_flops(model: AdaptiveRankingModel, num_events: int = NUM_EVENTS) -> tuple[int, int]:
    """FLOPs of a request and of a candidate: (F_r, F_c), a batch of one request and B candidates costing F_r + B F_c.

    Args:
        model: of this file's schema.
        num_events: of the history.

    Returns:
        (F_r, F_c).
    """
    one, nine = (model_flops(model, reference_batch([count], num_events)) for count in (1, 9))
    candidate = (nine - one) // 8
    return one - candidate, candidate


def scores(model: AdaptiveRankingModel, batch: RequestBatch) -> Tensor:
    """(B,) probabilities of the first task."""
    return model(batch)[:, 0].sigmoid()
