"""Follows the store of a model and brings each new version into the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchrec_adaptive.artifact import ArtifactError, VersionRef
from torchrec_adaptive.serving.engine import Live, ScoringEngine

logger = logging.getLogger(__name__)


class Follower:
    """A thread that polls the store.

    Deltas are taken in order. One that is refused is reported once and stays refused; serving goes on with the version
    that is live, and a newer snapshot is the way out.

    Args:
        engine: to update.
        poll_interval_s: between two looks.
        on_update: called with what is served after each version taken.
        on_refusal: called with the version and the sentence of each one refused.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        poll_interval_s: float = 0.5,
        on_update: Callable[[Live], None] | None = None,
        on_refusal: Callable[[VersionRef, str], None] | None = None,
    ) -> None:
        self.engine, self.poll_interval_s = engine, poll_interval_s
        self._on_update, self._on_refusal = on_update, on_refusal
        self._refused: set[VersionRef] = set()
        self._store_failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="artifact-follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for an update that is under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.catch_up()
                self._store_failing = False
            except Exception as error:  # whatever a store raises, the server goes on serving
                if not self._store_failing:
                    logger.exception("the artifact store can't be read: %s", error)
                self._store_failing = True
            self._stopping.wait(self.poll_interval_s)

    def catch_up(self) -> None:
        """Take every version that can be taken now."""
        while not self._stopping.is_set() and self._take_one():
            pass

    def _take_one(self) -> bool:
        live = self.engine.live.version
        newer = [ref for ref in self.engine.store.versions() if ref.version > live and ref not in self._refused]
        snapshots = [ref for ref in newer if ref.kind == "snapshot"]
        # Deltas first, in order; where the next number is no delta, or was refused, the newest snapshot.
        chosen = next((ref for ref in newer if ref.kind == "delta" and ref.version == live + 1), None)
        chosen = chosen or (snapshots[-1] if snapshots else None) or (newer[0] if newer else None)
        if chosen is None:
            return False
        try:
            taken = self.engine.load_snapshot(chosen) if chosen.kind == "snapshot" else self.engine.apply_delta(chosen)
        except ArtifactError as error:
            self._refused.add(chosen)
            logger.error("version %d (%s) refused: %s", chosen.version, chosen.kind, error)
            if self._on_refusal is not None:
                self._on_refusal(chosen, str(error))
            return True
        logger.info("version %d live, %.3f s after it was trained", taken.version, time.time() - taken.trained_at_s)
        if self._on_update is not None:
            self._on_update(taken)
        return True
