"""What is published and served: manifests, snapshots and deltas. Where training and serving meet."""

from torchrec_adaptive.artifact.manifest import ArtifactError, FileEntry, Kind, Manifest, package_versions
from torchrec_adaptive.artifact.store import ArtifactStore, VersionRef
from torchrec_adaptive.artifact.tensors import (
    DENSE_NAME,
    ROWS_NAME,
    WEIGHTS_NAME,
    TableRows,
    load_rows,
    load_tensors,
    save_rows,
    save_tensors,
    table_weight_name,
)

__all__ = [
    "DENSE_NAME",
    "ROWS_NAME",
    "WEIGHTS_NAME",
    "ArtifactError",
    "ArtifactStore",
    "FileEntry",
    "Kind",
    "Manifest",
    "TableRows",
    "VersionRef",
    "load_rows",
    "load_tensors",
    "package_versions",
    "save_rows",
    "save_tensors",
    "table_weight_name",
]
