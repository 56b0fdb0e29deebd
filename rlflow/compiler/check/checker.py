"""Judging an algorithm before anything is started: at the settings given, and with each setting changed
alone.

Here too: stages with side effects, and whether the weights of rewards reach what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.settings import override_flow, variants
from rlflow.author.stage import Stage
from rlflow.compiler.check.chance import chance_problems
from rlflow.compiler.check.rewarded import reward_problems
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.graph.model import Column, Node, Op
from rlflow.compiler.trace.compile import Program, TraceOptions, TraceResult, all_nodes, trace, used_nodes
from rlflow.errors import FlowError, PlanError, Problem


def weight_problems(program: Program) -> Iterator[Problem]:
    """Errors of weights that do nothing: those of rewards whose scores are divided by their own deviation,
    which takes any factor out, in a flow that does not ask for the weight."""
    nodes = list(all_nodes(program.graph.nodes))
    for node in nodes:
        weight = program.weights.get(node.role or "", 1.0)
        if (
            node.op is Op.REWARD
            and weight != 1
            and node.role not in program.weighed
            and _divided(program, node, nodes)
        ):
            yield Problem(
                "reward-weight",
                f"the weight {weight:g} of '{node.role}' does nothing: its scores are divided by their "
                "deviation in each group",
                node.place,
                found="scores that `compare` alone reads",
                expected=f"a flow that reads {node.role}.weight, or none",
                remedy="weigh the advantages: a stage with weight=reward.weight, as in "
                "algorithms/gdpo.py; or leave the weight out",
            )


def _divided(program: Program, reward: Node, nodes: list[Node]) -> bool:
    """Whether a reward's scores are read by nothing but `compare` with its deviation."""
    # needs torch, which a flow that is refused need not load
    from rlflow.author.functional.groups import compare

    scores = {Column(reward.id, output.name) for output in reward.outputs}
    readers = [node for node in nodes if scores & {item.column for item in node.inputs}]
    return bool(readers) and all(
        program.functions.get(node.name) is compare and program.settings[node.name].get("deviation", True)
        for node in readers
    )


def side_effect_problems(program: Program) -> Iterator[Problem]:
    """A warning for each stage with side effects that the flow calls, at its first call, and a note for one
    that a plan of several ranks refuses."""
    warned: set[str] = set()
    for node in used_nodes(program.graph):
        stage = program.functions.get(node.name)
        if not isinstance(stage, Stage) or stage.pure or stage.digest in warned:
            continue
        warned.add(stage.digest)
        held = f", but for the weights of '{stage.on}'" if stage.on else ""
        yield Problem(
            "side-effects",
            f"stage '{stage.name}' has side effects that no checkpoint holds",
            node.place,
            stage.place,
            found=f"pure=False{held}",
            expected="a run that a checkpoint holds whole, so that `rlflow resume` goes on with it",
            remedy="keep numbers in @flow(state=…); without side effects, leave pure=False out; else a "
            "resumed run, and one that recovers from a lost worker, starts without them",
            severity="warning",
        )
        if stage.on and node.dispatch != "ALL":
            yield Problem(
                "lone-change",
                f"on several ranks stage '{stage.name}' would not change the weights of '{stage.on}' alike",
                node.place,
                stage.place,
                found=f"dispatch={node.dispatch}, pure=False",
                expected="dispatch=ALL, without which a pool of several ranks is refused",
                remedy="write dispatch=ALL; nothing, if the role always has one rank",
                severity="note",
            )


@dataclass(frozen=True)
class Report:
    """The findings of `check`."""

    program: Program | None  # None where the flow could not be traced to its end
    problems: tuple[Problem, ...]
    # those of `problems` that reading and calling the author's own functions showed
    of_functions: tuple[Problem, ...] = ()

    @cached_property
    def errors(self) -> tuple[Problem, ...]:
        """The problems for which a run would be refused."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings and notes may be there."""
        return not self.errors


def check(
    flow: Flow,
    hp: Any = None,
    options: TraceOptions | None = None,
    *,
    staleness: int = 0,
    with_variants: bool = True,
    bound: Callable[[Program], Iterable[Problem]] = lambda program: (),
) -> Report:
    """All problems of a flow, errors first. ``bound``: problems of what flags bind to its roles."""
    problems: list[Problem] = []
    try:
        hp = hp if hp is not None else flow.parameters.hp
        hp = override_flow(hp, {}) if hp is not None else None
    except FlowError as error:
        return Report(None, error.problems)
    except PlanError as error:  # a value out of its range; what the flow does with it is judged all the same
        problems += error.problems
    traced = trace(flow, hp, options)
    if traced.program:
        traced = replace(traced, problems=(*traced.problems, *bound(traced.program)))
    of_functions = function_problems(traced)
    problems += traced.problems
    if traced.program:
        problems += stale_problems(traced.program, staleness)
        problems += of_functions
    if with_variants:
        problems += variant_problems(flow, hp, options, problems)
    rank = {"error": 0, "warning": 1, "note": 2}
    problems.sort(key=lambda problem: (rank[problem.severity], problem.place.line if problem.place else 0))
    return Report(traced.program, tuple(problems), tuple(of_functions))


def function_problems(traced: TraceResult) -> list[Problem]:
    """Problems of the author's own functions that the graph does not show. Needs a flow whose graph is sound,
    since a loss reads its columns."""
    if traced.program is None or any(problem.severity == "error" for problem in traced.problems):
        return []
    # needs torch, which a flow that is refused need not load
    from rlflow.compiler.check.losses import loss_problems
    from rlflow.compiler.check.stages import stage_problems

    problems = [
        *chance_problems(traced.program),
        *side_effect_problems(traced.program),
        *stage_problems(traced.program),
        *loss_problems(traced.program),
        *weight_problems(traced.program),
    ]
    sound = not any(problem.severity == "error" for problem in problems)
    return [*problems, *reward_problems(traced.program)] if sound else problems


def variant_problems(
    flow: Flow, hp: Any, options: TraceOptions | None, known: list[Problem]
) -> Iterator[Problem]:
    """Columns that are read and not given when one setting has another value. Any other failure drops the
    variant: such a value is not meant."""
    reported = {(problem.code, problem.message) for problem in known}
    for change, changed in variants(hp):
        missing = [
            p
            for p in trace(flow, changed, options).problems
            if p.severity == "error" and (p.code, p.message) not in reported
        ]
        if all(problem.code == "missing-column" for problem in missing):
            reported |= {(problem.code, problem.message) for problem in missing}
            yield from (replace(problem, variant=change) for problem in missing)
