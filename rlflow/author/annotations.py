"""Turn the annotations of settings into types, working from parsed source text.

The user's file isn't imported.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

PLAIN: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}
LIMITS: dict[str, Any] = {"Ge": Ge, "Gt": Gt, "Le": Le, "Lt": Lt}


def annotated(annotation: ast.expr) -> Any:
    """Return the type that a parsed annotation stands for, or Any if it can't be determined.

    Numbers, strings, paths, None, unions, ``Literal`` and ranges are supported.
    """
    match annotation:
        case ast.Name(id=name) if name in PLAIN:
            return PLAIN[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return annotated(left) | annotated(right)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            each = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return Literal[tuple(ast.literal_eval(choice) for choice in each)]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[base, *limits])):
            return (
                Annotated[(annotated(base), *filter(None, map(_limit, limits)))]
                if any(map(_limit, limits))
                else annotated(base)
            )
    return Any


def _limit(written: ast.expr) -> Any:
    """Return the ``annotated_types`` limit written here, such as ``Ge(1)``, or None if it isn't one."""
    match written:
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=number)]) if name in LIMITS:
            return LIMITS[name](number)
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id="inf")]) if name in LIMITS:
            return LIMITS[name](math.inf)
    return None
