"""A live model: it scores, and takes new weights in place."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_adaptive.artifact import (
    DENSE_NAME,
    ROWS_NAME,
    WEIGHTS_NAME,
    ArtifactError,
    ArtifactStore,
    Manifest,
    VersionRef,
    load_rows,
    load_tensors,
    table_weight_name,
)
from torchrec_adaptive.models import AdaptiveRankingModel, build_model
from torchrec_adaptive.request import FeatureSchema, RequestBatch
from torchrec_adaptive.serving.lock import ReadersWriterLock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Live:
    """What is being served.

    Args:
        version: its number.
        trained_at_s: when its weights were trained, seconds since 1970.
        served_at_s: since when it answers, seconds since 1970.
    """

    version: int
    trained_at_s: float
    served_at_s: float


class ScoringEngine:
    """One model in memory, scored by many threads and updated by one.

    Scoring shares a lock and an update has it alone: every request is answered from exactly one version. An update is
    read, verified and checked against the live tensors before the lock is taken; under it rows are copied, no more.

    Args:
        store: the model's versions.
        device: of the weights.

    Raises:
        ArtifactError: the store has no snapshot, or none that can be taken; of several the newest sound one is.
    """

    def __init__(self, store: ArtifactStore, device: torch.device | None = None) -> None:
        self.store = store
        self.device = device or torch.device("cpu")
        snapshots = [ref for ref in store.versions() if ref.kind == "snapshot"]
        if not snapshots:
            raise ArtifactError(f"there is no snapshot of {store.model!r} to serve; publish one first")
        for older, ref in enumerate(reversed(snapshots), start=1):
            try:
                self._start_from(ref)
                break
            except (ArtifactError, ValueError) as error:
                if older == len(snapshots):
                    raise
                logger.error("version %d (snapshot) refused, trying an older one: %s", ref.version, error)

    def _start_from(self, ref: VersionRef) -> None:
        """Build the model of a snapshot, and load it."""
        manifest = self.store.manifest(ref)
        self.schema = FeatureSchema.from_dict(manifest.schema)
        self.model_config = manifest.model_config
        self.model: AdaptiveRankingModel = build_model(self.schema, manifest.model_config).to(self.device).eval()
        self._weights = dict(self.model.state_dict())
        self._tables = {table.name: self._weights[table_weight_name(table.name)] for table in self.schema.tables}
        self._lock = ReadersWriterLock()
        self._live = Live(0, 0.0, 0.0)
        self.load_snapshot(ref)

    @property
    def live(self) -> Live:
        """What is being served now."""
        return self._live

    @torch.inference_mode()
    def score(self, batch: RequestBatch) -> tuple[Tensor, int]:
        """Score, from one version.

        Args:
            batch: valid for the schema.

        Returns:
            Probabilities (B, T) float32 on the CPU, and the version that they come from.
        """
        with self._lock.reading():
            version = self._live.version
            probabilities = self.model(batch.to(self.device) if self.device.type != "cpu" else batch).sigmoid()
        return probabilities.float().cpu(), version

    def load_snapshot(self, ref: VersionRef) -> Live:
        """Take all weights of a snapshot, into the tensors that are there.

        Args:
            ref: of a snapshot.

        Returns:
            What is served now.

        Raises:
            ArtifactError: it is corrupt or for another model; what was served goes on.
        """
        manifest = self.store.manifest(ref)
        self._check_same_model(manifest, ref)
        weights = load_tensors(self.store.read(ref, manifest, WEIGHTS_NAME), f"{ref.folder}/{WEIGHTS_NAME}")
        self._check_dense(weights, set(self._weights), ref)
        with self._lock.writing(), torch.no_grad():
            for name, value in weights.items():
                self._weights[name].copy_(value)
            self._live = Live(manifest.version, manifest.trained_at_s, time.time())
        return self._live

    def apply_delta(self, ref: VersionRef) -> Live:
        """Take the rows and dense weights of a delta, in place.

        Args:
            ref: of a delta whose base is the version being served.

        Returns:
            What is served now.

        Raises:
            ArtifactError: it is corrupt, out of order or for another model; nothing is changed then.
        """
        manifest = self.store.manifest(ref)
        if manifest.base_version != self._live.version:
            raise ArtifactError(
                f"{ref.folder} stands on version {manifest.base_version}, but version {self._live.version} is being "
                "served; publish a snapshot to go on from"
            )
        self._check_same_model(manifest, ref)
        dense = load_tensors(self.store.read(ref, manifest, DENSE_NAME), f"{ref.folder}/{DENSE_NAME}")
        rows = load_rows(self.store.read(ref, manifest, ROWS_NAME), f"{ref.folder}/{ROWS_NAME}")
        tables = {table_weight_name(table) for table in self._tables}
        self._check_dense(dense, set(self._weights) - tables, ref)
        for table, part in rows.items():
            self._check_rows(table, part.ids, part.rows, ref)
        with self._lock.writing(), torch.no_grad():
            for table, part in rows.items():
                self._tables[table].index_copy_(0, part.ids.to(self.device), part.rows.to(self.device))
            for name, value in dense.items():
                self._weights[name].copy_(value)
            self._live = Live(manifest.version, manifest.trained_at_s, time.time())
        return self._live

    def _check_same_model(self, manifest: Manifest, ref: VersionRef) -> None:
        if manifest.schema_fingerprint != self.schema.fingerprint or manifest.model_config != self.model_config:
            raise ArtifactError(
                f"{ref.folder} is for another schema or model config than the one being served; start a server for it"
            )

    def _check_dense(self, weights: dict[str, Tensor], wanted: set[str], ref: VersionRef) -> None:
        if set(weights) != wanted:
            differing = sorted(set(weights) ^ wanted)
            raise ArtifactError(f"{ref.folder} does not fit the model: {differing[0]!r} is on one side only")
        for name, value in weights.items():
            live = self._weights[name]
            if value.shape != live.shape or value.dtype != live.dtype:
                raise ArtifactError(
                    f"{ref.folder} has {name!r} of {tuple(value.shape)} {value.dtype}; the model has "
                    f"{tuple(live.shape)} {live.dtype}"
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ArtifactError(f"{ref.folder} has NaN or infinity in {name!r}; training has diverged")

    def _check_rows(self, table: str, ids: Tensor, rows: Tensor, ref: VersionRef) -> None:
        if table not in self._tables:
            raise ArtifactError(f"{ref.folder} has rows of {table!r}; the model's tables are {sorted(self._tables)}")
        live = self._tables[table]
        if rows.shape[1] != live.shape[1] or rows.dtype != live.dtype:
            raise ArtifactError(
                f"{ref.folder} has rows of {rows.shape[1]} {rows.dtype} for {table!r}; the table has {live.shape[1]} "
                f"{live.dtype}"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < live.shape[0]:
            raise ArtifactError(
                f"{ref.folder} has ids {int(ids.min())} to {int(ids.max())} for {table!r}; its rows are 0 to "
                f"{live.shape[0] - 1}"
            )
        if bool((ids[1:] <= ids[:-1]).any()):
            raise ArtifactError(f"{ref.folder} has ids of {table!r} that do not ascend; each row may come once")
        if not bool(torch.isfinite(rows).all()):
            raise ArtifactError(f"{ref.folder} has NaN or infinity in rows of {table!r}; training has diverged")
