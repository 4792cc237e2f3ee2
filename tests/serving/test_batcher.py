"""Which calls are scored together, and that joining, refusing and failing touch no other call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest
import torch

from tests.serving.harness import MODEL, make_batch, make_model, make_publisher, probabilities
from torchrec_adaptive.artifact import ArtifactStore
from torchrec_adaptive.request import RequestBatch
from torchrec_adaptive.serving.batcher import BatcherConfig, MicroBatcher, Overloaded, Scored
from torchrec_adaptive.serving.engine import ScoringEngine
from torchrec_adaptive.serving.metrics import ServingMetrics


class GatedEngine(ScoringEngine):
    """The engine itself, whose passes wait for a gate and are written down."""

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(store)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.passes: list[tuple[int, int]] = []
        self.fails_at = -1

    def score(self, batch: RequestBatch) -> tuple[torch.Tensor, int]:
        self.entered.set()
        assert self.gate.wait(30)
        self.passes.append((batch.num_requests, batch.num_candidates))
        if self.fails_at in torch.bincount(batch.candidate_to_request):
            raise ArithmeticError(f"a request of {self.fails_at} candidates can't be scored")
        return super().score(batch)


@pytest.fixture
def engine(tmp_path) -> Iterator[GatedEngine]:
    make_publisher(tmp_path).publish_snapshot(make_model().state_dict(), step=0)
    engine = GatedEngine(ArtifactStore(tmp_path, MODEL))
    yield engine
    engine.gate.set()


def occupy(batcher: MicroBatcher, engine: GatedEngine) -> Future[Scored]:
    """Give the one scorer a call that stays in it until the gate opens."""
    engine.entered.clear()
    first = batcher.submit(make_batch((1,)))
    assert engine.entered.wait(30)
    return first


def answers(futures: list[Future[Scored]]) -> list[Scored]:
    assert not wait(futures, timeout=30).not_done
    return [future.result() for future in futures]


def test_calls_that_queued_are_scored_together_and_each_gets_its_own(engine) -> None:
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=1))
    first = occupy(batcher, engine)
    batches = [make_batch(counts, seed=seed) for seed, counts in enumerate([(3,), (1, 2), (), (40,), (0, 5)])]
    futures = [batcher.submit(batch) for batch in batches]
    engine.gate.set()
    scored = answers([first, *futures])[1:]
    assert engine.passes == [(1, 1), (5, 51)]
    for batch, answer in zip(batches, scored, strict=True):
        torch.testing.assert_close(
            answer.probabilities, torch.from_numpy(probabilities(make_model(), batch)), atol=1e-6, rtol=0
        )
        assert answer.version == 1
    batcher.close()


@pytest.mark.parametrize(
    ("bounds", "passes"),
    [
        ({"max_requests": 3}, [(3, 6), (3, 6)]),
        ({"max_candidates": 5}, [(2, 4), (1, 2), (3, 6)]),
        ({"max_requests": 1}, [(1, 2), (1, 2), (1, 2), (3, 6)]),
        ({}, [(6, 12)]),
    ],
)
def test_bounds_end_a_pass_and_no_call_is_split(engine, bounds: dict[str, int], passes: list[tuple[int, int]]) -> None:
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=1, **bounds))
    futures = [occupy(batcher, engine)]
    futures += [batcher.submit(make_batch(counts)) for counts in [(2,), (2,), (2,), (2, 2, 2)]]
    engine.gate.set()
    answers(futures)
    assert engine.passes[1:] == passes
    batcher.close()


def test_calls_of_unlike_sizes_are_not_padded_to_each_other(engine) -> None:
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=1, max_wasted_cells=0))
    futures = [occupy(batcher, engine)]
    futures += [batcher.submit(make_batch((count,), seed=3)) for count in (4, 4, 50)]
    engine.gate.set()
    answers(futures)
    assert engine.passes[1:] == [(2, 8), (1, 50)]
    batcher.close()


def test_a_free_scorer_waits_as_long_as_it_may(engine) -> None:
    engine.gate.set()
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=1, max_wait_ms=20_000, max_requests=2))
    first = batcher.submit(make_batch((2,)))
    time.sleep(0.05)
    assert not first.done()
    answers([first, batcher.submit(make_batch((3,)))])
    assert engine.passes == [(2, 5)]
    lone = batcher.submit(make_batch((4,)))
    batcher.close()
    assert answers([lone])[0].probabilities.shape == (4, 2)

    patient = MicroBatcher(engine, BatcherConfig(num_scorers=1, max_wait_ms=50))
    assert answers([patient.submit(make_batch((4,)))])[0].probabilities.shape == (4, 2)
    patient.close()


def test_a_full_queue_refuses_and_a_cancelled_call_makes_room(engine) -> None:
    metrics = ServingMetrics(engine)
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=1, max_queued=2), metrics)
    first = occupy(batcher, engine)
    waiting = [batcher.submit(make_batch((count,))) for count in (2, 3)]
    assert b"torchrec_adaptive_queued_calls 2.0" in metrics.render()
    with pytest.raises(Overloaded, match="2 calls are waiting"):
        batcher.submit(make_batch((4,)))
    assert waiting[0].cancel()
    last = batcher.submit(make_batch((5,)))
    engine.gate.set()
    answers([first, waiting[1], last])
    assert engine.passes == [(1, 1), (2, 8)]
    assert b"torchrec_adaptive_calls_per_scoring_sum 3.0" in metrics.render()
    assert b"torchrec_adaptive_queue_wait_seconds_count 3.0" in metrics.render()
    batcher.close()


def test_a_call_fails_by_its_own_fault_only(engine) -> None:
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=1))
    first = occupy(batcher, engine)
    good, bad = make_batch((2,)), make_batch((1, 1, 3))
    engine.fails_at = 3
    futures = [batcher.submit(batch) for batch in (good, bad, good)]
    engine.gate.set()
    assert not wait([first, *futures], timeout=30).not_done
    assert [future.exception() is None for future in futures] == [True, False, True]
    with pytest.raises(ArithmeticError, match="request of 3"):
        futures[1].result()
    assert futures[2].result().probabilities.shape == (2, 2)
    batcher.close()


def test_a_closed_batcher_answers_what_waits_and_takes_no_more(engine) -> None:
    batcher = MicroBatcher(engine, BatcherConfig(num_scorers=2))
    futures = [batcher.submit(make_batch((2,))) for _ in range(5)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    engine.gate.set()
    closing.join(30)
    assert len(answers(futures)) == 5
    with pytest.raises(Overloaded, match="closing"):
        batcher.submit(make_batch((2,)))


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"max_wait_ms": -1.0}, r"max_wait_ms=-1.0 must be 0 or more"),
        ({"max_wait_ms": float("nan")}, r"max_wait_ms=nan"),
        ({"max_queued": 0}, r"max_queued=0 must be 1 or more"),
        ({"max_wasted_cells": -1}, r"max_wasted_cells=-1"),
    ],
)
def test_bounds_that_make_no_sense(wrong: dict[str, float], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        BatcherConfig(**wrong)
