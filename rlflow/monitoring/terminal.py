"""Fit lines to a terminal, and keep a run going if its terminal or a standard stream is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

NAMES = ("stdout", "stderr")
LABEL = re.compile(r" +(?:\w+: +)?")  # the start of an indented line, such as `  found:    `


class Steady:
    """A stream to a terminal that doesn't fail when the terminal goes away.

    After that, for example when a connection is lost, text is silently dropped.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, or drop it if the terminal is gone. Raises OSError for any other failure."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the terminal is gone."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if error.errno != errno.EIO:
            raise error
        nowhere(self._stream.fileno(), os.O_WRONLY)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Inside the context, wrap those standard streams that are terminals in ``Steady``."""
    before = {name: getattr(sys, name) for name in NAMES}
    for name, stream in before.items():
        if stream is not None and not isinstance(stream, Steady) and stream.isatty():
            setattr(sys, name, Steady(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            if isinstance(getattr(sys, name), Steady):
                setattr(sys, name, stream)


def fitted(text: str, stream: TextIO) -> str:
    """Wrap lines at the width of the terminal. Text for a pipe or a file keeps its long lines.

    Continuation lines are indented to the text after a label such as ``found:``.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    label = LABEL.match(line)
    indent = " " * (label.end() if label and label.end() < width // 2 else 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,  # paths and commands stay whole
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def open_all() -> None:
    """Open standard streams that were closed (``>&-``) on /dev/null.

    Otherwise, files opened later would get their descriptors, and printed text would end up in them.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere(descriptor, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def nowhere(descriptor: int, mode: int) -> None:
    """Make a descriptor refer to /dev/null. ``mode``: os.O_RDONLY or os.O_WRONLY."""
    null = os.open(os.devnull, mode)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
