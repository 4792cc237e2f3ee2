"""The import tree of the package, read from its source."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = "torchrec_adaptive"
ROOT = Path(__file__).parents[2]
LEVELS = {
    "request": 0,
    "ops": 1,
    "features": 2,
    "embeddings": 2,
    "sequence": 2,
    "interaction": 2,
    "precision": 2,
    "history": 2,
    "artifact": 2,
    "models": 3,
    "distributed": 3,
    "optimize": 3,
    "training": 4,
    "publishing": 4,
    "serving": 4,
    "datasets": 4,
    "testing": 5,
    "cli": 5,
}


def sources() -> list[Path]:
    """Every source file of the package."""
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def folder_of(path: Path) -> str:
    """The package's folder that a file lies in; "" for the top."""
    parts = path.relative_to(ROOT / PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_modules(path: Path) -> set[str]:
    """Full names that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_folders(path: Path) -> set[str]:
    """Folders of the package that a file imports."""
    parts = [name.split(".") for name in imported_modules(path)]
    return {part[1] for part in parts if part[0] == PACKAGE and len(part) > 1 and not part[1].startswith("_")}
