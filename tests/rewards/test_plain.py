"""The answers that a task's scorer may evaluate: answers in the task's form, never programs."""

import ast
import importlib
import inspect
import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.data.frozen import frozen
from rlflow.extras import require
from rlflow.rewards import plain, scorers

EVALUATES = {
    "eval",
    "exec",
    "compile",
    "parse_expr",
    "sympify",
    "S",
    "lambdify",
    "parse_latex",
    "__import__",
    "import_module",
    "system",
    "popen",
    "Popen",
    "run",
    "check_output",
    "load",
    "loads",
    "unsafe_load",
    "getattr",
}
HARMLESS = {"json.loads"}  # reads data


def datasets():
    """Return reasoning-gym's tasks by name: the classes of the data and of their settings."""
    return require("reasoning_gym.factory", extra="tasks").DATASETS


@cache
def functions(module):
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def calls_in(module_name, name, seen):
    """Return the names of the calls of a function, and of the package functions it calls, in any module."""
    if (module_name, name) in seen:
        return set()
    seen.add((module_name, name))
    module = importlib.import_module(module_name)
    own = functions(module)
    if name not in own:
        found = getattr(module, name, None)
        there = getattr(found, "__module__", None) or ""
        return (
            calls_in(there, found.__name__, seen)
            if there.startswith("reasoning_gym") and there != module_name
            else set()
        )
    names = set()
    for node in ast.walk(own[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            last = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            of_package = last in own or str(
                getattr(getattr(module, last, None), "__module__", "")
            ).startswith("reasoning_gym")
            if of_package:
                names |= calls_in(module_name, last, seen)
            elif ast.unparse(node.func) not in HARMLESS:
                names.add(last)
    return names


def test_all_tasks_with_evaluating_scorers_are_known():
    found = set()
    for task, (kind, _) in datasets().items():
        owner = next(each for each in kind.__mro__ if "score_answer" in vars(each))
        if calls_in(owner.__module__, "score_answer", set()) & EVALUATES:
            found.add(task)
    assert found - {plain.COMPOSITE} == set(plain.EVALUATING) | plain.OWN


def rows(task, size=6):
    kind, config = datasets()[task]
    return kind(config=config(size=size, seed=7))


@pytest.mark.parametrize("task", sorted(plain.EVALUATING))
def test_answers_in_the_form_of_a_task_keep_their_scores(task):
    data, score = (
        rows(task),
        scorers.build("reasoning_gym", {"task": task, "parameters": {"size": 1, "seed": 0}}),
    )
    for row in data:
        for answer in (row["answer"], f" {row['answer']} ", "no idea", "7", "", "The answer is 42."):
            wanted = data.score_answer(answer.strip(), row)
            assert score(completion=answer, entry=json.dumps(frozen(row))) == wanted, answer


LISTED = {
    "spiral_matrix": "[1, 2, 3]",
    "string_insertion": "['A', 'B']",
    "binary_matrix": "[[0, 1], [1, 0]]",
    "n_queens": '[["_", "Q"]]',
    "countdown": "(3 + 4) * 5 - 6/2",
    "puzzle24": "(8 - 4) * (7 - 1)",
    "polynomial_multiplication": "-12*x**2 + 3*x*y - 7",
    "simple_integration": "2*x**(3/2)/3 + C",
    "intermediate_integration": "-x*cos(2*x)/2 + exp(-x**2) + sqrt(pi)*log(x)",
}


@pytest.mark.parametrize("task", sorted(plain.EVALUATING))
def test_right_variants_are_plain(task):
    assert plain.EVALUATING[task](LISTED[task])


PAYLOADS = [
    "__import__('os').system('true')",
    "[__import__('os').system('true')]",
    "(lambda: 1)()",
    "[x for x in ().__class__.__mro__]",
    "().__class__.__base__.__subclasses__()",
    "exec('x = 1')",
    "eval('1')",
    "open('x', 'w')",
    "exit()",
    "quit(0)",
    "print(1)",
    "sin('__import__(\"os\")')",
    "sympify('1')",
    "(sin)(x)",
    "x.func(1)",
    "x . func",
    "S(1)",
    "N(1)",
    "preview(x)",
    "test()",
    "1 .real",
    "f'{exit()}'",
    "[exit()]",
    "{1: exit()}",
    "globals()",
    "ｅval('1')",
    "sin(x)\nimport os",
    "[].append(1)",
    "(exit)()",
    "a[exit()]",
    "x := 1",
    "await x()",
    "9**9**9**9()",
    "`id`",
    "$(id)",
    "\x00",
    "sin (x) (y)",
    "init_printing (1)",
    "lambda: 1",
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_program_is_never_plain(payload):
    for task, judge in plain.EVALUATING.items():
        assert not judge(payload), task
        assert plain.readable(task, payload, {"answer": "1"}) == plain.UNREADABLE


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_plain_text_calls_only_known_functions(text):
    assert_tame(text)


ALPHABET = [
    "x",
    "sin",
    "(",
    ")",
    ".",
    " ",
    "*",
    "**",
    "+",
    ",",
    "1",
    "'a'",
    "[",
    "]",
    "_",
    "lambda",
    ":",
    "exit",
    "\n",
    "for",
    "in",
    "E",
]


@given(st.lists(st.sampled_from(ALPHABET), max_size=12).map("".join))
def test_plain_text_from_program_words_calls_only_known_functions(text):
    assert_tame(text)


def assert_tame(text):
    """Check that Python text that is plain to one of the tasks only computes."""
    if not any(judge(text) for judge in plain.EVALUATING.values()):
        return
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    active = (
        ast.Attribute
        | ast.Lambda
        | ast.comprehension
        | ast.NamedExpr
        | ast.Await
        | ast.Subscript
        | ast.JoinedStr
    )
    for node in ast.walk(tree):
        assert not isinstance(node, active)
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            assert node.func.id in plain.FUNCTIONS


def test_an_answer_equal_as_text_is_right_in_any_form():
    row = {"answer": "Integral(x*cos(x), x) + C"}
    assert plain.readable("intermediate_integration", " Integral(x*cos(x), x) + C\n", row) == row["answer"]
    assert plain.readable("chain_sum", "exit()", row) == "exit()"  # it is compared, never evaluated


def test_a_row_of_several_tasks_is_read_by_its_own_task():
    for source, read in (("countdown", plain.UNREADABLE), ("chain_sum", "exit()")):
        assert (
            plain.readable(plain.COMPOSITE, "exit()", {"answer": "1", "metadata": {"source_dataset": source}})
            == read
        )


def test_a_very_long_answer_is_not_evaluated():
    assert plain.readable("countdown", "1+" * plain.LONGEST + "1", {"answer": "1"}) == plain.UNREADABLE
