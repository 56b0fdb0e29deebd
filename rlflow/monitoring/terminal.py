"""Fit lines to a terminal, and keep a run alive if its terminal closes or a standard stream was closed before."""

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
    """A stream to a terminal.

    Once the terminal is gone, for example after a lost connection, text is dropped without an error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text. Drops it if the terminal is gone, and raises OSError for any other failure."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream. Does nothing if the terminal is gone."""
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
    """Inside the context, replace standard streams that are terminals with ``Steady`` streams."""
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
    """Break lines between words at the width of a terminal. Text for a pipe or a file keeps its long lines.

    A continued line is indented to the text after the line's label, such as `  found:    `.
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
    """Open closed standard streams (``>&-``) on /dev/null.

    Otherwise files opened later would get the descriptors of these streams, and prints would go into those
    files.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere(descriptor, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def nowhere(descriptor: int, mode: int) -> None:
    """Open /dev/null as the descriptor. ``mode``: os.O_RDONLY or os.O_WRONLY."""
    null = os.open(os.devnull, mode)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
