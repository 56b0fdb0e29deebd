"""Hints at the end of a reward's error: which flag allows what the walls around the reward's process
refused."""

from __future__ import annotations

import errno
import os
import socket
import traceback
from collections.abc import Iterator

DEEP = 20  # most errors of a chain of causes that are looked at

NETWORK = "rewards have no network unless --reward-network true"
WRITE = "rewards change files in a folder of their own alone, unless --reward-write FOLDER"
FOLDER = "rewards work in a folder of their own: open what lies beside the file by Path(__file__).parent"
VARIABLE = "rewards have no variables of the environment but those of --reward-env NAME"


def hint(error: BaseException) -> str:
    """A remark for the end of the error's text; empty where no wall caused it."""
    for cause in causes(error):
        if remark := _remark(cause):
            return f" ({remark})"
    return ""


def _remark(error: BaseException) -> str:
    """The remark on one error of the chain; empty for an error that no wall raises."""
    if isinstance(error, socket.gaierror):
        return NETWORK
    if isinstance(error, PermissionError):
        if error.filename is not None:
            return WRITE
        # a signal to another process, which no flag allows, is refused with EPERM
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
    """The error, its causes but for those that ``from None`` hides, and errors that were passed to them as
    arguments, as urllib does."""
    current: BaseException | None = error
    for _ in range(DEEP):
        if current is None:
            return
        yield current
        yield from (argument for argument in current.args if isinstance(argument, BaseException))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
