"""Whether the weights of ``*rewards`` reach what is learned."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.compiler.graph.model import Column, Node, Op
from rlflow.compiler.trace.compile import Program, all_nodes
from rlflow.errors import Problem


def weight_problems(program: Program) -> Iterator[Problem]:
    """Errors of weights that do nothing: those of rewards whose scores are divided by their own deviation, which takes any factor out, in a
    flow that does not ask for the weight."""
    nodes = list(all_nodes(program.graph.nodes))
    for node in nodes:
        weight = program.weights.get(node.role or "", 1.0)
        if node.op is Op.REWARD and weight != 1 and node.role not in program.weighed and _divided(program, node, nodes):
            yield Problem(
                "reward-weight", f"the weight {weight:g} of '{node.role}' does nothing: its scores are divided by their deviation in each "
                "group", node.place, found="scores that `compare` alone reads", expected=f"a flow that reads {node.role}.weight, or none",
                remedy="weigh the advantages: a stage with weight=reward.weight, as in algorithms/gdpo.py; or leave the weight out")


def _divided(program: Program, reward: Node, nodes: list[Node]) -> bool:
    """Whether a reward's scores are read by nothing but `compare` with its deviation."""
    from rlflow.author.functional.groups import compare  # needs torch, which a flow that is refused need not load

    scores = {Column(reward.id, output.name) for output in reward.outputs}
    readers = [node for node in nodes if scores & {item.column for item in node.inputs}]
    return bool(readers) and all(program.functions.get(node.name) is compare and program.settings[node.name].get("deviation", True)
                                 for node in readers)  # fmt: skip
