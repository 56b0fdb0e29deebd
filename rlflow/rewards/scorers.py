"""Scorers, which are built in worker processes.

A scorer is a function of named row columns that returns a number, or None for no score.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlflow.extras import require
from rlflow.rewards import plain
from rlflow.rewards.forms import VERL, by_row
from rlflow.rewards.values import ANSWER as PRED
from rlflow.rewards.values import SCORE

Score = Callable[..., Any]
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FINAL = "####"  # GSM8K writes this text before the final answer
# Does not match a heading such as "#### 2. Check".
FINAL_NUMBER = re.compile(r"####[ \t]*\$?(-?\d[\d,]*(?:\.\d+)?)\.?[ \t]*$", re.MULTILINE)
# Words of programs, which do not occur in mathematical answers.
CODE = re.compile(r"__|\b(?:import|lambda|eval|exec|compile|getattr|globals|open|os|sys|subprocess)\b")
# kinds of scorers that come with rlflow; their scores are from 0 to 1
BUILT_IN = ("match", "math", "reasoning_gym")


def build(kind: str, settings: Mapping[str, Any]) -> Score:
    """Return the scorer of a kind: match, math, reasoning_gym or function.

    ``settings``: its keyword arguments.
    """
    return BUILDERS[kind](**settings)


def match(extract: bool = False) -> Score:
    """Return the scorer ``exact``, which compares strings.

    ``extract``: True to also return the answer found in the response, for majority votes.
    """
    return _with_answer(exact, compared) if extract else exact


def exact(*, completion: str, answer: str) -> float:
    """Return 1.0 if the response's answer equals the correct answer exactly, else 0.0.

    If the correct answer contains ``####`` (GSM8K), the scorer compares the numbers after this mark.
    """
    if FINAL in answer:
        return float(_final(answer) == _final(completion))
    return float(final_answer(completion) == answer.strip())


def compared(*, completion: str, answer: str) -> str:
    """Return the part of a response that ``exact`` compares, which may be empty."""
    return _final(completion) if FINAL in answer else final_answer(completion)


def _with_answer(score: Score, read: Callable[..., str]) -> Score:
    """Wrap a scorer to also return the answer that ``read`` extracts from the response, unless it's empty."""

    def both(**row: Any) -> dict[str, Any]:
        answer = read(**row)
        return {SCORE: score(**row), **({PRED: answer} if answer else {})}

    return both


def final_answer(completion: str) -> str:
    """Return the text of a response's last ``<answer>…</answer>``, or else the whole response."""
    tagged = ANSWER.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def _final(text: str) -> str:
    return (
        final_answer(text.rpartition(FINAL)[2]).replace(",", "").removeprefix("$").removesuffix(".").strip()
    )


def reasoning_gym(task: str, parameters: Mapping[str, Any], extract: bool = False) -> Score:
    """Return the scorer of a reasoning-gym task.

    A scorer that evaluates text as code gets only plain answers; see ``rlflow.rewards.plain``. ``extract``:
    True to also return the answer found in the response, for majority votes.
    """
    from rlflow.data.frozen import thawed

    kind, config = require("reasoning_gym.factory", extra="tasks").DATASETS[task]
    score = kind(config=config(**parameters)).score_answer

    def scored(*, completion: str, entry: str) -> Any:
        row = thawed(json.loads(entry))
        return score(plain.readable(task, final_answer(completion), row), row)

    return _with_answer(scored, lambda *, completion, entry: final_answer(completion)) if extract else scored


Row = Mapping[str, Any]


def portions(
    kind: str, settings: Mapping[str, Any], rows: Sequence[Row]
) -> Iterator[tuple[Sequence[Row], bool]]:
    """Split rows into portions, and yield (portion, whether to score it in a forked child).

    A child scores all rows of a scorer that evaluates text as code. With ``math``, it scores the rows whose
    completion contains words of programs.
    """
    if kind != "math":
        yield rows, kind == "reasoning_gym" and plain.evaluates(settings["task"])
        return
    for row in rows:
        yield [row], CODE.search(str(row.get("completion", ""))) is not None


def math(extract: bool = False) -> Score:
    """Return the scorer that compares mathematical expressions with math-verify.

    ``extract``: True to also return the expression found in the response, for majority votes. Raises
    PlanError if math-verify isn't installed.
    """
    verifier = require("math_verify", extra="tasks")
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def scored(*, completion: str, answer: str) -> Any:
        """Return 1.0 if the response and the correct answer are the same number, set or expression, else 0.0.

        Returns None if the correct answer can't be parsed. If it contains ``####`` (GSM8K), only the text
        after this mark counts. The response's answer is the number after its last ``####``, or else its last
        box, or else its last expression.
        """
        right = _read(verifier, answer.rpartition(FINAL)[2])
        if not right:
            return None
        # The text before it may contain dollar signs, which would be parsed as LaTeX.
        final = FINAL_NUMBER.findall(final_answer(completion))
        claim = (
            _read(verifier, final[-1])
            if final
            else verifier.parse(final_answer(completion), parsing_timeout=None)
        )
        score = float(verifier.verify(right, claim, timeout_seconds=None, raise_on_error=True))
        return {SCORE: score, PRED: _expression_text(claim)} if extract and claim else score

    return scored


def _expression_text(claim: Sequence[Any]) -> str:
    """Return the expression found in a response as text, or "" if there is none or it can't be printed.

    Equal expressions give equal strings.
    """
    for each in claim:
        with contextlib.suppress(Exception):  # raised for example for a number with too many digits
            return str(each)
    return ""


def _read(verifier: Any, answer: str) -> Any:
    """Parse an answer with math-verify, even if the answer is neither between dollar signs nor in a box."""
    answer = answer.strip()
    marked = "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer
    return verifier.parse(answer if marked or not answer else f"\\boxed{{{answer}}}", parsing_timeout=None)


def function(
    file: str, function: str, source: str, module: str = "", later: bool = False, form: str = ""
) -> Score:
    """Load a function from a user's file.

    ``source``: the file's text when the run started. ``module``: the dotted name to import it under, if the
    file is in a package. ``later``: True for an async function. ``form``: the project that the function was
    written for; empty for rlflow.
    """
    scorer: Score = getattr(user_module(file, source, module), function)
    return by_row(scorer) if form == VERL.project else scorer


def user_module(file: str, source: str, module: str = "") -> types.ModuleType:
    """Execute the text ``source`` of a user's file, and return the resulting module.

    ``module``: the dotted name to import it under, if the file is in a package.
    """
    return _imported(file, module) if module else _loaded(file, source)


def _loaded(file: str, source: str) -> types.ModuleType:
    """Execute a file's text and return the module.

    Modules in the file's folder can be imported, as with ``python FILE``.
    """
    sys.path.insert(0, os.path.dirname(file))
    name = f"reward_{abs(hash(file)):x}"
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # dataclasses and typing look their module up
    exec(compile(source, file, "exec"), vars(module))
    return module


def _imported(file: str, module: str) -> types.ModuleType:
    root = file
    for _ in range(module.count(".") + 1):
        root = os.path.dirname(root)
    sys.path.insert(0, os.path.dirname(root) if os.path.basename(file) == "__init__.py" else root)
    __import__(module)
    return sys.modules[module]


BUILDERS: dict[str, Callable[..., Score]] = {
    "match": match,
    "math": math,
    "reasoning_gym": reasoning_gym,
    "function": function,
}
