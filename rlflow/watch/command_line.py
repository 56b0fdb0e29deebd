"""Secrets among the words of a command: other users of a machine see these, in `ps` and in /proc/PID/cmdline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlflow.watch.secrets import MASK, hides, masked, remember, telling

ARGUMENTS = (45, 46)  # in /proc/PID/stat after the name: where the words begin in memory, and where they end


def taken() -> list[str]:
    """The words after the program's name, which from here on nobody sees secrets of: not in the process table, not in ``sys.argv``, where
    Ray and trackers look, and not in what is printed of them. Between the start of the process and this call they can be seen."""
    words = sys.argv[1:]
    for name, value in flags(words):
        remember({name: value})
    shown = [hidden(words, number) for number in range(len(words))]
    with contextlib.suppress(OSError, ValueError, IndexError):  # a system that does not say where they are
        overwrite(words, shown)
    sys.argv[1:] = shown
    if words and sys.orig_argv[-len(words) :] == words:
        sys.orig_argv[-len(words) :] = shown
    return words


def flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The name and the value of each flag, also where the command line is no good."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word[2:].partition("=")
        if word.startswith("--"):
            yield name, value if equals else "" if following.startswith("--") else following


def hidden(words: Sequence[str], number: int) -> str:
    """A word as it may be shown."""
    word, before = words[number], words[number - 1] if number else ""
    name, equals, value = word.partition("=")
    if word.startswith("--"):
        return f"{name}={MASK}" if equals and telling(name) and hides(value) else masked(word)
    return MASK if before.startswith("--") and "=" not in before and telling(before) and hides(word) else masked(word)


def overwrite(words: Sequence[str], shown: Sequence[str]) -> None:
    """Put stars over each word that is shown otherwise, in the memory of which the kernel makes the command line. Does nothing where other
    words stand there. Raises OSError, ValueError and IndexError where it cannot be found."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number]) for number in ARGUMENTS)
    there = Path("/proc/self/cmdline").read_bytes()
    own = [os.fsencode(word) for word in words]
    if len(there) != end - start or there.split(b"\0")[:-1][-len(own) or len(there) :] != own:
        return
    at = end - sum(len(word) + 1 for word in own)
    for word, text in zip(own, shown, strict=True):
        kept = word.find(b"=") + 1 if word.startswith(b"--") else 0
        if os.fsencode(text) != word:
            ctypes.memset(at + kept, ord("*"), len(word) - kept)
        at += len(word) + 1
