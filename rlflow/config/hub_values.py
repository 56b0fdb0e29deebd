"""Resolve Hub names in a run's values. Models become folders in the cache, and data gets pinned names."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.config.flags import SET
from rlflow.data import hub
from rlflow.data.data_spec import parse_source
from rlflow.data.hub_names import COMMIT, HubName, hub_data, hub_model
from rlflow.rewards.reward_spec import model_text

PIN = re.compile(r"(.*)(@[0-9a-f]{40})(.*)", re.DOTALL)
HUB_FLAGS = ("model", "reward", "data", "eval")
OF_ROLES = ("model", "reward")  # flags that can also be set for a single role


@dataclass(frozen=True)
class Resolved:
    """A run's values with their Hub names resolved."""

    values: dict[str, Any]  # each Hub name pinned to the commit it was resolved to
    local: dict[str, Any]  # the same, with each model's name replaced by its folder
    models: dict[Path, HubName] = field(default_factory=dict)  # folder → the pinned name of its model

    def written(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the original values that name something on the Hub."""
        return {name: value for name, value in values.items() if self.values[name] is not value}


def resolve_hub_names(values: Mapping[str, Any], flags: Container[str] = HUB_FLAGS) -> Resolved:
    """Resolve the Hub names in a run's values.

    A model's folder only has its config and tokenizer at first; ``hub.complete_model`` fetches the weights.
    Data is pinned but not fetched. If there are no Hub names, nothing is imported or requested. ``flags``:
    the flags to look at. Raises PlanError for a name that can't be resolved.
    """
    resolved = Resolved(dict(values), dict(values))
    for name, value in values.items():
        flag = "" if name.startswith(("hp.", "data.")) else name.rpartition(".")[2]
        if flag in FLAGS and flag in flags and (flag == name or flag in OF_ROLES):
            _replace(resolved, name, value, FLAGS[flag])
    return resolved


def same_name(written: Any, pinned: Any) -> bool:
    """Whether the value ``written`` could have been resolved to ``pinned``."""
    if isinstance(written, list | tuple) and isinstance(pinned, list | tuple):
        return len(written) == len(pinned) and all(map(same_name, written, pinned))
    if written == pinned or not isinstance(written, str) or not isinstance(pinned, str):
        return bool(written == pinned)
    before, pin, after = next(iter(PIN.findall(pinned)), ("", "", ""))
    if not pin or not (written.startswith(before) and written.endswith(after)):
        return False
    revision = written[len(before) : len(written) - len(after)]
    return not revision or (revision.startswith("@") and COMMIT.fullmatch(revision[1:]) is None)


def _replace(
    resolved: Resolved, name: str, value: Any, change: Callable[[Resolved, str], tuple[str, str]]
) -> None:
    """Apply ``change``, which returns (pinned, local), to a string or to each string of a list."""
    if isinstance(value, str):
        resolved.values[name], resolved.local[name] = change(resolved, value)
    elif isinstance(value, list | tuple):
        both = [change(resolved, each) if isinstance(each, str) else (each, each) for each in value]
        if any(pinned != each for (pinned, _), each in zip(both, value, strict=True)):
            resolved.values[name] = tuple(pinned for pinned, _ in both)
        if any(local != each for (_, local), each in zip(both, value, strict=True)):
            resolved.local[name] = tuple(local for _, local in both)


def _model(resolved: Resolved, text: str) -> tuple[str, str]:
    name = hub_model(text)
    if name is None:
        return text, text
    pinned = hub.pinned(name)
    folder = hub.described_model(pinned)
    resolved.models[folder] = pinned
    return str(pinned), str(folder)


def _reward(resolved: Resolved, text: str) -> tuple[str, str]:
    body = model_text(text)
    pinned, folder = _model(resolved, body)
    rest = text.removeprefix(body)
    return f"{pinned}{rest}", f"{folder}{rest}"


def _data(resolved: Resolved, text: str) -> tuple[str, str]:
    source = parse_source(text)
    name = hub_data(source.path)
    pinned = source.at(str(hub.pinned(name))) if name else text
    return pinned, pinned


def _evaluation_set(resolved: Resolved, text: str) -> tuple[str, str]:
    parts = SET.fullmatch(text)
    name = hub_data(parts[2]) if parts else None
    pinned = f"{parts[1]}={hub.pinned(name)}" if parts and name else text
    return pinned, pinned


# flag → the function that resolves one of its strings
FLAGS: Mapping[str, Callable[[Resolved, str], tuple[str, str]]] = {
    "model": _model,
    "reward": _reward,
    "data": _data,
    "eval": _evaluation_set,
}
