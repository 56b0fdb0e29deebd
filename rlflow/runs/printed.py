"""rewards.txt of a run's folder: what reward functions print, of each run as much as somebody may read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlflow.checkpoints.logs import Log
from rlflow.errors import printable
from rlflow.monitoring.lines import LINE, Lines
from rlflow.monitoring.secrets import MaskedLines

FILE = "rewards.txt"
LIMIT = 1 << 20  # bytes of the file


class Printed:
    """Takes what processes print, in pieces and from several threads, and writes whole lines without secrets and control characters."""

    def __init__(self, folder: Path, failed: Callable[[OSError], None]) -> None:
        self._path, self._failed = folder / FILE, failed
        self._log: Log | None = None
        self._room = LIMIT
        self._masked = MaskedLines()
        self._lines = Lines(self._add)
        self.hear = self._lines.hear

    def close(self) -> None:
        """Write lines that are not ended yet, and close the file."""
        self._lines.close()
        if self._log is not None:
            self._log.close()

    def _add(self, line: bytes) -> None:
        if self._room <= 0:
            return
        if self._log is None:  # a run whose rewards are silent has no such file
            self._log = Log(self._path, self._failed)
            self._room = LIMIT - (self._path.stat().st_size if self._path.exists() else 0)
        text = printable(self._masked(line.decode(errors="replace")))[:LINE] + "\n"
        self._room -= len(text.encode())
        self._log.add(text if self._room > 0 else f"what rewards print beyond {LIMIT >> 20} MiB is left out\n")
