"""Checks that a reward model has the policy's tokenizer.

Rows go from the policy to the reward model as token ids, without being encoded again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError

FILE = "tokenizer.json"


def check_same(reward: Path, model: Path) -> None:
    """Raise PlanError if a reward model and a policy don't tokenize every text into the same ids.

    Compares the tokenizer.json of the two model folders. If either is missing, nothing is checked.
    """
    if reward.resolve() == model.resolve() or not ((reward / FILE).is_file() and (model / FILE).is_file()):
        return
    reward_ids, model_ids = _ids(reward / FILE), _ids(model / FILE)
    if reward_ids != model_ids:
        raise PlanError.of(
            "reward-tokens",
            f"the reward model {reward} uses other tokens than {model}",
            found=f"vocabularies of {len(reward_ids[0])} and {len(model_ids[0])} entries that differ",
            expected="one tokenizer for both, since rows are passed as token ids",
            remedy="use a reward model made from the same base, or score text with --reward file.py:function",
        )


def _ids(file: Path) -> tuple[Any, Any]:
    """Return (vocabulary, added tokens) from a tokenizer.json, which determine the ids for a string."""
    content = json.loads(file.read_text("utf-8"))
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return (content.get("model") or {}).get("vocab") or {}, added
