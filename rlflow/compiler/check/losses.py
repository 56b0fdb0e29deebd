"""Call each loss on synthetic rows before a run, and check what it returns or raises.

The columns have the right kinds but arbitrary numbers. So only mistakes that these numbers can't explain are
errors: reading a model output that wasn't requested, wrong types, names or shapes, and results of the wrong
level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.columns import PART, Kind, Level
from rlflow.author.joint import LossTerm, terms
from rlflow.author.loss import Loss
from rlflow.author.node_options import UpdateOptions
from rlflow.author.stage import Stage
from rlflow.compiler.graph.ancestry import Merge, merge
from rlflow.compiler.graph.due import parts
from rlflow.compiler.graph.model import FRESH_OPTIMIZER, SETTING, Graph, Node, Op
from rlflow.compiler.trace.compile import Program
from rlflow.errors import Problem, listed
from rlflow.processes.user_frames import own_lines
from rlflow.training.objective import New

ROWS, TOKENS, PROMPT, GROUP = 4, 5, 3, 2  # sizes of the synthetic rows; each GROUP adjacent rows are a group
LEVELS = {2: "token", 1: "row"}
# exceptions that arbitrary numbers may cause
BY_VALUE = (ValueError, AssertionError, ArithmeticError, LookupError)
CAUSE = {
    "entropy": '@loss(new=("logprobs", "entropy"))',
    "values": '@loss(new="values")',
    "scores": '@loss(new="scores")',
    "logprobs": '@loss(new="logprobs")',
}


class Quantities:
    """What a loss gets as ``new`` when it is called on synthetic rows.

    As in a run, model outputs that the loss didn't request are None. ``lacking`` lists those that it read
    anyway.
    """

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
    """What a loss returned or raised on synthetic rows."""

    result: Any = None
    raised: Exception | None = None
    lacking: tuple[str, ...] = ()


def loss_problems(program: Program) -> Iterator[Problem]:
    """Call the losses of all updates on synthetic rows, and yield the problems.

    A loss isn't called if it reads a column of unknown kind. It's also called without the columns that aren't
    there in some iterations.
    """
    tried: set[tuple[str, str, tuple[str, ...]]] = set()
    for graph, node in ((part.graph, node) for part in parts(program.graph) for node in part.graph.nodes):
        loss = program.functions.get(node.name)
        if node.op is Op.UPDATE and isinstance(loss, Loss):
            for term in loss_terms(program, node, loss):
                kinds = column_kinds(graph, node, term.loss)
                key = (node.name, term.prefix, tuple(sorted(kinds or ())))
                if kinds is not None and key not in tried:
                    tried.add(key)
                    yield from _trial_problems(node, term, kinds)


def loss_terms(program: Program, node: Node, loss: Loss) -> list[LossTerm]:
    """Return an update's losses with their settings. Settings that are columns get a synthetic number."""
    return terms(
        loss,
        {**synthetic_settings(node, loss), **program.settings[node.name]},
        node.options(UpdateOptions).mean,
    )


def synthetic_settings(node: Node, function: Stage | Loss) -> dict[str, float]:
    """Return a number for each setting of a call that is a column: its default, or else 0.5."""
    names = [
        item.parameter.removeprefix(SETTING)
        for item in node.inputs
        if item.parameter.startswith(SETTING) and item.parameter != FRESH_OPTIMIZER
    ]
    defaults = {name: function.signature.settings.get(name) for name in names}
    return {name: default if isinstance(default, float) else 0.5 for name, default in defaults.items()}


def column_kinds(graph: Graph, node: Node, function: Stage | Loss) -> dict[str, Kind] | None:
    """Return the columns that a stage or loss reads, as name → kind, or None if a kind is unknown.

    Optional columns that the batch doesn't have are left out.
    """
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


def _trial_problems(node: Node, term: LossTerm, kinds: Mapping[str, Kind]) -> Iterator[Problem]:
    loss = term.loss
    first = try_loss(loss, kinds, term.settings)
    if first.raised is not None:
        yield _raised(node, loss, first)
        return
    problem = _result_problem(node, loss, first.result, term.mean)
    if problem is not None:
        yield problem
    elif "weights" in kinds and torch.equal(
        _value(first), _value(try_loss(loss, kinds, term.settings, weights=2.0))
    ):
        yield Problem(
            "weights-unused",
            f"loss '{loss.name}' takes `weights`, but its values do not depend on them",
            node.place,
            loss.place,
            found="the same values at twice the weights",
            expected="values that the weights scale or mask",
            remedy="multiply the value by it: return -weights * gain, {…}; or remove `weights` from the "
            "parameters",
            severity="warning",
        )


def try_loss(
    loss: Loss, kinds: Mapping[str, Kind], settings: Mapping[str, Any], weights: float = 1.0
) -> Trial:
    """Call the loss on synthetic rows and return the outcome.

    The global random generator isn't affected.

    ``kinds``: the kinds of the loss's columns. ``weights``: a factor for the values of the column
    ``weights``.
    """
    rng = torch.Generator().manual_seed(0)
    columns = {name: column(name, kind, rng) for name, kind in sorted(kinds.items())}
    columns |= {"weights": columns["weights"] * weights} if "weights" in columns else {}
    new = Quantities(model_quantities(loss, rng))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            result = loss.function(new, *(columns.get(p.name) for p in loss.signature.columns), **settings)
        except Exception as error:
            return Trial(raised=error, lacking=tuple(new.lacking))
    return Trial(result)


def model_quantities(loss: Loss, rng: torch.Generator) -> New:
    """Return random, differentiable model outputs for calling the loss."""
    quantities = {
        "logprobs": -_uniform((ROWS, TOKENS), rng),
        "entropy": _uniform((ROWS, TOKENS), rng),
        "values": _uniform((ROWS, TOKENS), rng) - 0.5,
        "scores": _uniform((ROWS,), rng) - 0.5,
    }
    return New(**{name: quantities[name].requires_grad_() for name in loss.new})


def column(name: str, kind: Kind, rng: torch.Generator) -> Any:
    """Make synthetic values of a column, in the form that a loss gets.

    Log-probs are below 0 and weights above 0. The mask has masked-out tokens and padding. Adjacent rows form
    pairs, and come from the first and second batch of a `concat`.
    """
    shape = {Level.TOKEN: (ROWS, TOKENS), Level.PROMPT: (ROWS, PROMPT), Level.SCALAR: ()}.get(
        kind.level, (ROWS,)
    )
    if kind.level is Level.TEXT:
        return ["text"] * ROWS
    number = _uniform(shape, rng)
    if name == "mask":
        return torch.tensor(
            [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool
        )
    if name == "group":
        return torch.arange(ROWS) // GROUP
    if name == PART:
        return torch.arange(ROWS) % 2
    if kind.family == "bool":
        return torch.arange(number.numel()).reshape(shape) % 2 == 0
    if kind.family != "float":
        return torch.ones(shape, dtype=getattr(torch, kind.dtype or "int64"))
    if name in ("weights", "temperature"):
        number = number + 0.5
    number = -number if "logprobs" in name else number - 0.5 if name in ("advantages", "scores") else number
    return number.to(getattr(torch, kind.dtype or "float32"))


def _uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng) + 0.01


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
            f"loss '{loss.name}' reads new.{name}, but does not ask the model for it",
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
    """Return the problem with a loss's result, or None if it is valid. It may lack metrics.

    ``mean``: how the update averages the loss.
    """
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
            "return (value, {}), with one number per token or per row as the value",
        )
    if value.dim() == 0:
        return wrong(
            "returns one number that is already averaged; the trainer averages over the minibatch, which "
            "it may split into micro-batches",
            "one number",
            f"one number per token {[ROWS, TOKENS]} or per row {[ROWS]}",
            "return the values themselves, without .mean() or .sum(), and choose the average at "
            f"{node.role}.update(…, mean=…)",
        )
    if tuple(value.shape) not in ((ROWS, TOKENS), (ROWS,)):
        return wrong(
            "returns a shape that does not match its rows",
            f"shape {list(value.shape)} for {ROWS} rows of {TOKENS} tokens",
            f"one number per token {[ROWS, TOKENS]} or per row {[ROWS]}",
            "return one number per token, or one per row",
        )
    if not value.requires_grad:
        return wrong(
            "returns values through which no gradient flows to the model",
            "a value that does not depend on new",
            "a value computed from " + listed(f"new.{name}" for name in loss.new),
            "compute the value from `new`, without detach()",
        )
    fitting = ("tokens", "row-tokens") if value.dim() == 2 else ("rows",)
    if isinstance(mean, str) and mean not in fitting:
        ways = " or ".join(f'mean="{way}"' for way in fitting)
        return wrong(
            f'gives one value per {LEVELS[value.dim()]}, but mean="{mean}" does not average such values',
            f'mean="{mean}"',
            f"{ways} or a number",
            f"write {node.role}.update(…, {ways})",
        )
    return None


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__
