"""What a published version says of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torchrec_adaptive._stack import installed_versions

Kind = Literal["snapshot", "delta"]
FORMAT = 1
MANIFEST_NAME = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PACKAGES = ("torchrec-adaptive", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "safetensors")


class ArtifactError(ValueError):
    """An artifact that can't be taken: corrupt, incomplete, out of order or for another model."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a version.

    Args:
        sha256: of its bytes, in hex.
        num_bytes: its size.
    """

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a version holds and stands on.

    Args:
        kind: a snapshot is whole, a delta changes its base.
        model: name of the model.
        version: 1 or more; each published version is one more than the last.
        base_version: the version that a delta changes; None for a snapshot.
        schema: `FeatureSchema.to_dict` of the model's inputs.
        schema_fingerprint: `FeatureSchema.fingerprint`, so that a delta for another schema is seen at once.
        model_config: what the model is built from.
        step: optimizer step after which the weights were taken.
        trained_at_s: seconds since 1970 when that step ended.
        created_at_s: seconds since 1970 when the version was written.
        files: name to checksum and size.
        packages: versions of the packages that wrote it.
        format: of this manifest.
    """

    kind: Kind
    model: str
    version: int
    base_version: int | None
    schema: Mapping[str, Any]
    schema_fingerprint: str
    model_config: Mapping[str, Any]
    step: int
    trained_at_s: float
    created_at_s: float
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Canonical JSON, UTF-8."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read and check every field.

        Args:
            data: as `to_json` wrote it.

        Returns:
            The manifest.

        Raises:
            ArtifactError: no JSON, a field missing, unknown or of a wrong type, or a file name that could leave the
                folder.
        """
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{MANIFEST_NAME} is not JSON ({error}); the version is corrupt") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise ArtifactError(f"{MANIFEST_NAME} has format {found!r}; this package reads format {FORMAT}")
        wanted = set(cls.__dataclass_fields__)
        if set(raw) != wanted:
            raise ArtifactError(f"{MANIFEST_NAME} has the fields {sorted(raw)}; it must have {sorted(wanted)}")
        _check_types(raw)
        raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
        return cls(**raw)


def _check_types(raw: dict[str, Any]) -> None:
    def is_int(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    kind = raw["kind"]
    checks = {
        "kind": kind in ("snapshot", "delta"),
        "model": isinstance(raw["model"], str) and bool(raw["model"]),
        "version": is_int(raw["version"], 1),
        "base_version": raw["base_version"] is None if kind == "snapshot" else is_int(raw["base_version"], 1),
        "schema": isinstance(raw["schema"], dict),
        "schema_fingerprint": isinstance(raw["schema_fingerprint"], str),
        "model_config": isinstance(raw["model_config"], dict),
        "step": is_int(raw["step"], 0),
        "trained_at_s": isinstance(raw["trained_at_s"], int | float),
        "created_at_s": isinstance(raw["created_at_s"], int | float),
        "packages": isinstance(raw["packages"], dict),
        "files": isinstance(raw["files"], dict)
        and all(
            _FILE_NAME.fullmatch(name)
            and isinstance(entry, dict)
            and set(entry) == {"sha256", "num_bytes"}
            and isinstance(entry["sha256"], str)
            and _SHA256.fullmatch(entry["sha256"])
            and is_int(entry["num_bytes"], 0)
            for name, entry in raw["files"].items()
        ),
    }
    if wrong := [name for name, right in checks.items() if not right]:
        raise ArtifactError(f"{MANIFEST_NAME} has {wrong[0]}={str(raw[wrong[0]])[:80]!r}, which is not allowed there")


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter to whoever reads an artifact.

    Returns:
        Distribution name to version; absent ones are left out.
    """
    return installed_versions(_PACKAGES)
