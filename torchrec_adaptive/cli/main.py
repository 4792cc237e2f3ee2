"""The console script: torchrec-adaptive serve ..., torchrec-adaptive versions ...."""

from __future__ import annotations

import sys
from datetime import datetime, timezone

from torchrec_adaptive.artifact import ArtifactError, ArtifactStore

USAGE = """usage: torchrec-adaptive serve --artifacts FOLDER --model NAME [...]   answer the Open Inference Protocol v2
       torchrec-adaptive versions FOLDER MODEL                        list and verify what is published"""


def main() -> None:
    """Entry point."""
    match sys.argv[1:]:
        case ["serve", *rest]:
            from torchrec_adaptive.serving import server

            sys.argv = ["torchrec-adaptive serve", *rest]
            server.main()
        case ["versions", root, model]:
            raise SystemExit(list_versions(root, model))
        case ["--help" | "-h"]:
            print(USAGE)
        case _:
            print(USAGE, file=sys.stderr)
            raise SystemExit(2)


def list_versions(root: str, model: str) -> int:
    """Print a line a version, each file checked against its checksum.

    Args:
        root: a local folder, or a URL that fsspec knows.
        model: its name.

    Returns:
        0 where all are sound, 1 otherwise.
    """
    store, corrupt = ArtifactStore(root, model), 0
    for ref in store.versions():
        try:
            manifest = store.manifest(ref)
            num_bytes = sum(len(store.read(ref, manifest, name)) for name in manifest.files)
            when = datetime.fromtimestamp(manifest.trained_at_s, timezone.utc).isoformat(timespec="seconds")
            print(f"{ref.folder}  step {manifest.step}  trained {when}  {num_bytes} bytes  sound")
        except ArtifactError as error:
            corrupt += 1
            print(f"{ref.folder}  corrupt: {error}")
    return 1 if corrupt else 0
