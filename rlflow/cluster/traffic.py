"""The bytes that go from process to process in a run on pools, by what they are."""

from __future__ import annotations

import threading

KINDS = ("columns", "weights", "commits")


class Traffic:
    """Counts bytes; several threads add to it. What ranks of a pool exchange while they compute together, such as gradients, is no part."""

    def __init__(self) -> None:
        self._bytes = dict.fromkeys(KINDS, 0)
        self._lock = threading.Lock()

    def add(self, kind: str, size: int) -> None:
        """Count so many bytes of one of KINDS."""
        with self._lock:
            self._bytes[kind] += size

    def taken(self) -> dict[str, int]:
        """The bytes of every kind since the last call."""
        with self._lock:
            counted, self._bytes = self._bytes, dict.fromkeys(KINDS, 0)
        return counted
