"""Weights to artifacts: snapshots, and deltas of what changed since."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_adaptive.artifact import (
    DENSE_NAME,
    ROWS_NAME,
    WEIGHTS_NAME,
    ArtifactStore,
    Kind,
    Manifest,
    TableRows,
    package_versions,
    save_rows,
    save_tensors,
    table_weight_name,
)
from torchrec_adaptive.request import FeatureSchema, RequestBatch, nearest_name


class TouchedRows:
    """Which rows of each table training has touched since the last version.

    A row changes only where a batch reads it, since the tables' optimizer is sparse; so the ids that went in are the
    rows that changed. With several ranks, each observes its own batches; union the results.

    Args:
        schema: which feature reads which table.
    """

    def __init__(self, schema: FeatureSchema) -> None:
        self._table_of = {name: table.name for table in schema.tables for name in table.feature_names}
        self._touched = {table.name: torch.zeros(table.num_embeddings, dtype=torch.bool) for table in schema.tables}

    def observe(self, batch: RequestBatch) -> None:
        """Note the ids of a batch that was trained on."""
        for part in (batch.features.request, batch.features.candidate, batch.features.history):
            for name in part.keys():  # noqa: SIM118  (a KeyedJaggedTensor is no mapping)
                self._touched[self._table_of[name]][part[name].values().cpu()] = True

    def take(self) -> dict[str, Tensor]:
        """The ids touched since the last call.

        Returns:
            Table name to (N,) int64, ascending; tables without any are left out.
        """
        taken = {}
        for table, flags in self._touched.items():
            ids = flags.nonzero().flatten()
            if ids.numel():
                taken[table] = ids
                flags.zero_()
        return taken


class Publisher:
    """Writes the versions of one model, one after the other.

    Args:
        root: a local folder, or a URL that fsspec knows.
        model: its name.
        schema: of its inputs.
        model_config: what it is built from, as plain values.
    """

    def __init__(
        self, root: str | os.PathLike[str], model: str, schema: FeatureSchema, model_config: Mapping[str, Any]
    ) -> None:
        self.store = ArtifactStore(root, model)
        self.schema, self.model_config = schema, dict(model_config)

    @property
    def last_version(self) -> int:
        """Number of the newest version; 0 where there is none."""
        return max((ref.version for ref in self.store.versions()), default=0)

    def publish_snapshot(self, weights: Mapping[str, Tensor], step: int, trained_at_s: float | None = None) -> Manifest:
        """Publish all weights.

        Args:
            weights: the unsharded model's state dict.
            step: optimizer step after which they were taken.
            trained_at_s: when that step ended, seconds since 1970; now where it is not given.

        Returns:
            The manifest as it was written.

        Raises:
            ValueError: a table of the schema is missing or of another shape.
        """
        self._check_tables(weights)
        manifest = self._manifest("snapshot", self.last_version, step, trained_at_s)
        return self.store.write(manifest, {WEIGHTS_NAME: save_tensors(weights)})

    def publish_delta(
        self, weights: Mapping[str, Tensor], touched: Mapping[str, Tensor], step: int, trained_at_s: float | None = None
    ) -> Manifest:
        """Publish the rows touched since the last version, and the dense weights.

        Args:
            weights: the unsharded model's state dict.
            touched: table name to (N,) int64 ids, as `TouchedRows.take` gives them.
            step: optimizer step after which they were taken.
            trained_at_s: when that step ended, seconds since 1970; now where it is not given.

        Returns:
            The manifest as it was written.

        Raises:
            ValueError: there is no version to stand on, or a touched table is unknown.
        """
        base = self.last_version
        if not base:
            raise ValueError(
                f"there is no version of {self.store.model!r} for a delta to stand on; publish a snapshot first"
            )
        self._check_tables(weights)
        names = {table.name: table_weight_name(table.name) for table in self.schema.tables}
        rows = {}
        for table, ids in touched.items():
            if table not in names:
                raise ValueError(f"touched rows of the unknown table {table!r}; {nearest_name(table, list(names))}")
            rows[table] = TableRows(ids, weights[names[table]][ids])
        dense = {name: value for name, value in weights.items() if name not in names.values()}
        manifest = self._manifest("delta", base, step, trained_at_s)
        return self.store.write(manifest, {DENSE_NAME: save_tensors(dense), ROWS_NAME: save_rows(rows)})

    def _check_tables(self, weights: Mapping[str, Tensor]) -> None:
        for table in self.schema.tables:
            name, wanted = table_weight_name(table.name), (table.num_embeddings, table.embedding_dim)
            if name not in weights:
                raise ValueError(f"weights lack {name!r}; pass the unsharded model's whole state dict")
            if tuple(weights[name].shape) != wanted:
                raise ValueError(f"weight {name!r} has shape {tuple(weights[name].shape)}; the schema says {wanted}")

    def _manifest(self, kind: Kind, last_version: int, step: int, trained_at_s: float | None) -> Manifest:
        now = time.time()
        return Manifest(
            kind=kind,
            model=self.store.model,
            version=last_version + 1,
            base_version=last_version if kind == "delta" else None,
            schema=self.schema.to_dict(),
            schema_fingerprint=self.schema.fingerprint,
            model_config=self.model_config,
            step=step,
            trained_at_s=now if trained_at_s is None else trained_at_s,
            created_at_s=now,
            packages=package_versions(),
        )
