"""Which parts of a run can be streamed, by what its backends and rewards declare; nothing is loaded to know."""

from __future__ import annotations

from rlflow.compiler.graph.model import Graph
from rlflow.compiler.plan import Streaming
from rlflow.config.options import Options
from rlflow.config.roles.rewards import RewardNames
from rlflow.config.roles.roles import Roles, usual
from rlflow.training.protocols import GivesChunks


def streaming(graph: Graph, roles: Roles, rewards: RewardNames, options: Options) -> Streaming:
    """How rows may be streamed with ``--stream``. ``roles``: those that are models. A reward function scores row by row; a reward model
    does where its backend is exact by row."""
    if options.stream < 2:
        return Streaming()
    samplers = {name for name, role in roles.items() if role.generator.offers(GivesChunks)}
    exact = {name for name, role in roles.items() if role.trainer.can.row_exact}
    scorers = {use.name for use in graph.roles if use.rewards and use.name not in roles
               and (rewards.functions_only(use.name) or usual(options.backend, "trainer").row_exact)}  # fmt: skip
    return Streaming(options.stream, frozenset(samplers), frozenset(exact | scorers))
