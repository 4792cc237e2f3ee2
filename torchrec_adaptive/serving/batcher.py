"""Calls that arrive together are scored together: one pass of the model instead of one each."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_adaptive.request import RequestBatch, concat_batches
from torchrec_adaptive.serving.engine import ScoringEngine
from torchrec_adaptive.serving.metrics import ServingMetrics

logger = logging.getLogger(__name__)


class Overloaded(RuntimeError):
    """The queue is full, or closed: the call was not taken, and may be sent again."""


@dataclass(frozen=True)
class BatcherConfig:
    """Which calls are scored together, and how many may wait.

    A scorer that is free takes what is waiting, in order of arrival, as far as the bounds go. With `max_wait_ms=0` it
    never waits for more: calls are joined only when they came while all scorers were busy, so a lone call pays nothing
    and a loaded server joins by itself. With more, a scorer lets the oldest call wait up to that long, or until the
    bounds are reached. A call is never split: one that is past a bound by itself is scored by itself.

    Args:
        max_wait_ms: that a call may wait for others while a scorer is free.
        max_requests: of the calls scored together; 1 joins none.
        max_candidates: of the calls scored together.
        max_padded_rows: requests times the longest history, and requests times the most candidates of one, of the
            calls scored together: what the attention over histories lays out.
        max_wasted_cells: (request, candidate, event) cells that are laid out only because calls of different sizes
            stand together; past it, scoring them apart is faster.
        max_queued: calls that may wait; one more is refused.
        num_scorers: threads that score.
    """

    max_wait_ms: float = 0.0
    max_requests: int = 64
    max_candidates: int = 4096
    max_padded_rows: int = 4 * 1024**2
    max_wasted_cells: int = 256 * 1024
    max_queued: int = 256
    num_scorers: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.max_wait_ms < float("inf"):
            raise ValueError(f"max_wait_ms={self.max_wait_ms} must be 0 or more, and finite; 0 never waits")
        for name in ("max_requests", "max_candidates", "max_padded_rows", "max_queued", "num_scorers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.max_wasted_cells < 0:
            raise ValueError(f"max_wasted_cells={self.max_wasted_cells} must be 0 or more; 0 joins equal sizes only")


@dataclass(frozen=True)
class Scored:
    """The answer to a call.

    Args:
        probabilities: (B, T) float32 on the CPU, of the call's own candidates.
        version: that all of them come from.
    """

    probabilities: Tensor
    version: int


@dataclass(frozen=True)
class _Size:
    """What decides whether calls go together: `longest` is 0 in a model without histories."""

    requests: int
    candidates: int
    most_candidates: int
    longest: int
    cells: int

    @classmethod
    def of(cls, batch: RequestBatch) -> _Size:
        lengths, index = batch.features.history.lengths(), batch.candidate_to_request
        most = int(torch.bincount(index).max()) if index.numel() else 0
        longest = int(lengths.max()) if lengths.numel() else 0
        requests = batch.num_requests
        return cls(requests, batch.num_candidates, most, longest, requests * most * longest)

    def joined(self, other: _Size) -> _Size:
        """Of both together; `cells` are those that are laid out where each stays alone."""
        return _Size(
            self.requests + other.requests,
            self.candidates + other.candidates,
            max(self.most_candidates, other.most_candidates),
            max(self.longest, other.longest),
            self.cells + other.cells,
        )

    def fits(self, config: BatcherConfig) -> bool:
        return (
            self.requests <= config.max_requests
            and self.candidates <= config.max_candidates
            and self.requests * max(self.most_candidates, self.longest) <= config.max_padded_rows
            and self.requests * self.most_candidates * self.longest - self.cells <= config.max_wasted_cells
        )


@dataclass
class _Call:
    batch: RequestBatch
    size: _Size
    arrived: float = field(default_factory=time.perf_counter)
    future: Future[Scored] = field(default_factory=Future)


class MicroBatcher:
    """A bounded queue of calls, and the threads that score them.

    A scoring that fails is tried again call by call, so that a call fails by its own fault only. A call whose future
    was cancelled before its turn is dropped. The calls of one scoring are answered from one version.

    Args:
        engine: that scores.
        config: bounds and policy.
        metrics: to count in; None for a batcher that nobody watches.
    """

    def __init__(
        self, engine: ScoringEngine, config: BatcherConfig | None = None, metrics: ServingMetrics | None = None
    ) -> None:
        self.engine, self.config = engine, config or BatcherConfig()
        self._metrics = metrics
        self._queue: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._closed = self._hurried = False
        self._threads = [
            threading.Thread(target=self._run, name=f"score-{number}", daemon=True)
            for number in range(self.config.num_scorers)
        ]
        for thread in self._threads:
            thread.start()
        if metrics is not None:
            metrics.queued_calls.set_function(lambda: len(self._queue))

    def submit(self, batch: RequestBatch) -> Future[Scored]:
        """Put a call into the queue.

        Args:
            batch: valid for the engine's schema, on the CPU.

        Returns:
            A future of the scores; cancel it when nobody wants them any more. It raises what scoring this call, alone,
            raised.

        Raises:
            Overloaded: `max_queued` calls are waiting, or the batcher is closed.
        """
        call = _Call(batch, _Size.of(batch))
        with self._changed:
            if self._closed:
                raise Overloaded("the server is closing; send the call to another one")
            if len(self._queue) >= self.config.max_queued:
                self._queue = deque(waiting for waiting in self._queue if not waiting.future.cancelled())
            if len(self._queue) >= self.config.max_queued:
                raise Overloaded(
                    f"{len(self._queue)} calls are waiting, which is as many as may; send it again a little later"
                )
            self._queue.append(call)
            self._changed.notify()
        return call.future

    def hurry(self) -> None:
        """Let no call wait for others any more, as at the end of a server."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more calls, score those that wait, and end the threads."""
        with self._changed:
            self._closed = self._hurried = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while calls := self._take():
            try:
                self._score(calls)
            except Exception as error:  # the thread must outlive whatever happens in it
                logger.exception("scoring failed: %s", error)
                for call in calls:
                    if not call.future.done():
                        call.future.set_exception(error)

    def _take(self) -> list[_Call]:
        """The next calls to score, marked as running; waits for some. None when closed and nothing waits."""
        with self._changed:
            while True:
                count, full = self._group()
                if not count:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                remaining_s = self._queue[0].arrived + self.config.max_wait_ms / 1000 - time.perf_counter()
                if full or self._hurried or remaining_s <= 0:
                    calls = [self._queue.popleft() for _ in range(count)]
                    if self._queue:
                        self._changed.notify()
                    if running := [call for call in calls if call.future.set_running_or_notify_cancel()]:
                        return running
                else:
                    self._changed.wait(remaining_s)

    def _group(self) -> tuple[int, bool]:
        """How many calls at the head go together, and whether no more would."""
        size: _Size | None = None
        for place, call in enumerate(self._queue):
            if size is None:
                size = call.size
                continue
            size = size.joined(call.size)
            if not size.fits(self.config):
                return place, True
        count = len(self._queue)
        if size is None:
            return 0, False
        full = size.requests >= self.config.max_requests or size.candidates >= self.config.max_candidates
        return count, full or count >= self.config.max_queued

    def _score(self, calls: list[_Call]) -> None:
        started = time.perf_counter()
        if self._metrics is not None:
            self._metrics.on_scoring([started - call.arrived for call in calls])
        try:
            probabilities, version = self.engine.score(concat_batches([call.batch for call in calls]))
        except Exception as error:
            if len(calls) == 1:
                calls[0].future.set_exception(error)
                return
            logger.warning("%d calls failed together (%s); scoring each alone", len(calls), error)
            for call in calls:
                self._score([call])
            return
        if self._metrics is not None:
            self._metrics.model_latency_s.observe(time.perf_counter() - started)
        parts = probabilities.split([call.size.candidates for call in calls])
        for call, part in zip(calls, parts, strict=True):
            call.future.set_result(Scored(part, version))
