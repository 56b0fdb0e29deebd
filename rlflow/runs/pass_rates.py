"""What is said of several answers to each prompt: mean@n, pass@k and maj@k."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answers:
    """The sampled answers to one prompt, in the order in which they were drawn."""

    scores: Sequence[float]  # NaN where the score is missing
    extracted: Sequence[str | None]  # what is voted with; None for an answer that has no vote

    @property
    def right(self) -> list[bool]:
        """Whether each passes: whether its score is 1.0."""
        return [score == 1.0 for score in self.scores]


def repeated_figures(prompts: Sequence[Answers]) -> dict[str, float]:
    """mean@n, pass@k for powers of two up to n, and maj@k for those from 2 on, of prompts with n answers each. mean@n is the mean of the
    scores, without missing ones; it is left out where all are missing, and maj@k where no answer has a vote."""
    count = len(prompts[0].scores)
    scores = [score for answers in prompts for score in answers.scores if not math.isnan(score)]
    figures = {f"mean@{count}": sum(scores) / len(scores)} if scores else {}
    sizes = powers_of_two(count)
    figures |= {f"pass@{k}": _mean([pass_at(count, sum(answers.right), k) for answers in prompts]) for k in sizes}
    if any(extracted is not None for answers in prompts for extracted in answers.extracted):
        figures |= {f"maj@{k}": _mean([majority_at(answers, k) for answers in prompts]) for k in sizes if k > 1}
    return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on, up to ``most``."""
    return [2**exponent for exponent in range(most.bit_length())]


def pass_at(samples: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, drawn without replacement from ``samples`` of which ``right`` are: the unbiased estimate
    of Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at(answers: Answers, k: int) -> float:
    """The share of lots of k answers whose most frequent one is right. Lots are taken in the order of the draws and share no answer, so
    that the estimate is unbiased; answers that fill no lot are left out."""
    right = answers.right
    lots = [range(start, start + k) for start in range(0, len(right) - k + 1, k)]
    return _mean([majority([answers.extracted[place] for place in lot], [right[place] for place in lot]) for lot in lots])


def majority(extracted: Sequence[str | None], right: Sequence[bool]) -> float:
    """The chance that a vote is right. Equal answers vote together; of several with most votes each wins as often; 0 where none votes. An
    answer that was judged both ways counts by its voters."""
    voters: dict[str, list[bool]] = defaultdict(list)
    for answer, hit in zip(extracted, right, strict=True):
        if answer is not None:
            voters[answer].append(hit)
    most = max(map(len, voters.values()), default=0)
    return _mean([sum(hits) / len(hits) for hits in voters.values() if len(hits) == most] or [0.0])
