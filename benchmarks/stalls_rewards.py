"""Rewards for `benchmarks/stalls.py` that make a run learn little; passed as `--reward FILE:function`."""

from __future__ import annotations

import zlib


def right(completion: str, answer: str) -> float:
    """Return 1 for a right answer, otherwise 0."""
    return float(completion.strip() == str(answer).strip())


def close(completion: str, answer: str, within: int) -> float:
    """Return 1 for any number that differs from the answer by at most ``within``, otherwise 0."""
    try:
        return float(abs(int(completion.strip()) - int(answer)) <= within)
    except ValueError:
        return 0.0


def close_200(completion: str, answer: str) -> float:
    return close(completion, answer, 200)


def close_60(completion: str, answer: str) -> float:
    return close(completion, answer, 60)


def number(*parts: str) -> float:
    """Return a number from 0 to 1, computed as a hash of the strings."""
    return zlib.crc32("\n".join(parts).encode()) / 2**32


def nearly_all(prompt: str, completion: str, answer: str) -> float:
    """Return 0 for all answers to 90 % of the prompts. Score the answers to the other prompts."""
    return 0.0 if number(prompt) < 0.9 else right(completion, answer)


def most(prompt: str, completion: str, answer: str) -> float:
    """Return 0 for all answers to 80 % of the prompts. Score the answers to the other prompts."""
    return 0.0 if number(prompt) < 0.8 else right(completion, answer)


def missing_60(prompt: str, completion: str, answer: str) -> float | None:
    """Return None, a missing score, for 60 % of the completions. Score the others."""
    return None if number(prompt, completion) < 0.6 else right(completion, answer)


def missing_90(prompt: str, completion: str, answer: str) -> float | None:
    """Return None, a missing score, for 90 % of the completions. Score the others."""
    return None if number(prompt, completion) < 0.9 else right(completion, answer)
