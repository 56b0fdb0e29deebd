"""Describes tools as JSON schemas for chat templates.

A tool is a typed, documented method that a model may call.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.errors import Place, PlanError

SIMPLE = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
HEADING = re.compile(r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|:return)")
# Argument lines of a docstring: "name: text", ":param name: text".
ARGUMENT = re.compile(r"^\s*(?::param\s+)?(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True)
class Tool:
    """A method of an environment that a model may call."""

    name: str
    schema: Mapping[str, Any]  # in the form that chat templates expect: {"type": "function", "function": {…}}

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the parameters that have no default."""
        return tuple(self.schema["function"]["parameters"]["required"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of each parameter, by name."""
        properties: Mapping[str, Any] = self.schema["function"]["parameters"]["properties"]
        return properties


def tool_of(method: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> Tool:
    """Return the tool that a method defines. ``file``: the method's file, for error messages.

    Raises PlanError if the method has no docstring, or if a parameter has no type that JSON supports.
    """
    place, docstring = Place(file, method.lineno), ast.get_docstring(method)
    if not docstring:
        raise PlanError.of(
            "env-tool",
            f"the tool '{method.name}' has no docstring that describes it to the model",
            place=place,
            found="no docstring",
            expected="a docstring that describes the tool",
            remedy=f"write one, or name the method _{method.name} if it is not a tool",
        )
    arguments = method.args
    every = [*arguments.posonlyargs, *arguments.args][1:] + arguments.kwonlyargs
    free, descriptions = _with_defaults(arguments), _described(docstring)
    properties = {}
    for argument in every:
        kind = _schema(argument.annotation)
        if kind is None:
            raise PlanError.of(
                "env-tool",
                f"the parameter '{argument.arg}' of the tool '{method.name}' does not have a type that JSON supports",
                place=Place(file, argument.lineno),
                found=ast.unparse(argument.annotation) if argument.annotation else "no annotation",
                expected=f"one of {', '.join(SIMPLE)}, list[…] or Literal[…]",
                remedy=f"{argument.arg}: str",
            )
        properties[argument.arg] = kind | (
            {"description": descriptions[argument.arg]} if argument.arg in descriptions else {}
        )
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [argument.arg for argument in every if argument.arg not in free],
    }
    function = {"name": method.name, "description": _summary(docstring), "parameters": parameters}
    return Tool(method.name, {"type": "function", "function": function})


def _with_defaults(arguments: ast.arguments) -> set[str]:
    """Return the names of the arguments that have a default."""
    positional, defaults = [*arguments.posonlyargs, *arguments.args], len(arguments.defaults)
    free = {argument.arg for argument in positional[-defaults:]} if defaults else set()
    return free | {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }


def _summary(docstring: str) -> str:
    """Return the docstring up to the first argument's description, as one line."""
    first, *rest = docstring.splitlines()
    more = itertools.takewhile(lambda line: not HEADING.match(line) and not ARGUMENT.match(line), rest)
    return " ".join(" ".join([first, *more]).split())


def _described(docstring: str) -> dict[str, str]:
    """Return the parameter descriptions in a docstring, by parameter name.

    Each description must be on its own line.
    """
    matches = (ARGUMENT.match(line) for line in docstring.splitlines()[1:])
    return {match[1]: match[2].strip() for match in matches if match}


def _schema(annotation: ast.expr | None) -> dict[str, Any] | None:
    """Return the JSON schema for a type annotation, or None if JSON doesn't support the type."""
    match annotation:
        case ast.Name(id=name) if name in SIMPLE:
            return {"type": SIMPLE[name]}
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            items = _schema(inner)
            return None if items is None else {"type": "array", "items": items}
        case ast.Subscript(value=ast.Name(id="dict")):
            return {"type": "object"}
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            values = [
                ast.literal_eval(each)
                for each in (choices.elts if isinstance(choices, ast.Tuple) else [choices])
            ]
            return {"enum": values} | (
                {"type": "string"} if all(isinstance(value, str) for value in values) else {}
            )
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            kind = _schema(left)
            return None if kind is None else {**kind, "nullable": True}
    return None
