"""The flow behind `rlflow eval FOLDER`: a model that answers prompts, and learns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from rlflow.author.flow import Flow


@dataclass(frozen=True)
class Answering:
    """How answers are sampled, beside what ``--actor.generate.NAME`` says."""

    max_tokens: Annotated[int, Ge(1)] = 512  # of an answer; at most half of the model's positions, unless it is named


def answer(prompts: Any, actor: Any, hp: Any = Answering()) -> None:
    """Sample an answer to each prompt."""
    actor.generate(prompts, max_tokens=hp.max_tokens)


ANSWER = Flow(answer, trains=False)
