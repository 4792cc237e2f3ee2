"""Where batches come from."""

from __future__ import annotations

from typing import Protocol

from torchrec_adaptive.request import RequestBatch


class BatchSource(Protocol):
    """Batches by number. A pure function of its arguments, so that a resumed job sees what an unbroken one would."""

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        ...

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> RequestBatch:
        """One rank's part of a step."""
        ...
