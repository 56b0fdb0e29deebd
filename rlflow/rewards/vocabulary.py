"""Checks that a reward model has the tokenizer of the policy, since rows go from one to the other as token
ids and are never encoded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError

FILE = "tokenizer.json"


def check_same(reward: Path, model: Path) -> None:
    """Raises PlanError where the folders of a reward model and a policy both have a tokenizer.json, and these
    give a text different ids."""
    if reward.resolve() == model.resolve() or not ((reward / FILE).is_file() and (model / FILE).is_file()):
        return
    reward_ids, model_ids = _ids(reward / FILE), _ids(model / FILE)
    if reward_ids != model_ids:
        raise PlanError.of(
            "reward-tokens",
            f"the reward model {reward} reads other tokens than {model} writes",
            found=f"vocabularies of {len(reward_ids[0])} and {len(model_ids[0])} entries that differ",
            expected="one tokenizer for both, since rows are handed over as token ids",
            remedy="use a reward model made from the same base, or judge text with --reward file.py:function",
        )


def _ids(file: Path) -> tuple[Any, Any]:
    """(vocabulary, added tokens) of a tokenizer.json, which together decide the ids of a text."""
    content = json.loads(file.read_text("utf-8"))
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return (content.get("model") or {}).get("vocab") or {}, added
