"""Ray's authentication token.

A Ray cluster started by a run gets a token of its own. A run that joins an existing cluster uses the user's
token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from rlflow.cluster import ray_private
from rlflow.errors import PlanError

TOKEN, PATH, MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"  # variables that Ray reads
NAME = "token"  # name of the file in the run's private folder
_own: list[str] = []  # the path in the variable PATH, while it names a run's token


def file() -> Path:
    """Return the path of the file that contains Ray's token."""
    return Path(os.environ[PATH]) if PATH in os.environ else Path.home() / ".ray" / "auth_token"


def forget_blanks() -> None:
    """Remove an empty token or token path from the environment, because Ray would use the empty value."""
    for variable in (TOKEN, PATH):
        if not os.environ.get(variable, "token").strip():
            del os.environ[variable]


def guard() -> None:
    """Create the user's Ray token with mode 0600, unless it already exists.

    Ray itself would create a file that other users can read. Nothing is done if RAY_AUTH_MODE turns tokens
    off, or if the environment has a token. Raises PlanError if the file can't be written.
    """
    forget_blanks()
    if os.environ.get(MODE, "token") != "token" or TOKEN in os.environ:
        return
    path = file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # left by a process that ended before it wrote the token
        if path.exists() and not path.read_bytes().strip():
            path.unlink()
        if not path.exists():
            _make(path)
        path.chmod(0o600)
    except OSError as error:
        raise PlanError.of(
            "ray-token",
            f"Ray's token cannot be stored in '{path}'",
            found=str(error.strerror),
            expected="a file that only this user can read and write",
            remedy="set RAY_AUTH_TOKEN_PATH to a writable file",
        ) from error


def _make(path: Path) -> None:
    """Write a new token to a file. Raises OSError.

    The write is atomic, because another run may be reading the file.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another run has just created one, which is used
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def make_own(folder: Path) -> None:
    """Create a token in ``folder``, which must be private, for the Ray cluster that this process starts next.

    If the environment already provides a token, that one is used instead. Raises OSError.
    """
    forget_blanks()
    if os.environ.get(MODE, "token") != "token" or TOKEN in os.environ:
        return None
    if PATH in os.environ:
        return guard()
    _make(folder / NAME)
    _own.append(str(folder / NAME))
    os.environ[PATH] = _own[-1]
    ray_private.forget_token()


def forget_own() -> None:
    """Go back to the user's token, after the run's Ray cluster has ended."""
    if _own:
        if os.environ.get(PATH) == _own[-1]:
            del os.environ[PATH]
        _own.clear()
        ray_private.forget_token()
