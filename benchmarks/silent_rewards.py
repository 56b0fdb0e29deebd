"""A reward function that judges rows in batches of like length, as one does for a reward model, which then
pads least: with the scores put back into the order of the rows, and without. Both as OpenRLHF calls
functions, which rlflow takes too, and as TRL calls them."""

from __future__ import annotations

from typing import Any

TOGETHER = 16  # responses that are judged at once


def judge(responses: list[str], answers: list[str]) -> list[float]:
    """1 for each right answer; the place of the model that would judge them together."""
    return [
        float(response.strip() == answer.strip()) for response, answer in zip(responses, answers, strict=True)
    ]


def by_length(responses: list[str], answers: list[str]) -> tuple[list[int], list[float]]:
    """Which row is at each place of the order of lengths, and the score at each place."""
    order = sorted(range(len(responses)), key=lambda row: len(responses[row]))
    scores = []
    for start in range(0, len(order), TOGETHER):
        part = order[start : start + TOGETHER]
        scores += judge([responses[row] for row in part], [answers[row] for row in part])
    return order, scores


def in_order(responses: list[str], answers: list[str]) -> list[float]:
    """The sound function: each score goes back to its row."""
    order, scores = by_length(responses, answers)
    return [score for _, score in sorted(zip(order, scores, strict=True))]


def misplaced(responses: list[str], answers: list[str]) -> list[float]:
    """The fault: the scores stay in the order of lengths."""
    return by_length(responses, answers)[1]


def reward_in_order(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """The sound function as OpenRLHF calls it; a query is a prompt with its response."""
    return in_order(
        [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)], labels
    )


def reward_misplaced(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """The fault as OpenRLHF calls it."""
    return misplaced(
        [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)], labels
    )


def trl_in_order(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The sound function as TRL calls it."""
    return in_order(completions, answer)


def trl_misplaced(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The fault as TRL calls it."""
    return misplaced(completions, answer)
