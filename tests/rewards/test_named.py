"""Rewards as users write them, and the named functions, read without an import."""

import functools
import json
from pathlib import Path

import pytest

from rlflow import Batch, PlanError
from rlflow.rewards import RewardPool, RewardSpec, bind, from_function, parse_reward, reads

FILE = """
raise SystemExit("never imported")

def accuracy(completion, answer, *, level=1, tests): ...
if True:
    def guarded(completion=None): ...
async def later(completion): ...
def positional(completion, /): ...
def rest(*columns): ...
def options(completion, **options): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "judge.py").write_text(FILE)
    return str(tmp_path / "judge.py")


def module_level(completion: str) -> float:
    return len(completion)


def test_a_wrong_return_value_is_reported_with_its_place(tmp_path):
    (tmp_path / "judge.py").write_text(
        "import math\n\ndef none(completion):\n    return None if completion else math.nan\n"
    )
    with RewardPool(1) as pool:
        (reward,) = bind([parse_reward(f"{tmp_path}/judge.py:none")], pool)
        first = reward.score(Batch.of(completion=["a", ""])).first
    place = f"{tmp_path}/judge.py:3: the function returned"
    assert first == {"none": f"{place} None", "nan": f"{place} nan"}


@pytest.mark.parametrize(
    ("written", "kind", "weight"),
    [("task", "task", 1), ("math:0.7", "math", 0.7), ("task:-1e-1", "task", -0.1)],
)
def test_built_in_rewards_have_weights(written, kind, weight):
    assert parse_reward(written) == RewardSpec(kind, kind, weight)


def test_functions_and_models_have_weights(file, tmp_path):
    assert parse_reward(f"{file}:accuracy:0.5") == RewardSpec("function", "accuracy", 0.5, file, "accuracy")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    assert parse_reward(f"{tmp_path}/model:2") == RewardSpec("model", "model", 2.0, f"{tmp_path}/model")
    with pytest.raises(ValueError, match="bind it as a role"):
        bind([parse_reward(f"{tmp_path}/model")], RewardPool())


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("maht", r"no such reward: 'maht'(.|\n)*expected: +task, math(.|\n)*nearest: +math"),
        ("math:0", "is invalid"),
        ("math:nan", "is invalid"),
        ("math:much", "no such reward"),
        ("", "no such reward"),
        ("FILE:acuracy", r"judge.py:1: (.|\n)*found: +accuracy, guarded(.|\n)*nearest: +accuracy"),
        ("FILE", r"does not name a function(.|\n)*name one of: .*judge.py:accuracy"),
        ("FILE::accuracy", "does not name a function"),
        ("FILE:0.5", "does not name a function"),
        ("FILE:nan", "does not define a function 'nan'"),
        ("FILE:inf:nan", "is invalid"),
        ("FILEx:accuracy", "does not name a function"),
        ("FOLDER/juge.py:accuracy", r"no such reward file(.|\n)*nearest: +judge.py"),
        ("FOLDER", r"does not contain a model(.|\n)*found: +judge.py"),
        ("FILE:positional", "positional-only"),
        ("FILE:rest", "positional-only parameters or"),
    ],
)
def test_an_invalid_reward_is_refused(file, written, says):
    with pytest.raises(PlanError, match=says):
        parse_reward(written.replace("FILE", file).replace("FOLDER", str(Path(file).parent)))


def test_a_file_that_is_not_python_is_reported_with_its_line(tmp_path):
    (tmp_path / "r.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(PlanError, match="r.py:2: .*not valid Python"):
        parse_reward(f"{tmp_path / 'r.py'}:f")


def test_parameters_are_read_without_importing(file):
    read = reads(file, "accuracy")
    assert (read.required, read.optional, read.place.line) == (
        ("completion", "answer", "tests"),
        ("level",),
        4,
    )
    assert reads(file, "guarded").optional == ("completion",)
    assert reads(file, "options").required == ("completion",)


def test_async_and_variadic_functions_are_recognised_from_text(file):
    assert reads(file, "later").later
    options = reads(file, "options")
    assert options.rest
    assert (options.required, options.optional) == (("completion",), ())
    assert not reads(file, "accuracy").rest


def test_a_function_object_becomes_its_file_and_name():
    spec = from_function(module_level, 0.5)
    assert (spec.kind, spec.path, spec.function, spec.weight) == ("function", __file__, "module_level", 0.5)


def test_functions_that_cannot_be_loaded_are_refused():
    def inner(completion): ...

    for function in (lambda completion: 1, inner, functools.partial(module_level), Path.exists):
        with pytest.raises(PlanError, match=r"put the function in a file"):
            from_function(function)


def test_a_function_of_a_package_keeps_its_relative_imports(tmp_path, monkeypatch):
    import importlib

    from rlflow import Batch

    (tmp_path / "judging").mkdir()
    (tmp_path / "judging" / "__init__.py").write_text("")
    (tmp_path / "judging" / "values.py").write_text("VALUE = 3")
    (tmp_path / "judging" / "rewards.py").write_text(
        "from .values import VALUE\ndef fixed(completion): return VALUE"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(1) as pool:
        (reward,) = bind([from_function(importlib.import_module("judging.rewards").fixed)], pool)
        assert reward.score(Batch.of(completion=["x"])).values.tolist() == [3]


def test_a_file_that_starts_a_run_when_loaded_is_reported(tmp_path):
    from rlflow import Batch

    (tmp_path / "script.py").write_text(
        "from rlflow.rewards import RewardPool\nfrom rlflow.data.scorer import MATCH\ndef f(completion): "
        "return 1\n\nRewardPool().score(MATCH, ['completion', 'answer'], [['1', '1']])\n"
    )
    with (
        RewardPool(1) as pool,
        pytest.raises(PlanError, match=r"script.py:5: (.|\n)*starts a run when it is loaded"),
    ):
        bind([parse_reward(f"{tmp_path / 'script.py'}:f")], pool)[0].score(Batch.of(completion=["1"]))
