"""Protect reasoning-gym scorers that evaluate answers as code.

Such a scorer gets only plain answers. A plain answer has the format that its task expects, and contains no
name, call or attribute that could do more than compute a value. Other answers are only compared as text.
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
    """Whether the text is a Python literal, or words without a call, so that evaluating it has no side
    effects.
    """
    if WORDS.fullmatch(text):
        return True
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return True


def is_sum(text: str) -> bool:
    """Whether the text contains only numbers, the operators + - * /, and parentheses."""
    return SUM.fullmatch(text) is not None and not re.search(r"[\d.)]\s*\(", text)


def is_formula(text: str) -> bool:
    """Whether the text is a formula that is safe to evaluate.

    A formula may contain numbers, one-letter variables, operators, parentheses and known functions.
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
UNREADABLE = ")"  # text that the scorers cannot parse


def evaluates(task: str) -> bool:
    """Whether the scorer of a reasoning-gym task evaluates answers as code, or might do so."""
    return task in EVALUATING or task == COMPOSITE


def readable(task: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return the text that a reasoning-gym scorer gets in place of a model's answer.

    If the answer is plain, or if the scorer does not evaluate code, this is the answer itself. If another
    answer equals the correct answer in ``entry``, it is the correct answer. Otherwise it is a string that
    cannot be parsed, which gets the score of a meaningless answer.
    """
    plain = EVALUATING.get(str(entry["metadata"]["source_dataset"]) if task == COMPOSITE else task)
    if plain is None or (len(answer) <= LONGEST and plain(answer)):
        return answer
    right = entry["answer"]
    return right if isinstance(right, str) and right.strip() == answer.strip() else UNREADABLE
