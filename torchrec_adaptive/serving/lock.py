"""A lock that many readers share and one writer has alone."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class ReadersWriterLock:
    """Readers together, a writer alone; a waiting writer goes before new readers, so that updates are never starved."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @contextmanager
    def reading(self) -> Generator[None]:
        """Hold a reader's share."""
        with self._condition:
            while self._writing or self._writers_waiting:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold it alone."""
        with self._condition:
            self._writers_waiting += 1
            while self._writing or self._readers:
                self._condition.wait()
            self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()
