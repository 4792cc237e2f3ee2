"""The C library's allocator, told to keep what a model frees for its next call.

Activations of a few MiB are returned to the system when they are freed, and every call pays for their pages again: at
1,024 candidates thousands of page faults. Only glibc has these settings; jemalloc and tcmalloc keep memory anyway.
Source: man 3 mallopt.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, up to the most that it ever used at a time.

    Returns:
        Whether the allocator took the settings; False where it isn't glibc's.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_TRIM_THRESHOLD, _MOST))
