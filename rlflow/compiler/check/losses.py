"""Losses on trial: each is called a few times on made rows before anything is sampled, and what it returns is
judged.

A loss sees columns of the right kinds with arbitrary numbers, so only what numbers cannot excuse is an error:
what it reads of the model without asking for it, what it raises by its types, names and shapes, and the level
of what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.columns import Kind, Level
from rlflow.author.joint import LossTerm, terms
from rlflow.author.loss import Loss
from rlflow.author.node_options import UpdateOptions
from rlflow.author.stage import Stage
from rlflow.compiler.graph.ancestry import Merge, merge
from rlflow.compiler.graph.model import SETTING, Graph, Node, Op
from rlflow.compiler.trace.compile import Program
from rlflow.errors import Problem, listed
from rlflow.processes.user_frames import own_lines
from rlflow.training.objective import New

ROWS, TOKENS, PROMPT, GROUP = 4, 5, 3, 2  # of the made rows; adjacent GROUP rows are a group
LEVELS = {2: "token", 1: "row"}
# raised for numbers that are not meant, maybe
BY_VALUE = (ValueError, AssertionError, ArithmeticError, LookupError)
CAUSE = {
    "entropy": '@loss(new=("logprobs", "entropy"))',
    "values": '@loss(new="values")',
    "scores": '@loss(new="scores")',
    "logprobs": '@loss(new="logprobs")',
}


class Quantities:
    """The ``new`` that a loss is called with. As in a run, a quantity that the loss did not ask for is None;
    ``lacking`` has those that it read all the same."""

    def __init__(self, new: New) -> None:
        self._new = new
        self.lacking: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._new, name)
        if value is None:
            self.lacking.append(name)
        return value


@dataclass(frozen=True)
class Trial:
    """The outcome of calling a loss on made rows: its result, or the exception that it raised."""

    result: Any = None
    raised: Exception | None = None
    lacking: tuple[str, ...] = ()


def loss_problems(program: Program) -> Iterator[Problem]:
    """Problems that appear when the losses of all updates are called on made rows. A loss that reads columns
    whose kind is not known before a run is skipped."""
    for node in program.graph.nodes:
        loss = program.functions.get(node.name)
        if node.op is Op.UPDATE and isinstance(loss, Loss):
            for term in loss_terms(program, node, loss):
                kinds = column_kinds(program.graph, node, term.loss)
                if kinds is not None:
                    yield from _judged(node, term, kinds)


def loss_terms(program: Program, node: Node, loss: Loss) -> list[LossTerm]:
    """The losses of an update with their settings, of which those that are columns have made numbers."""
    return terms(
        loss, {**made_settings(node, loss), **program.settings[node.name]}, node.options(UpdateOptions).mean
    )


def made_settings(node: Node, function: Stage | Loss) -> dict[str, float]:
    """Numbers for settings that are columns: a default, or 0.5."""
    names = [
        item.parameter.removeprefix(SETTING) for item in node.inputs if item.parameter.startswith(SETTING)
    ]
    defaults = {name: function.signature.settings.get(name) for name in names}
    return {name: default if isinstance(default, float) else 0.5 for name, default in defaults.items()}


def column_kinds(graph: Graph, node: Node, function: Stage | Loss) -> dict[str, Kind] | None:
    """The columns that a stage or loss reads and finds, with their kinds as given; None where one is not
    known."""
    kinds = {}
    for item in node.inputs:
        giver = graph.nodes[item.column.node]
        kind = next((output.kind for output in giver.outputs if output.name == item.column.name), None)
        if item.parameter in function.signature.column_names:
            if kind is None or (kind.level is not Level.TEXT and kind.dtype is None):
                return None
            by_token = (
                merge(graph.axes, node.axis, giver.rows_axis, by_group=kind.level is Level.GROUP)
                is Merge.TOKENS
            )
            kinds[item.parameter] = replace(kind, level=Level.TOKEN) if by_token else kind
    return kinds


def _judged(node: Node, term: LossTerm, kinds: Mapping[str, Kind]) -> Iterator[Problem]:
    loss = term.loss
    first = tried(loss, kinds, term.settings)
    if first.raised is not None:
        yield _raised(node, loss, first)
        return
    problem = _result_problem(node, loss, first.result, term.mean)
    if problem is not None:
        yield problem
    elif "weights" in kinds and torch.equal(
        _value(first), _value(tried(loss, kinds, term.settings, weights=2.0))
    ):
        yield Problem(
            "weights-unused",
            f"loss '{loss.name}' takes `weights` and gives the same values whatever they are",
            node.place,
            loss.place,
            found="the same values at twice the weights",
            expected="values that the weights scale or mask",
            remedy="multiply the value by it: return -weights * gain, {…}; or take `weights` out of the "
            "parameters",
            severity="warning",
        )


def tried(loss: Loss, kinds: Mapping[str, Kind], settings: Mapping[str, Any], weights: float = 1.0) -> Trial:
    """The loss on made rows; ``weights`` scales the column of that name. Global chance is as it was
    afterwards."""
    chance = torch.Generator().manual_seed(0)
    columns = {name: column(name, kind, chance) for name, kind in sorted(kinds.items())}
    columns |= {"weights": columns["weights"] * weights} if "weights" in columns else {}
    new = Quantities(model_quantities(loss, chance))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            result = loss.function(new, *(columns.get(p.name) for p in loss.signature.columns), **settings)
        except Exception as error:
            return Trial(raised=error, lacking=tuple(new.lacking))
    return Trial(result)


def model_quantities(loss: Loss, chance: torch.Generator) -> New:
    """Random quantities in place of a model's, differentiable, for the loss to read."""
    quantities = {
        "logprobs": -_uniform((ROWS, TOKENS), chance),
        "entropy": _uniform((ROWS, TOKENS), chance),
        "values": _uniform((ROWS, TOKENS), chance) - 0.5,
        "scores": _uniform((ROWS,), chance) - 0.5,
    }
    return New(**{name: quantities[name].requires_grad_() for name in loss.new})


def column(name: str, kind: Kind, chance: torch.Generator) -> Any:
    """A column of made rows as a loss sees it: log-probs below 0, weights above, a mask with a hole and
    padding, pairs of rows."""
    shape = {Level.TOKEN: (ROWS, TOKENS), Level.PROMPT: (ROWS, PROMPT), Level.SCALAR: ()}.get(
        kind.level, (ROWS,)
    )
    if kind.level is Level.TEXT:
        return ["text"] * ROWS
    number = _uniform(shape, chance)
    if name == "mask":
        return torch.tensor(
            [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool
        )
    if name == "group":
        return torch.arange(ROWS) // GROUP
    if kind.family == "bool":
        return torch.arange(number.numel()).reshape(shape) % 2 == 0
    if kind.family != "float":
        return torch.ones(shape, dtype=getattr(torch, kind.dtype or "int64"))
    if name in ("weights", "temperature"):
        number = number + 0.5
    number = -number if "logprobs" in name else number - 0.5 if name in ("advantages", "scores") else number
    return number.to(getattr(torch, kind.dtype or "float32"))


def _uniform(shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=chance) + 0.01


def _value(trial: Trial) -> Tensor:
    result = trial.result[0] if isinstance(trial.result, tuple) else trial.result
    return result.detach() if isinstance(result, Tensor) else torch.tensor(float("nan"))


def _raised(node: Node, loss: Loss, trial: Trial) -> Problem:
    error = trial.raised
    assert error is not None
    lines = own_lines(error)
    by = f", raised by {lines[0]}" if lines else ""
    if trial.lacking:
        name = trial.lacking[-1]
        return Problem(
            "loss-quantity",
            f"loss '{loss.name}' reads new.{name}, which it does not ask the model for",
            node.place,
            loss.place,
            found=f"new.{name} is None{by}",
            expected=f"one of new.{', new.'.join(loss.new)}",
            remedy=f"write {CAUSE[name]}",
        )
    return Problem(
        "loss-raised",
        f"loss '{loss.name}' raises {type(error).__name__} on {ROWS} rows of {TOKENS} tokens with arbitrary "
        "numbers",
        node.place,
        loss.place,
        found=f"{type(error).__name__}: {error}{by}",
        expected="(value, metrics) for any rows",
        remedy="correct that line",
        severity="warning" if isinstance(error, BY_VALUE) else "error",
    )


def _result_problem(node: Node, loss: Loss, result: Any, mean: Any) -> Problem | None:
    """The problem with the value that a loss returned, None where there is none. A bare value counts as one
    without metrics."""
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})

    def wrong(message: str, finding: str, expected: str, remedy: str) -> Problem:
        return Problem(
            "loss-value",
            f"loss '{loss.name}' {message}",
            node.place,
            loss.place,
            found=finding,
            expected=expected,
            remedy=remedy,
        )

    if not isinstance(value, Tensor) or not isinstance(metrics, Mapping):
        return wrong(
            "does not return a value and metrics",
            _described(result),
            "(a tensor, a dict of metrics)",
            "return value, {} with one number per token or per row",
        )
    if value.dim() == 0:
        return wrong(
            "returns a number that is averaged already; the average over a minibatch, which may come in "
            "pieces, is the trainer's",
            "one number",
            f"one number per token {[ROWS, TOKENS]} or per row {[ROWS]}",
            "return the values themselves, without .mean() or .sum(), and choose the average at "
            f"{node.role}.update(…, mean=…)",
        )
    if tuple(value.shape) not in ((ROWS, TOKENS), (ROWS,)):
        return wrong(
            "returns another shape than its rows",
            f"shape {list(value.shape)} for {ROWS} rows of {TOKENS} tokens",
            f"one number per token {[ROWS, TOKENS]} or per row {[ROWS]}",
            "return one number per token, or one per row",
        )
    if not value.requires_grad:
        return wrong(
            "returns values through which no gradient flows to the model",
            "a value that depends on no new.…",
            "a value computed from " + listed(f"new.{name}" for name in loss.new),
            "use what `new` has, and do not detach() it",
        )
    fitting = ("tokens", "row-tokens") if value.dim() == 2 else ("rows",)
    if isinstance(mean, str) and mean not in fitting:
        ways = " or ".join(f'mean="{way}"' for way in fitting)
        return wrong(
            f'gives one value per {LEVELS[value.dim()]}, which mean="{mean}" does not average',
            f'mean="{mean}"',
            f"{ways} or a number",
            f"write {node.role}.update(…, {ways})",
        )
    return None


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__
