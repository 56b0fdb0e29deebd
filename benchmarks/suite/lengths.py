"""Read response lengths from an evaluation, so that all compared systems can do the same work."""

from __future__ import annotations

import json
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.errors import PlanError


def recorded_lengths(path: Path) -> list[int]:
    """Return the lengths, in tokens, of the sampled answers in a file of answers (docs/evaluation.md).

    The lengths are in the order of the prompts. Lengths for the same prompt are adjacent. Raises PlanError if
    the file has no lengths.
    """
    try:
        answers = [json.loads(line)["sampled"] for line in durable.read(path).splitlines()]
        lengths = [int(one["tokens"]) for several in answers for one in several]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise no_answers(path, f"{type(error).__name__}: {error}") from error
    if not lengths or min(lengths) < 1:
        raise no_answers(
            path, f"{len(lengths)} lengths" + (f", one of them {min(lengths)}" if lengths else "")
        )
    return lengths


def no_answers(path: Path, finding: str) -> PlanError:
    """Return the PlanError for a file without lengths of answers. ``finding``: what was found instead."""
    return PlanError.of(
        "bench-record",
        f"'{path}' has no answers with their numbers of tokens",
        found=finding,
        expected="a file that an evaluation wrote",
        remedy="`rlflow eval MODEL --eval-samples 8` writes one",
    )
