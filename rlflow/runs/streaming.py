"""What of a run may be streamed: what its backends and rewards say, before anything is loaded."""

from __future__ import annotations

from rlflow.binding.roles import Roles, row_exact
from rlflow.config.flags import RunConfig
from rlflow.graph.model import Graph
from rlflow.plan import Streaming
from rlflow.rewards.spec import parse_reward


def streaming(graph: Graph, roles: Roles, given: RunConfig) -> Streaming:
    """``roles``: those that are models. A reward function judges row by row; a model does where its backend says so."""
    if given.options.stream < 2:
        return Streaming()
    by = {name for name, role in roles.items() if role.generator.can.chunks}
    exact = {name for name, role in roles.items() if role.trainer.can.row_exact}
    functions = {use.name for use in graph.roles if use.rewards and use.name not in roles and _by_row(use.name, given)}
    return Streaming(given.options.stream, frozenset(by), frozenset(exact | functions))


def _by_row(role: str, given: RunConfig) -> bool:
    own = given.roles.get(role, {}).get("reward")
    specs = [parse_reward(text) for text in ([str(own)] if own else given.options.reward)]
    return all(spec.kind != "model" for spec in specs) or row_exact(given.options.backend)
