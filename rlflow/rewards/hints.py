"""What a user's reward meets at the walls around it, and the flag that opens them: an error says so."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterator

DEEP = 20  # errors that one may be caused by, looked at

NETWORK = "rewards have no network unless --reward-network true"
WRITE = "rewards change files in a folder of their own alone, unless --reward-write FOLDER"
FOLDER = "rewards work in a folder of their own: open what lies beside the file by Path(__file__).parent"
VARIABLE = "rewards have no variables of the environment but those of --reward-env NAME"


def hint(error: BaseException) -> str:
    """A remark for the end of an error's text; empty where the walls had no part in it."""
    for each in _causes(error):
        if found := _met(each):
            return f" ({found})"
    return ""


def _met(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return NETWORK
    if isinstance(error, PermissionError):
        return WRITE if error.filename is not None else NETWORK
    if isinstance(error, FileNotFoundError):
        return FOLDER if isinstance(error.filename, str) and error.filename and not os.path.isabs(error.filename) else ""
    if isinstance(error, KeyError):
        frames = traceback.extract_tb(error.__traceback__)
        return VARIABLE if frames and frames[-1].filename in (os.__file__, "<frozen os>") else ""
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it came from, and errors that it was made with, as urllib's are."""
    each: BaseException | None = error
    for _ in range(DEEP):
        if each is None:
            return
        yield each
        yield from (argument for argument in each.args if isinstance(argument, BaseException))
        each = each.__cause__ or each.__context__
