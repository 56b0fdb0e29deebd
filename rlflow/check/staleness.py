"""Rows of older weights: what a flow must do, and where its roles must be, for rollouts to lag behind training.

With a bound of K, rows of iteration i may be sampled with weights of iteration i-1-K or later.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.author.loss import Loss
from rlflow.errors import Problem, listed
from rlflow.graph.model import Column, Graph, Node, Op
from rlflow.placement import GENERATORS, REST, Placement
from rlflow.trace.compile import Program


def stale_problems(program: Program, staleness: int) -> Iterator[Problem]:
    """Rows sampled with older weights need a loss that corrects for it."""
    if staleness < 0:
        yield Problem("staleness-range", "the staleness bound allows no rows at all", found=f"--staleness {staleness}",
                      expected="a number of iterations, at least 0 (0: sample with the newest weights)", remedy="--staleness 0")
    if staleness < 1:
        return
    generates = {use.name for use in program.graph.roles if use.generates}
    for node in program.graph.nodes:
        if node.op is Op.UPDATE and node.role in generates and not corrects(program.graph, node):
            loss = program.functions[node.name]
            assert isinstance(loss, Loss)
            yield Problem("stale-uncorrected", f"--staleness {staleness}: the loss '{loss.name}' trains '{node.role}' on rows of older "
                          "weights without correcting for them", node.place, loss.place,
                          found=f"columns {', '.join(loss.signature.column_names)}",
                          expected="a column that depends on sampled_logprobs",
                          remedy="add before the update:  batch |= truncated_weights(batch, cap=2.0)\n            and in the loss:  "
                                 "take `weights` and multiply the value by it")


def corrects(graph: Graph, update: Node) -> bool:
    """Whether a column that the loss reads depends on `sampled_logprobs` of the rows that it is about."""
    from_sampling = depends_on_sampling(graph, update.axis)
    return any(item.column in from_sampling for item in update.inputs)


def depends_on_sampling(graph: Graph, rows: int) -> set[Column]:
    """Columns computed from `sampled_logprobs` of the axis ``rows``. Reading the sampled tokens alone does not count, nor do the
    log-probs of other rows, such as a baseline's."""
    found: set[Column] = set()
    for node in graph.nodes:
        names: set[str] = set()
        if node.body and node.makes == rows:
            inner = depends_on_sampling(node.body, node.body.rows)
            names = {item.parameter for item in node.body.results if item.column in inner}
        elif node.op is Op.GENERATE and node.makes == rows:
            names = {output.name for output in node.outputs if output.source == "sampled_logprobs"}
        elif node.op is Op.STAGE and any(item.column in found for item in node.inputs):
            names = {output.name for output in node.outputs}
        found |= {Column(node.id, name) for name in names}
    return found


def overlap_problems(graph: Graph, placement: Placement | None, staleness: int) -> Iterator[Problem]:
    """A role can only sample ahead of its own training where its generator is on another pool than its trainer."""
    ahead = [use.name for use in graph.roles if use.trained and use.generates] if staleness >= 1 else []
    if placement is None and ahead:
        yield Problem("staleness", "a run in one process has one pool, so its rollouts are never stale", found=f"--staleness {staleness}",
                      expected=f"pools that can overlap: the generator of {listed(ahead)} on one, its trainer on another",
                      remedy=f"--pools {REST}=1,{GENERATORS}=1, or leave --staleness out")
    for role in ahead if placement else ():
        pool = placement.trainers.get(role) if placement else None
        if placement and pool is not None and pool == placement.generators.get(role):
            yield Problem("staleness", f"the trainer and the generator of role '{role}' take turns on pool '{pool}', so its rollouts are "
                          "never stale", found=f"--staleness {staleness}, both halves on '{pool}'", expected="two pools that can overlap",
                          remedy=_apart(role, pool, placement))


def _apart(role: str, pool: str, placement: Placement) -> str:
    other = next((name for name in placement.pools if name != pool), None)
    if other is not None:
        return f"--{role}.generator.pool {other}"
    ranks = placement.pools[pool]
    return f"--pools {REST}={max(ranks // 2, 1)},{GENERATORS}={max(ranks - ranks // 2, 1)}, or leave --staleness out"
