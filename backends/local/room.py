"""Check that responses fit after their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.errors import PlanError


def positions(config: Any) -> int | None:
    """Return the number of positions that a model's config names; None if it names none."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else None


def longest(config: Any) -> int | None:
    """Return the longest row of a model, in tokens with the prompt. The factor of rotary positions always
    multiplies the config's number, even if the config includes it: only clear excess is refused."""
    known = positions(config)
    return known and int(known * _stretch(getattr(config.get_text_config(), "rope_parameters", None)))


def _stretch(rope: Any) -> float:
    """Return the largest factor of a model's rotary positions; each kind of layer may have its own."""
    if not isinstance(rope, dict):
        return 1.0
    return max([float(rope.get("factor") or 1.0), *(_stretch(own) for own in rope.values())])


def check_room(
    prompts: Sequence[int], max_tokens: int, most: int | None, limit: str, remedy: str = ""
) -> None:
    """Check that each prompt fits with ``max_tokens`` after it. prompts: tokens of each.

    Raises ValueError for an empty prompt, and PlanError if a row would be longer than ``most``. limit: a
    description of ``most``; remedy: a further remedy; both become part of the message."""
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
