"""Whether a reward model reads the tokens that a policy writes: rows are handed over as token ids, never encoded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError

FILE = "tokenizer.json"


def check_same(reward: Path, model: Path) -> None:
    """Raises PlanError where both folders have a tokenizer.json and these give texts other ids."""
    if reward.resolve() == model.resolve() or not ((reward / FILE).is_file() and (model / FILE).is_file()):
        return
    ids, own = _ids(reward / FILE), _ids(model / FILE)
    if ids != own:
        raise PlanError.of("reward-tokens", f"the reward model {reward} reads other tokens than {model} writes",
                           found=f"vocabularies of {len(ids[0])} and {len(own[0])} entries that differ",
                           expected="one tokenizer for both, since rows are handed over as token ids",
                           remedy="use a reward model made from the same base, or judge text with --reward file.py:function")


def _ids(file: Path) -> tuple[Any, Any]:
    """What decides ids: the vocabulary, and the tokens added to it."""
    content = json.loads(file.read_text("utf-8"))
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return (content.get("model") or {}).get("vocab") or {}, added
