"""Answers to the reasoning-gym tasks whose scorers evaluate text. Only a plain answer is handed to such a
scorer: it has the form that its task asks for, and no name, call or attribute through which it could do more
than be computed. Any other is judged as text alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 1 << 16  # characters of an answer that is evaluated
WORDS = re.compile(r"[\w\s,|+-]*", re.ASCII)  # a board, a matrix, letters: nothing that evaluation could call
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
HIDDEN = re.compile(r"\)\s*\(|\.\s*[A-Za-z]|[A-Za-z]\s*\.")  # calls of what parentheses hold, attributes


def is_literal(text: str) -> bool:
    """Whether the text is a Python literal, which evaluation turns into the same value, or words that call
    nothing."""
    if WORDS.fullmatch(text):
        return True
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return True


def is_sum(text: str) -> bool:
    """Whether the text has only numbers, the four operations and parentheses."""
    return SUM.fullmatch(text) is not None and not re.search(r"[\d.)]\s*\(", text)


def is_formula(text: str) -> bool:
    """Whether the text has only numbers, letters as variables, operations, parentheses and known functions of
    mathematics."""
    if not CHARACTERS.fullmatch(text) or HIDDEN.search(text):
        return False
    if any(len(name) > 1 and name not in FUNCTIONS | CONSTANTS for name in NAME.findall(text)):
        return False
    return all(name in FUNCTIONS for name in CALL.findall(text) if name)


# task whose scorer evaluates answers → whether an answer is plain
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
COMPOSITE = "composite"  # hands an answer on to the task that its row is of
# they evaluate text that they wrote into the row themselves, never the answer
OWN = frozenset({"number_sorting", "bitwise_arithmetic"})
UNREADABLE = ")"  # what the scorers cannot read


def evaluates(task: str) -> bool:
    """Whether the scorer of a reasoning-gym task evaluates answers as code, or may do so."""
    return task in EVALUATING or task == COMPOSITE


def readable(task: str, answer: str, entry: Mapping[str, Any]) -> str:
    """The text that a task's scorer gets in place of an answer.

    That is the answer itself where it is plain, or the scorer evaluates none; the right answer of the row's
    ``entry`` where the answer is the same text; else text that cannot be read, which gets the score of any
    answer that makes no sense."""
    plain = EVALUATING.get(str(entry["metadata"]["source_dataset"]) if task == COMPOSITE else task)
    if plain is None or (len(answer) <= LONGEST and plain(answer)):
        return answer
    right = entry["answer"]
    return right if isinstance(right, str) and right.strip() == answer.strip() else UNREADABLE
