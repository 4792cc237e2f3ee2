"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, str], names: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        package: its full name.
        homes: of each name imported late, the module in the package that has it.
        names: all that the package exports, for the message.

    Returns:
        Both functions.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {sorted(names)}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *homes})

    return load, listed
