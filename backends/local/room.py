"""Check that a model has enough positions for prompts and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.errors import PlanError


def positions(config: Any) -> int | None:
    """Return the maximum number of positions according to a model's config, or None if it doesn't say."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else None


def longest(config: Any) -> int | None:
    """Return the length in tokens of the longest row that a model accepts, including the prompt, or None if
    it's unknown.

    The config's number is always multiplied by the scaling factor of the rotary positions, even though some
    configs already include it. This way, only rows that are certain to be too long are refused.
    """
    known = positions(config)
    return known and int(known * _stretch(getattr(config.get_text_config(), "rope_parameters", None)))


def _stretch(rope: Any) -> float:
    """Return the largest scaling factor of the model's rotary positions. Each kind of layer may have its
    own."""
    if not isinstance(rope, dict):
        return 1.0
    return max([float(rope.get("factor") or 1.0), *(_stretch(own) for own in rope.values())])


def check_room(
    prompts: Sequence[int], max_tokens: int, most: int | None, limit: str, remedy: str = ""
) -> None:
    """Check that each prompt leaves room for ``max_tokens`` more tokens.

    prompts: the length of each prompt in tokens. limit: describes ``most`` in the message. remedy: an extra
    remedy for the message. Raises ValueError for an empty prompt, and PlanError if a row could have more than
    ``most`` tokens.
    """
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
        "generate: a response would not fit after its prompt",
        found=f"a prompt of {prompt} tokens and max_tokens {max_tokens}",
        expected=f"at most {most} tokens together: {limit}",
        remedy=shorter + remedy,
    )
