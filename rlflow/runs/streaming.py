"""What of a run may be streamed: asked of its backends and rewards, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.given.backends import backend
from rlflow.given.flags import Given
from rlflow.graph.model import Graph, RoleUse
from rlflow.plan import Streaming
from rlflow.rewards.spec import parse_reward


def streaming(graph: Graph, models: Sequence[RoleUse], given: Given) -> Streaming:
    """``models``: the roles that are models. A reward function judges row by row; a model does where its backend says so."""
    if given.options.stream < 2:
        return Streaming()
    by = {use.name for use in models if hasattr(_half(use.name, "generator", given), "generate_chunks")}
    exact = {use.name for use in models if _row_exact(_half(use.name, "trainer", given))}
    names = {use.name for use in models}
    functions = {use.name for use in graph.roles if use.rewards and use.name not in names and _by_row(use.name, given)}
    return Streaming(given.options.stream, frozenset(by), frozenset(exact | functions))


def _half(role: str, half: str, given: Given) -> Any:
    """The class, None where the backend has none."""
    module = backend(given.backend(role, half))
    return getattr(module, half.capitalize(), None)


def _row_exact(trainer: Any) -> bool:
    return bool(getattr(trainer, "row_exact", False))


def _by_row(role: str, given: Given) -> bool:
    own = given.roles.get(role, {}).get("reward")
    specs = [parse_reward(text) for text in ([str(own)] if own else given.options.reward)]
    return all(spec.kind != "model" for spec in specs) or _row_exact(getattr(backend(given.options.backend), "Trainer", None))
