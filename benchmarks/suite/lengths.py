"""Lengths that every system is given, so that all do the same work: recorded once, from the answers of an
evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.errors import PlanError


def recorded_lengths(path: Path) -> list[int]:
    """The numbers of tokens of the sampled answers in a file of answers (docs/evaluation.md), adjacent for
    each prompt, in the order of the prompts. Raises PlanError for a file that has none."""
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
    """The error of a file without the lengths of answers."""
    return PlanError.of(
        "bench-record",
        f"'{path}' has no answers with their numbers of tokens",
        found=finding,
        expected="a file that an evaluation wrote",
        remedy="`rlflow eval MODEL --eval-samples 8` writes one",
    )
