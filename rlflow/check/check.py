"""Judging an algorithm before anything is started: at the settings given, and with each setting changed alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.loss import Loss
from rlflow.author.settings import override, variants
from rlflow.errors import FlowError, PlanError, Problem
from rlflow.graph.model import Column, Graph, Node, Op
from rlflow.trace.compile import Options, Program, trace


@dataclass(frozen=True)
class Report:
    """What `check` found. ``program`` is None where the flow could not be traced to its end."""

    program: Program | None
    problems: tuple[Problem, ...]

    @cached_property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def ok(self) -> bool:
        return not self.errors


def check(flow: Flow, hp: Any = None, options: Options | None = None, *, staleness: int = 0, with_variants: bool = True) -> Report:
    """All problems of a flow, errors first."""
    problems: list[Problem] = []
    try:
        hp = hp if hp is not None else flow.parameters.hp
        hp = override(hp, {}, "hp.") if hp is not None else None
    except FlowError as error:
        return Report(None, error.problems)
    except PlanError as error:  # a value out of its range; what the flow does with it is judged all the same
        problems += error.problems
    traced = trace(flow, hp, options)
    problems += traced.problems
    if traced.program:
        problems += stale_problems(traced.program, staleness)
    if with_variants:
        problems += variant_problems(flow, hp, options, problems)
    rank = {"error": 0, "warning": 1, "note": 2}
    return Report(traced.program, tuple(sorted(problems, key=lambda p: (rank[p.severity], p.place.line if p.place else 0))))


def variant_problems(flow: Flow, hp: Any, options: Options | None, known: list[Problem]) -> Iterator[Problem]:
    """Columns that are read and not given when one setting has another value. Any other failure drops the variant: such a value is
    not meant."""
    seen = {(problem.code, problem.message) for problem in known}
    for change, changed in variants(hp):
        found = [p for p in trace(flow, changed, options).problems if p.severity == "error" and (p.code, p.message) not in seen]
        if all(problem.code == "missing-column" for problem in found):
            seen |= {(problem.code, problem.message) for problem in found}
            yield from (replace(problem, variant=change) for problem in found)


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
    """Whether a column that the loss reads depends on `sampled_logprobs`."""
    from_sampling = depends_on_sampling(graph)
    return any(item.column in from_sampling for item in update.inputs)


def depends_on_sampling(graph: Graph) -> set[Column]:
    """Columns computed from `sampled_logprobs`; reading the sampled tokens alone does not count."""
    found: set[Column] = set()
    for node in graph.nodes:
        inner = depends_on_sampling(node.body) if node.body else set()
        names = {item.parameter for item in (node.body.results if node.body else ()) if item.column in inner}
        if node.op is Op.GENERATE:
            names = {"sampled_logprobs"}
        elif node.op is Op.STAGE and any(item.column in found for item in node.inputs):
            names = {output.name for output in node.outputs}
        found |= {Column(node.id, name) for name in names}
    return found
