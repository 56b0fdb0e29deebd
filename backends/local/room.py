"""Whether responses fit behind their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.errors import PlanError


def positions(config: Any) -> int | None:
    """Tokens that a model has positions for, as its config says; None where it does not."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else None


def longest(config: Any) -> int | None:
    """Tokens that no row of a model may pass, prompt included. What rotary positions are stretched by counts,
    also where the config has counted it already: what is refused is beyond all doubt."""
    known = positions(config)
    return known and int(known * _stretch(getattr(config.get_text_config(), "rope_parameters", None)))


def _stretch(rope: Any) -> float:
    """The largest factor of a model's rotary positions, of which kinds of layers may have some each."""
    if not isinstance(rope, dict):
        return 1.0
    return max([float(rope.get("factor") or 1.0), *(_stretch(own) for own in rope.values())])


def check_room(
    prompts: Sequence[int], max_tokens: int, most: int | None, limit: str, remedy: str = ""
) -> None:
    """``prompts``: tokens of each. Raises ValueError where one is empty, and PlanError where one with
    ``max_tokens`` behind it is longer than ``most``; ``limit`` says what that is, ``remedy`` what else
    helps."""
    if not all(prompts):
        raise ValueError(
            "prompt_tokens: found an empty prompt, expected at least one token (such as the tokenizer's "
            "BOS token)"
        )
    prompt = max(prompts, default=0)
    if most is None or not prompts or prompt + max_tokens <= most:
        return
    shorter = (
        f"--data.max_prompt {most - max_tokens}, or a smaller max_tokens"
        if max_tokens < most
        else "a smaller max_tokens"
    )
    raise PlanError.of(
        "no-room",
        "generate: a response would not fit behind its prompt",
        found=f"a prompt of {prompt} tokens and max_tokens {max_tokens}",
        expected=f"at most {most} tokens together: {limit}",
        remedy=shorter + remedy,
    )
