"""Faults that test proofs. Each is one small change to the source of an algorithm that comes with rlflow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """An algorithm file with a fault: the kind and place of the change, and the changed text."""

    kind: str
    where: str
    text: str


def faults(source: str) -> Iterator[Fault]:
    """Yield every fault that can be made in a file.

    A fault is a deleted merge; a result of a loss or stage that is detached, multiplied by 0, negated or
    shifted by a row; a changed column of a loss; or two swapped columns of a loss.
    """
    tree = ast.parse(source)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        marks = {ast.unparse(mark).partition("(")[0] for mark in function.decorator_list}
        if "loss" in marks:
            yield from _of_loss(source, function)
        elif "stage" in marks:
            yield from _returns(
                source, function, {"times-0": "({}) * 0", "negated": "-({})", "rolled": "({}).roll(1, 0)"}
            )
        elif "flow" in marks:
            yield from _of_flow(source, function)


def _of_loss(source: str, function: ast.FunctionDef) -> Iterator[Fault]:
    yield from _returns(
        source, function, {"detached": "({}).detach()", "times-0": "({}) * 0", "negated": "-({})"}
    )
    names = [one.arg for one in function.args.args[1:]]
    for name in names:
        if name in ("advantages", "scores", "returns"):
            yield _inserted(source, function, "rolled", f"{name} = {name}.roll(1, 0)", name)
            yield _inserted(source, function, "negated-column", f"{name} = -{name}", name)
            yield _inserted(source, function, "times-0-column", f"{name} = {name} * 0", name)
    if "advantages" in names and "weights" in names:
        yield _inserted(
            source, function, "swapped", "advantages, weights = weights, advantages", "advantages, weights"
        )
    if "advantages" in names and "logprobs" in names:
        yield _inserted(
            source, function, "swapped", "advantages, logprobs = logprobs, advantages", "advantages, logprobs"
        )
    if "returns" in names and "values" in names:
        yield _inserted(source, function, "swapped", "returns, values = values, returns", "returns, values")


def _of_flow(source: str, function: ast.FunctionDef) -> Iterator[Fault]:
    """Yield the faults that delete a merge: `batch |= call` becomes `call`."""
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
            yield Fault(
                "merge-deleted",
                f"{function.name}:{node.lineno}",
                _replaced(source, node, ast.unparse(node.value)),
            )


def _returns(source: str, function: ast.FunctionDef, forms: dict[str, str]) -> Iterator[Fault]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            value = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
            for kind, form in forms.items():
                yield Fault(
                    kind,
                    f"{function.name}:{node.lineno}",
                    _replaced(source, value, form.format(ast.unparse(value))),
                )


def _inserted(source: str, function: ast.FunctionDef, kind: str, line: str, what: str) -> Fault:
    """Return the fault that inserts ``line`` at the beginning of a function, after its docstring.

    ``kind`` and ``what``: kind and description of the fault.
    """
    body = [
        node
        for node in function.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    lines = source.splitlines()
    lines.insert(body[0].lineno - 1, f"    {line}")
    return Fault(kind, f"{function.name}({what})", "\n".join(lines) + "\n")


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    before = "".join(lines[: node.lineno - 1]) + lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode() + "".join(
        lines[node.end_lineno :]
    )
    return before + text + after
