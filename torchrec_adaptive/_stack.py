"""Whether the installed torch, fbgemm and torchrec belong together, read from metadata before anything is imported.

fbgemm 1.X is built against torch 2.(X+5), and torchrec 1.X against fbgemm 1.X; others fail at import with undefined
symbols. fbgemm-gpu and fbgemm-gpu-cpu own the same module folder, so that of both installed the later one wins in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

SUPPORTED = {"torch": "2.13", "torchrec": "1.8", "fbgemm": "1.8"}
_CPU = "pip install torch==2.13.0 && pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
_GPU = "pip install 'torchrec-adaptive[gpu]'"
DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def installed_versions(names: Sequence[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Versions of the distributions that are installed.

    Args:
        names: of the distributions to look for, by default those of the stack.

    Returns:
        Distribution name to version; absent ones are left out.
    """
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_stack(versions: Mapping[str, str]) -> None:
    """Refuse a stack that can't work.

    Args:
        versions: as `installed_versions` gives them.

    Raises:
        ImportError: one sentence with the versions found and the command that mends them.

    Example:
        >>> check_stack({"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"})
    """
    found = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none of them"
    if "fbgemm-gpu" in versions and "fbgemm-gpu-cpu" in versions:
        raise ImportError(
            f"torchrec-adaptive found both builds of fbgemm, which overwrite each other ({found}): run "
            f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, and then {_CPU} for a CPU or {_GPU} for a GPU."
        )
    fbgemm = versions.get("fbgemm-gpu", versions.get("fbgemm-gpu-cpu", ""))
    given = {"torch": versions.get("torch", ""), "torchrec": versions.get("torchrec", ""), "fbgemm": fbgemm}
    if any(_minor(given[name]) != wanted for name, wanted in SUPPORTED.items()):
        wanted = ", ".join(f"{name} {version}.*" for name, version in SUPPORTED.items())
        raise ImportError(
            f"torchrec-adaptive needs {wanted}, which belong together, and found {found}: run {_CPU} for a CPU or "
            f"{_GPU} for a GPU."
        )


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
