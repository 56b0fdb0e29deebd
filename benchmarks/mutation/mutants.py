"""Create mutants of a source: small changes to its syntax tree that a test should notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
# statements that can be deleted
DELETED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One small change to a source.

    ``kind``: comparison, arithmetic, boolean, condition, constant, deleted or returned. ``line``: line number
    in the source, from 1. ``before``, ``after``: the expression or statement before and after the change, on
    one line. ``begin``, ``end``: byte range of the source that ``written`` replaces.
    """

    kind: str
    line: int
    before: str
    after: str
    begin: int
    end: int
    written: str

    def applied(self, source: str) -> str:
        """Return the source with this change. All other lines keep their line numbers."""
        whole = source.encode()
        return (whole[: self.begin] + self.written.encode() + whole[self.end :]).decode()


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of the code inside functions, in the order of the syntax tree.

    Code at module level, annotations, defaults, docstrings and f-strings are not changed. ``strict=`` of zip
    is not changed either, since it has an effect only together with another mistake.
    """
    whole, lines = source.encode(), starts(source)
    for function in _outermost(ast.parse(source)):
        for statement in function.body:
            for node in _within(statement):
                for kind, place, text in _changes(node):
                    begin, end = span(place, lines)
                    padding = "\n" * (place.end_lineno - place.lineno)
                    written = f"({text}{padding})" if isinstance(place, ast.expr) else text + padding
                    yield Mutant(
                        kind,
                        place.lineno,
                        " ".join(whole[begin:end].decode().split()),
                        text,
                        begin,
                        end,
                        written,
                    )


def starts(source: str) -> list[int]:
    """Return the byte offset of each line. Bytes are used because the syntax tree counts columns in bytes."""
    return [0, *accumulate(map(len, source.encode().splitlines(keepends=True)))]


def span(node: ast.AST, lines: list[int]) -> tuple[int, int]:
    """Return the byte range (begin, end) of a node. ``lines``: byte offsets of the lines."""
    return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions and methods that are not nested in another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost(child)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    if (
        _is_docstring(node)
        or isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.keyword) and node.arg == "strict")
    ):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(child)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the changes to a node as (kind, the part to replace, its new text)."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield "comparison", node, ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC and not any(
            _is_string(side) for side in (left, right)
        ):
            yield "arithmetic", node, ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)](), right))
        case ast.BoolOp(op, values):
            yield (
                "boolean",
                node,
                ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)),
            )
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean", node, ast.unparse(operand)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield "condition", test, ast.unparse(ast.UnaryOp(ast.Not(), test))
        case ast.Constant(bool(value)):
            yield "constant", node, repr(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", node, repr(value + 1)
        case ast.Return(ast.Constant(None | False)):
            pass  # None is falsy, as False is
        case ast.Return(ast.expr()):
            yield "returned", node, "return None"
        case _ if isinstance(node, DELETED):
            yield "deleted", node, "pass"


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
