"""Judging an algorithm before anything is started: at the settings given, and with each setting changed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.settings import override_flow, variants
from rlflow.compiler.check.chance import chance_problems
from rlflow.compiler.check.rewarded import reward_problems
from rlflow.compiler.check.side_effects import side_effect_problems
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.check.weighed import weight_problems
from rlflow.compiler.trace.compile import Program, TraceOptions, TraceResult, trace
from rlflow.errors import FlowError, PlanError, Problem


@dataclass(frozen=True)
class Report:
    """The findings of `check`."""

    program: Program | None  # None where the flow could not be traced to its end
    problems: tuple[Problem, ...]
    of_functions: tuple[Problem, ...] = ()  # those of `problems` that reading and calling the author's own functions showed

    @cached_property
    def errors(self) -> tuple[Problem, ...]:
        """The problems for which a run would be refused."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings and notes may be there."""
        return not self.errors


def check(
    flow: Flow, hp: Any = None, options: TraceOptions | None = None, *, staleness: int = 0, with_variants: bool = True,
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
    """Problems of the author's own functions that the graph does not show. Needs a flow whose graph is sound, since a loss reads its
    columns."""
    if traced.program is None or any(problem.severity == "error" for problem in traced.problems):
        return []
    from rlflow.compiler.check.losses import loss_problems  # needs torch, which a flow that is refused need not load
    from rlflow.compiler.check.stages import stage_problems

    problems = [*chance_problems(traced.program), *side_effect_problems(traced.program), *stage_problems(traced.program),
                *loss_problems(traced.program), *weight_problems(traced.program)]
    sound = not any(problem.severity == "error" for problem in problems)
    return [*problems, *reward_problems(traced.program)] if sound else problems


def variant_problems(flow: Flow, hp: Any, options: TraceOptions | None, known: list[Problem]) -> Iterator[Problem]:
    """Columns that are read and not given when one setting has another value. Any other failure drops the variant: such a value is
    not meant."""
    reported = {(problem.code, problem.message) for problem in known}
    for change, changed in variants(hp):
        missing = [p for p in trace(flow, changed, options).problems if p.severity == "error" and (p.code, p.message) not in reported]
        if all(problem.code == "missing-column" for problem in missing):
            reported |= {(problem.code, problem.message) for problem in missing}
            yield from (replace(problem, variant=change) for problem in missing)
