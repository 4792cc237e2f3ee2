"""pyarrow, or the sentence that says how to get it.

Only the Parquet modules import this file, and the package loads those when one of their names is first used.
"""

from __future__ import annotations

from typing import Any


class MissingPyarrowError(ImportError, ValueError):
    """Parquet files are asked for, and pyarrow is not installed."""


try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import compute
except ImportError:
    raise MissingPyarrowError(
        "Parquet files are read and written by pyarrow, which is not installed: pip install pyarrow"
    ) from None

pc: Any = compute  # its functions are made when it is imported: a type checker knows none of them

__all__ = ["MissingPyarrowError", "pa", "pc", "pq"]
