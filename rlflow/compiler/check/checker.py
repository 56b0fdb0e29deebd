"""Run all checks of an algorithm, both with its given settings and with each setting changed.

The checks of stages with side effects and of reward weights are in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.settings import override_flow, variants
from rlflow.author.stage import Stage
from rlflow.compiler.check.random_draws import draw_problems
from rlflow.compiler.check.rewarded import reward_problems
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.graph.due import due_sets
from rlflow.compiler.graph.model import Column, Node, Op, all_nodes, used_nodes
from rlflow.compiler.trace.compile import Program, TraceOptions, TraceResult, trace
from rlflow.errors import FlowError, PlanError, Problem


def weight_problems(program: Program) -> Iterator[Problem]:
    """Yield an error for each reward weight that has no effect.

    A weight cancels out if the scores are divided by their own standard deviation. Weights that the flow
    reads itself are not reported.
    """
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
                f"the weight {weight:g} of '{node.role}' has no effect: its scores are divided by their "
                "deviation in each group",
                node.place,
                found="scores that only `compare` reads",
                expected=f"a flow that reads {node.role}.weight, or no weight",
                remedy="weigh the advantages: a stage with weight=reward.weight, as in algorithms/gdpo.py; "
                "or remove the weight",
            )


def _divided(program: Program, reward: Node, nodes: list[Node]) -> bool:
    """Return True if only `compare` reads the reward's scores, and divides them by their deviation."""
    # imported here so that torch is not loaded for a flow with errors
    from rlflow.author.functional.groups import compare

    scores = {Column(reward.id, output.name) for output in reward.outputs}
    readers = [node for node in nodes if scores & {item.column for item in node.inputs}]
    return bool(readers) and all(
        program.functions.get(node.name) is compare and program.settings[node.name].get("deviation", True)
        for node in readers
    )


def side_effect_problems(program: Program) -> Iterator[Problem]:
    """Yield a warning for each stage with side effects, at its first call.

    Stages that can't be planned on several ranks also get a note.
    """
    warned: set[str] = set()
    for node in used_nodes(program.graph):
        stage = program.functions.get(node.name)
        if not isinstance(stage, Stage) or stage.pure or stage.digest in warned:
            continue
        warned.add(stage.digest)
        except_weights = f", except the weights of '{stage.on}'" if stage.on else ""
        yield Problem(
            "side-effects",
            f"stage '{stage.name}' has side effects that checkpoints do not store",
            node.place,
            stage.place,
            found=f"pure=False{except_weights}",
            expected="a run whose checkpoints are complete, so that `rlflow resume` can continue it",
            remedy="keep numbers in @flow(state=…). If the stage has no side effects, remove pure=False. "
            "Otherwise a run that is resumed, or that recovers from a lost worker, starts without "
            "these effects",
            severity="warning",
        )
        if stage.on and node.dispatch != "ALL":
            yield Problem(
                "lone-change",
                f"on several ranks, stage '{stage.name}' would change the weights of '{stage.on}' "
                "differently on each rank",
                node.place,
                stage.place,
                found=f"dispatch={node.dispatch}, pure=False",
                expected="dispatch=ALL, which pools of several ranks require",
                remedy="write dispatch=ALL; if the role always has one rank, change nothing",
                severity="note",
            )


@dataclass(frozen=True)
class Report:
    """The problems that `check` found."""

    program: Program | None  # None if the flow could not be traced to its end
    problems: tuple[Problem, ...]
    # the problems found by reading and calling the author's own functions
    of_functions: tuple[Problem, ...] = ()

    @cached_property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that keep a run from starting."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def ok(self) -> bool:
        """True if there are no errors. Warnings and notes are fine."""
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
    """Check a flow and report all problems, errors first.

    ``hp`` defaults to the flow's own settings. ``with_variants``: also check the flow with each setting
    changed. ``bound``: a function that yields the problems of rewards, environments and other objects that
    flags bind to roles.
    """
    problems: list[Problem] = []
    try:
        hp = hp if hp is not None else flow.parameters.hp
        hp = override_flow(hp, {}) if hp is not None else None
    except FlowError as error:
        return Report(None, error.problems)
    except PlanError as error:  # a value is out of range; the flow is still checked with it
        problems += error.problems
    traced = trace(flow, hp, options)
    if traced.program:
        traced = replace(traced, problems=(*traced.problems, *bound(traced.program)))
    of_functions = function_problems(traced)
    problems += traced.problems
    if traced.program:
        problems += stale_problems(traced.program, staleness)
        try:
            due_sets(traced.program.graph)
        except PlanError as error:
            problems += error.problems
        problems += of_functions
    if with_variants:
        problems += variant_problems(flow, hp, options, problems)
    rank = {"error": 0, "warning": 1, "note": 2}
    problems.sort(key=lambda problem: (rank[problem.severity], problem.place.line if problem.place else 0))
    return Report(traced.program, tuple(problems), tuple(of_functions))


def function_problems(traced: TraceResult) -> list[Problem]:
    """Return the problems found by calling the author's stages and losses on synthetic rows.

    If the graph has errors, nothing is called, because a loss can't be called without its columns.
    """
    if traced.program is None or any(problem.severity == "error" for problem in traced.problems):
        return []
    # imported here so that torch is not loaded for a flow with errors
    from rlflow.compiler.check.losses import loss_problems
    from rlflow.compiler.check.stages import stage_problems

    problems = [
        *draw_problems(traced.program),
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
    """Yield problems with missing columns that only occur if one setting has another value.

    Any other problems are ignored, since the author probably doesn't intend to use that value.
    """
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
