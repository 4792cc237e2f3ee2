"""What the server tells Prometheus."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from torchrec_adaptive.artifact import VersionRef
from torchrec_adaptive.serving.engine import Live, ScoringEngine

_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_CALLS_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_STALENESS_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServingMetrics:
    """Counters, gauges and histograms of one server, in a registry of their own.

    Args:
        engine: whose version and staleness are shown.
    """

    def __init__(self, engine: ScoringEngine) -> None:
        registry = self.registry = CollectorRegistry()
        prefix = "torchrec_adaptive"
        self.calls = Counter(f"{prefix}_calls", "Inference calls by HTTP status", ["status"], registry=registry)
        self.requests = Counter(f"{prefix}_requests", "Requests scored; a call may hold several", registry=registry)
        self.candidates = Counter(f"{prefix}_candidates", "Candidates scored", registry=registry)
        self.latency_s = Histogram(
            f"{prefix}_latency_seconds", "Of an inference call", buckets=_LATENCY_BUCKETS_S, registry=registry
        )
        self.model_latency_s = Histogram(
            f"{prefix}_model_latency_seconds", "Of the model alone", buckets=_LATENCY_BUCKETS_S, registry=registry
        )
        self.queued_calls = Gauge(f"{prefix}_queued_calls", "Calls that wait to be scored", registry=registry)
        self.queue_wait_s = Histogram(
            f"{prefix}_queue_wait_seconds",
            "Of a call, until a scorer took it",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.calls_per_scoring = Histogram(
            f"{prefix}_calls_per_scoring",
            "Calls scored in one pass of the model",
            buckets=_CALLS_BUCKETS,
            registry=registry,
        )
        self.updates = Counter(f"{prefix}_updates", "Versions taken or refused", ["result"], registry=registry)
        self.update_staleness_s = Histogram(
            f"{prefix}_update_staleness_seconds",
            "From the optimizer step to being served, of each version taken",
            buckets=_STALENESS_BUCKETS_S,
            registry=registry,
        )
        self.last_update_staleness_s = Gauge(
            f"{prefix}_last_update_staleness_seconds", "Of the version taken last", registry=registry
        )
        version = Gauge(f"{prefix}_model_version", "Version that answers", registry=registry)
        version.set_function(lambda: engine.live.version)
        staleness = Gauge(
            f"{prefix}_staleness_seconds", "Since the step that trained the weights in use", registry=registry
        )
        staleness.set_function(lambda: time.time() - engine.live.trained_at_s)

    def on_scoring(self, waits_s: Sequence[float]) -> None:
        """Count a pass of the model over as many calls as there are waits."""
        self.calls_per_scoring.observe(len(waits_s))
        for wait_s in waits_s:
            self.queue_wait_s.observe(wait_s)

    def on_update(self, live: Live) -> None:
        """Count a version taken."""
        self.updates.labels("applied").inc()
        self.update_staleness_s.observe(live.served_at_s - live.trained_at_s)
        self.last_update_staleness_s.set(live.served_at_s - live.trained_at_s)

    def on_refusal(self, ref: VersionRef, sentence: str) -> None:
        """Count a version refused."""
        self.updates.labels("refused").inc()

    def render(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self.registry)
