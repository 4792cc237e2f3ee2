"""A folder of published versions, anywhere that fsspec reaches.

    <root>/<model>/snapshot-00000001/manifest.json, weights.safetensors
    <root>/<model>/delta-00000002/manifest.json, dense.safetensors, rows.safetensors

A version appears whole: on a local disk it is written under a hidden name, synced and renamed once; on an object store,
which has no rename, the manifest is written last, and a folder without one is no version.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from torchrec_adaptive.artifact.manifest import MANIFEST_NAME, ArtifactError, FileEntry, Kind, Manifest

_FOLDER = re.compile(r"(snapshot|delta)-(\d{8})")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, order=True)
class VersionRef:
    """A version that a store holds.

    Args:
        version: its number.
        kind: snapshot or delta.
    """

    version: int
    kind: Kind

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return f"{self.kind}-{self.version:08d}"


class ArtifactStore:
    """The versions of one model.

    Args:
        root: a local folder, or a URL of a file system that fsspec knows.
        model: its name: letters, digits, dots, dashes and underscores.

    Raises:
        ValueError: the name could leave the folder.
    """

    def __init__(self, root: str | os.PathLike[str], model: str) -> None:
        if not _MODEL.fullmatch(model):
            raise ValueError(f"model={model!r} must be letters, digits, dots, dashes and underscores")
        self.model = model
        self._fs, path = fsspec.core.url_to_fs(os.fspath(root))
        self._base = f"{path.rstrip('/')}/{model}"
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def versions(self) -> list[VersionRef]:
        """Whole versions, oldest first; a snapshot stands before a delta of its number."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._base):
            return []
        found = []
        for path in self._fs.ls(self._base, detail=False):
            match = _FOLDER.fullmatch(path.rstrip("/").rsplit("/", 1)[-1])
            if match and self._fs.exists(f"{path.rstrip('/')}/{MANIFEST_NAME}"):
                found.append(VersionRef(int(match[2]), "snapshot" if match[1] == "snapshot" else "delta"))
        return sorted(found, key=lambda ref: (ref.version, ref.kind == "delta"))

    def manifest(self, ref: VersionRef) -> Manifest:
        """Read a version's manifest.

        Raises:
            ArtifactError: it is corrupt, or says another model, version or kind than its folder.
        """
        manifest = Manifest.from_json(self._read(ref, MANIFEST_NAME))
        for name, said, found in (
            ("model", manifest.model, self.model),
            ("version", manifest.version, ref.version),
            ("kind", manifest.kind, ref.kind),
        ):
            if said != found:
                raise ArtifactError(f"the manifest of {ref.folder} says {name} {said!r}, but lies under {found!r}")
        return manifest

    def read(self, ref: VersionRef, manifest: Manifest, name: str) -> bytes:
        """A file's bytes, checked against the manifest.

        Raises:
            ArtifactError: the file is missing, or its size or checksum differs.
        """
        if name not in manifest.files:
            raise ArtifactError(f"{ref.folder} has no {name}; its manifest names {sorted(manifest.files)}")
        entry, data = manifest.files[name], self._read(ref, name)
        if len(data) != entry.num_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactError(
                f"{ref.folder}/{name} does not match its checksum ({len(data)} bytes, {entry.num_bytes} expected); "
                "the file is corrupt: publish the version again"
            )
        return data

    def _read(self, ref: VersionRef, name: str) -> bytes:
        try:
            return self._fs.cat_file(f"{self._base}/{ref.folder}/{name}")
        except FileNotFoundError:
            raise ArtifactError(f"{ref.folder} has no {name}; the version is incomplete") from None

    def write(self, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
        """Publish a version: all of it, or nothing.

        Args:
            manifest: without `files`, which are filled in here.
            files: name to bytes.

        Returns:
            The manifest as it was written.

        Raises:
            ArtifactError: the version exists already.
        """
        entries = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
        manifest = replace(manifest, files=entries)
        ref = VersionRef(manifest.version, manifest.kind)
        if any(found.version == ref.version for found in self.versions()):
            raise ArtifactError(
                f"version {ref.version} of {self.model!r} exists already; versions are never overwritten"
            )
        everything = {**files, MANIFEST_NAME: manifest.to_json()}
        if self._is_local:
            self._write_locally(ref, everything)
        else:
            for name, data in everything.items():  # the manifest comes last
                self._fs.pipe_file(f"{self._base}/{ref.folder}/{name}", data)
        return manifest

    def _write_locally(self, ref: VersionRef, files: Mapping[str, bytes]) -> None:
        base = Path(self._base)
        staging = base / f".staging-{ref.folder}-{uuid.uuid4().hex}"
        staging.mkdir(parents=True)
        try:
            for name, data in files.items():
                with open(staging / name, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            _sync_folder(staging)
            staging.rename(base / ref.folder)
        except BaseException:
            self._fs.rm(str(staging), recursive=True)
            raise
        _sync_folder(base)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
