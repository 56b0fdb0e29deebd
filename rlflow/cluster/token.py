"""Ray's token: of a Ray that is started for one run a token of the run's own, else the one of this user."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError

TOKEN, PATH, MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"  # variables that Ray reads
NAME = "token"  # of the file in the run's private folder
_own: list[str] = []  # the path in PATH, while it is that of a run


def file() -> Path:
    """The file of Ray's token."""
    return Path(os.environ[PATH]) if PATH in os.environ else Path.home() / ".ray" / "auth_token"


def forget_blanks() -> None:
    """Remove a token or a place of blanks from the environment: it is none, and Ray would take it."""
    for variable in (TOKEN, PATH):
        if not os.environ.get(variable, "token").strip():
            del os.environ[variable]


def guard() -> None:
    """Make Ray's token of this user with mode 0600, before Ray makes one that others can read. Ray uses it
    wherever RAY_AUTH_MODE is not set. Raises PlanError where the file cannot be written."""
    forget_blanks()
    if os.environ.get(MODE, "token") != "token" or TOKEN in os.environ:
        return
    path = file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().strip():  # of a process that ended before it had written
            path.unlink()
        if not path.exists():
            _make(path)
        path.chmod(0o600)
    except OSError as error:
        raise PlanError.of(
            "ray-token",
            f"Ray's token cannot be kept in '{path}'",
            found=str(error.strerror),
            expected="a file that this user alone reads and writes",
            remedy="set RAY_AUTH_TOKEN_PATH to a file that can be written",
        ) from error


def _make(path: Path) -> None:
    """Write a token, whole or not at all, since another run may read it at once. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another run has made one, which serves
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def make_own(folder: Path) -> None:
    """Make a token for the Ray that is started next, in the run's private ``folder``, unless the environment
    names one. Raises OSError."""
    forget_blanks()
    if os.environ.get(MODE, "token") != "token" or TOKEN in os.environ:
        return
    if PATH in os.environ:
        return guard()
    _make(folder / NAME)
    _own.append(str(folder / NAME))
    os.environ[PATH] = _own[-1]
    _read_anew()


def forget_own() -> None:
    """Have this process use its user's token again, once the Ray of a run has ended."""
    if _own:
        if os.environ.get(PATH) == _own[-1]:
            del os.environ[PATH]
        _own.clear()
        _read_anew()


def _read_anew() -> None:
    """Have Ray read the token when it next needs one: it keeps what it has read."""
    loader: Any = getattr(sys.modules.get("ray._raylet"), "AuthenticationTokenLoader", None)
    if hasattr(loader, "instance"):
        loader.instance().reset_cache()
