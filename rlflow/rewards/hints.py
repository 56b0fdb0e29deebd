"""Explains errors that the sandbox causes in reward functions, naming the flag that allows the action."""

from __future__ import annotations

import errno
import os
import socket
import traceback
from collections.abc import Iterator

DEEP = 20  # most errors in a chain of causes that are examined

NETWORK = "rewards have network access only with --reward-network true"
WRITE = "rewards may change files only in their private folder, unless --reward-write FOLDER allows another"
FOLDER = "rewards run in a private folder: open files next to the reward's file by Path(__file__).parent"
VARIABLE = "rewards can read only the environment variables given by --reward-env NAME"


def hint(error: BaseException) -> str:
    """Return a hint for an error's record, or an empty string if the sandbox didn't cause the error."""
    return next(filter(None, map(_remark, causes(error))), "")


def _remark(error: BaseException) -> str:
    """Return the hint for an error, ignoring its causes. Empty if the sandbox doesn't cause such errors."""
    if isinstance(error, socket.gaierror):
        return NETWORK
    if isinstance(error, PermissionError):
        if error.filename is not None:
            return WRITE
        # The sandbox refuses signals to other processes with EPERM; no flag allows them.
        return NETWORK if error.errno == errno.EACCES else ""
    if isinstance(error, FileNotFoundError):
        return (
            FOLDER
            if isinstance(error.filename, str) and error.filename and not os.path.isabs(error.filename)
            else ""
        )
    if isinstance(error, KeyError):
        frames = traceback.extract_tb(error.__traceback__)
        return VARIABLE if frames and frames[-1].filename in (os.__file__, "<frozen os>") else ""
    return ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and errors passed as arguments to other errors, as urllib does.

    Causes hidden by ``from None`` are skipped.
    """
    current: BaseException | None = error
    for _ in range(DEEP):
        if current is None:
            return
        yield current
        yield from (argument for argument in current.args if isinstance(argument, BaseException))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
