"""The scorers, as a worker process builds them. A scorer is a function of named row columns that gives a
number, or None for no score."""

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
FINAL = "####"  # what GSM8K writes before the final answer
# not a heading such as "#### 2. Check"
FINAL_NUMBER = re.compile(r"####[ \t]*\$?(-?\d[\d,]*(?:\.\d+)?)\.?[ \t]*$", re.MULTILINE)
# no mathematics
CODE = re.compile(r"__|\b(?:import|lambda|eval|exec|compile|getattr|globals|open|os|sys|subprocess)\b")
BUILT_IN = ("match", "math", "reasoning_gym")  # kinds that come with rlflow; they score from 0 to 1


def build(kind: str, settings: Mapping[str, Any]) -> Score:
    """The scorer of a kind: match, math, reasoning_gym, function."""
    return BUILDERS[kind](**settings)


def match(extract: bool = False) -> Score:
    """The scorer that compares texts: ``exact``. ``extract``: whether it gives what it compares too, for
    votes."""
    return _with_answer(exact, compared) if extract else exact


def exact(*, completion: str, answer: str) -> float:
    """1.0 where the response's answer equals the right one letter by letter, else 0.0. Where the right answer
    has ``####`` (GSM8K), the numbers after it are compared."""
    if FINAL in answer:
        return float(_final(answer) == _final(completion))
    return float(final_answer(completion) == answer.strip())


def compared(*, completion: str, answer: str) -> str:
    """The part of a response that ``exact`` compares; empty where there is none."""
    return _final(completion) if FINAL in answer else final_answer(completion)


def _with_answer(score: Score, read: Callable[..., str]) -> Score:
    """The scorer with the answer that ``read`` takes out of the response beside its score, unless that is
    empty."""

    def both(**row: Any) -> dict[str, Any]:
        answer = read(**row)
        return {SCORE: score(**row), **({PRED: answer} if answer else {})}

    return both


def final_answer(completion: str) -> str:
    """The answer within a response: the text of the last ``<answer>…</answer>``, else the whole response."""
    tagged = ANSWER.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def _final(text: str) -> str:
    return (
        final_answer(text.rpartition(FINAL)[2]).replace(",", "").removeprefix("$").removesuffix(".").strip()
    )


def reasoning_gym(task: str, parameters: Mapping[str, Any], extract: bool = False) -> Score:
    """The scorer that comes with a reasoning-gym task. One that evaluates text gets plain answers alone; see
    ``rlflow.rewards.plain``.
    ``extract``: whether it gives the answer within the response too, for votes."""
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
    """The rows in order, in portions, each with whether to score it in a process that ends afterwards. That
    holds for all rows of a scorer that evaluates text, and for those rows of ``math`` whose completion has
    words of programs in it."""
    if kind != "math":
        yield rows, kind == "reasoning_gym" and plain.evaluates(settings["task"])
        return
    for row in rows:
        yield [row], CODE.search(str(row.get("completion", ""))) is not None


def math(extract: bool = False) -> Score:
    """The scorer that compares mathematical expressions with math-verify. ``extract``: whether it gives the
    expression that it found in the response too, for votes. Raises PlanError where math-verify is not
    installed."""
    verifier = require("math_verify", extra="tasks")
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def scored(*, completion: str, answer: str) -> Any:
        """1.0 where both say the same number, set or expression, else 0.0; None where the right answer cannot
        be read as one.

        Of a right answer with ``####`` (GSM8K) only the text after it counts. Of a response the number after
        its last ``####`` counts; where there is no such number, its last box, or its last expression.
        """
        right = _read(verifier, answer.rpartition(FINAL)[2])
        if not right:
            return None
        # what stands before it may hold dollars, which would be read as LaTeX
        final = FINAL_NUMBER.findall(final_answer(completion))
        claim = (
            _read(verifier, final[-1])
            if final
            else verifier.parse(final_answer(completion), parsing_timeout=None)
        )
        score = float(verifier.verify(right, claim, timeout_seconds=None, raise_on_error=True))
        return {SCORE: score, PRED: _said(claim)} if extract and claim else score

    return scored


def _said(claim: Sequence[Any]) -> str:
    """The expression that math-verify read in a response, in one writing for equal ones; as it stands there
    where it cannot be written."""
    for each in claim:
        with contextlib.suppress(Exception):  # such as a number of too many digits
            return str(each)
    return ""


def _read(verifier: Any, answer: str) -> Any:
    """An answer parsed by math-verify, also where it stands bare instead of between dollars or in a box."""
    answer = answer.strip()
    marked = "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer
    return verifier.parse(answer if marked or not answer else f"\\boxed{{{answer}}}", parsing_timeout=None)


def function(
    file: str, function: str, source: str, module: str = "", later: bool = False, form: str = ""
) -> Score:
    """The named function of a user's file, loaded from ``source``, the text that the run read at its start;
    where the file is part of a package, imported as ``module``. ``later``: whether it is async. ``form``: the
    project that has functions of its form."""
    scorer: Score = getattr(user_module(file, source, module), function)
    return by_row(scorer) if form == VERL.project else scorer


def user_module(file: str, source: str, module: str = "") -> types.ModuleType:
    """A user's file as a module, from its text; where it is part of a package, imported as ``module``."""
    return _imported(file, module) if module else _loaded(file, source)


def _loaded(file: str, source: str) -> types.ModuleType:
    """The file as a module. Its folder is importable, as for ``python FILE``."""
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
