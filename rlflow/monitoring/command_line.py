"""Mask secrets in the command line, which other users of the machine can see with `ps`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlflow.monitoring.secrets import MASK, hides, masked, remember, telling

# fields of /proc/PID/stat after the name: the addresses where the words begin and end; psutil does not have them
ARGUMENTS = (45, 46)


def take_arguments() -> list[str]:
    """Return the words after the program's name, and hide the secrets in them from other users.

    Until this is called, other users can see the secrets. From then on they are masked in the process table,
    in ``sys.argv`` (which Ray and trackers read) and in everything printed.
    """
    words = sys.argv[1:]
    for name, value in flags(words):
        remember({name: value})
    masked_words = [masked_word(words, number) for number in range(len(words))]
    with contextlib.suppress(OSError, ValueError, IndexError):  # some systems do not report the addresses
        overwrite(words, masked_words)
    sys.argv[1:] = masked_words
    if words and sys.orig_argv[-len(words) :] == words:
        sys.orig_argv[-len(words) :] = masked_words
    return words


def flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each flag, even if the command line is invalid."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word[2:].partition("=")
        if word.startswith("--"):
            yield name, value if equals else "" if following.startswith("--") else following


def masked_word(words: Sequence[str], number: int) -> str:
    """Return word ``number`` of a command line, with any secret in it masked."""
    word, before = words[number], words[number - 1] if number else ""
    name, equals, value = word.partition("=")
    if word.startswith("--"):
        return f"{name}={MASK}" if equals and telling(name) and hides(value) else masked(word)
    return (
        MASK
        if before.startswith("--") and "=" not in before and telling(before) and hides(word)
        else masked(word)
    )


def overwrite(words: Sequence[str], replacements: Sequence[str]) -> None:
    """Write stars over the words that have a replacement, in the memory that `ps` reads.

    Does nothing if that memory holds other words. Raises OSError, ValueError or IndexError if it can't be
    found.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number]) for number in ARGUMENTS)
    memory = Path("/proc/self/cmdline").read_bytes()
    encoded = [os.fsencode(word) for word in words]
    if len(memory) != end - start or memory.split(b"\0")[:-1][-len(encoded) or len(memory) :] != encoded:
        return
    at = end - sum(len(word) + 1 for word in encoded)
    for word, text in zip(encoded, replacements, strict=True):
        prefix = word.find(b"=") + 1 if word.startswith(b"--") else 0
        if os.fsencode(text) != word:
            ctypes.memset(at + prefix, ord("*"), len(word) - prefix)
        at += len(word) + 1
