"""A reward function that scores rows sorted by length: a correct version and a faulty version.

Sorting is usual for a reward model, because batches of similar length need the least padding. The correct
version restores the order of the rows; the faulty one does not. Each version exists with the signature of
OpenRLHF, which rlflow also accepts, and with the signature of TRL.
"""

from __future__ import annotations

from typing import Any

TOGETHER = 16  # responses that are scored in one batch


def judge(responses: list[str], answers: list[str]) -> list[float]:
    """Return 1 for each right answer, otherwise 0. Stands in for a reward model that scores a batch."""
    return [
        float(response.strip() == answer.strip()) for response, answer in zip(responses, answers, strict=True)
    ]


def by_length(responses: list[str], answers: list[str]) -> tuple[list[int], list[float]]:
    """Return (row numbers sorted by length, scores in this order)."""
    order = sorted(range(len(responses)), key=lambda row: len(responses[row]))
    scores = []
    for start in range(0, len(order), TOGETHER):
        part = order[start : start + TOGETHER]
        scores += judge([responses[row] for row in part], [answers[row] for row in part])
    return order, scores


def in_order(responses: list[str], answers: list[str]) -> list[float]:
    """Return the scores in the order of the rows. This is the correct version."""
    order, scores = by_length(responses, answers)
    return [score for _, score in sorted(zip(order, scores, strict=True))]


def misplaced(responses: list[str], answers: list[str]) -> list[float]:
    """Return the scores in the order of lengths. This is the faulty version."""
    return by_length(responses, answers)[1]


def reward_in_order(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """The correct version with OpenRLHF's signature. A query is a prompt followed by its response."""
    return in_order(
        [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)], labels
    )


def reward_misplaced(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """The faulty version with OpenRLHF's signature."""
    return misplaced(
        [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)], labels
    )


def trl_in_order(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The correct version with TRL's signature."""
    return in_order(completions, answer)


def trl_misplaced(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The faulty version with TRL's signature."""
    return misplaced(completions, answer)
