"""Protects reasoning-gym scorers that evaluate answers as code.

Such a scorer gets only plain answers: they have the format that the task expects, and no name, call or
attribute in them can do more than compute a value. Other answers are only compared as text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 1 << 16  # maximum number of characters in an answer that is evaluated
WORDS = re.compile(r"[\w\s,|+-]*", re.ASCII)  # a board, a matrix or letters: nothing that could be called
SUM = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/().]*", re.ASCII | re.DOTALL)
CHARACTERS = re.compile(r"[A-Za-z0-9\s+\-*/^().,]*", re.ASCII)
NAME = re.compile(r"[A-Za-z]+")
FUNCTIONS = frozenset(
    {
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "acot",
        "asec",
        "acsc",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "asinh",
        "acosh",
        "atanh",
        "exp",
        "log",
        "ln",
        "sqrt",
        "Abs",
        "sign",
        "erf",
        "erfi",
        "Ei",
        "Si",
        "Ci",
        "li",
    }
)
CONSTANTS = frozenset({"pi"})
CALL = re.compile(r"([A-Za-z0-9.]*)\s*\(")
HIDDEN = re.compile(r"\)\s*\(|\.\s*[A-Za-z]|[A-Za-z]\s*\.")  # calls of parenthesised values, attributes


def is_literal(text: str) -> bool:
    """True for a Python literal, or words without a call: text that can be evaluated without side effects."""
    if WORDS.fullmatch(text):
        return True
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return True


def is_sum(text: str) -> bool:
    """True if the text has only numbers, the operators + - * /, and parentheses."""
    return SUM.fullmatch(text) is not None and not re.search(r"[\d.)]\s*\(", text)


def is_formula(text: str) -> bool:
    """True if the text is a formula that is safe to evaluate.

    It may have numbers, one-letter variables, operators, parentheses and known functions.
    """
    if not CHARACTERS.fullmatch(text) or HIDDEN.search(text):
        return False
    if any(len(name) > 1 and name not in FUNCTIONS | CONSTANTS for name in NAME.findall(text)):
        return False
    return all(name in FUNCTIONS for name in CALL.findall(text) if name)


# For each task whose scorer evaluates answers: the function that decides whether an answer is plain.
EVALUATING: Mapping[str, Callable[[str], bool]] = {
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "countdown": is_sum,
    "puzzle24": is_sum,
    "polynomial_multiplication": is_formula,
    "simple_integration": is_formula,
    "intermediate_integration": is_formula,
}
COMPOSITE = "composite"  # the task whose scorer passes an answer on to the scorer of its row's own task
# The scorers of these tasks evaluate only text that the tasks wrote into the row, never the answer.
OWN = frozenset({"number_sorting", "bitwise_arithmetic"})
UNREADABLE = ")"  # text that the scorers can't parse


def evaluates(task: str) -> bool:
    """True if the scorer of a reasoning-gym task evaluates answers as code, or might do so."""
    return task in EVALUATING or task == COMPOSITE


def readable(task: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return the text to give to a reasoning-gym scorer in place of a model's answer.

    A plain answer is returned as it is, and so is any answer if the scorer doesn't evaluate code. An answer
    that equals the correct one in ``entry`` is replaced by the correct one. For any other answer, the text
    can't be parsed, and scores as a meaningless answer would.
    """
    plain = EVALUATING.get(str(entry["metadata"]["source_dataset"]) if task == COMPOSITE else task)
    if plain is None or (len(answer) <= LONGEST and plain(answer)):
        return answer
    right = entry["answer"]
    return right if isinstance(right, str) and right.strip() == answer.strip() else UNREADABLE
