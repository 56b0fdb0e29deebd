"""A run's folder while the run writes in it: where it is, whatever becomes of the working directory, and whether it is still there."""

from __future__ import annotations

import os
from pathlib import Path


class Lost(Exception):
    """The folder is not where it was. moved: where it is now, None where it was deleted."""

    def __init__(self, folder: Path, moved: Path | None) -> None:
        self.folder, self.moved = folder, moved
        super().__init__(f"the run's folder {folder} was {f'moved to {moved}' if moved else 'deleted'} while it ran")


class Home:
    """An absolute path, and the folder that was there when this was made."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.absolute()
        self.shown = shown(self.path)  # for people, who are where the run was started
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self) -> None:
        """Raises Lost where the folder is another one or none now. A disk that does not answer is no reason."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise Lost(self.path, self._moved()) from None
        except OSError:
            return
        if not os.path.samestat(there, os.fstat(self._handle)):
            raise Lost(self.path, self._moved())

    def _moved(self) -> Path | None:
        """The path of the folder by the kernel, if the kernel knows it and the folder exists."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
            return path if os.path.samestat(os.stat(path), os.fstat(self._handle)) else None
        except OSError:
            return None

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._handle)


def shown(folder: Path) -> str:
    """A path as it is best written here: from the working directory where it lies in that."""
    try:
        return os.path.relpath(folder) if folder.is_relative_to(os.getcwd()) else str(folder)
    except FileNotFoundError:  # the working directory is gone
        return str(folder)
