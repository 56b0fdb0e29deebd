"""Settings dataclasses: comments, values from text, ranges, variants."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.settings import described, fields, override, override_flow, parse, variants
from rlflow.errors import PlanError


@dataclass(frozen=True)
class Base:
    seed: int = 0  # where chance begins


@dataclass(frozen=True)
class Settings(Base):
    """Comments are the help of the flags."""

    samples: Annotated[int, Ge(1)] = 8  # responses per prompt; a # in it stays
    clip: Annotated[float, Gt(0), Le(1)] = 0.2  # trust region
    mean: Literal["tokens", "rows"] = "tokens"
    critic: bool = True  # learn a baseline
    beta: float = 0.0  # already 0
    limit: int | None = None  # None: no limit
    mode: Literal["a", "b"] | None = "a"
    names: tuple[str, ...] = field(default_factory=tuple)  # made anew
    # what a step may change,
    # in nats
    bound: str = "one"
    # not the comment of a setting

    free: str = "one"

    def scaled(self, clip: float):  # not the comment of a setting
        samples: int = 3  # nor this
        return clip * samples


def test_each_field_has_the_comment_on_its_line_or_above():
    comments = {name: entry.comment for name, entry in fields(Settings).items()}
    assert comments == {
        "seed": "where chance begins",
        "samples": "responses per prompt; a # in it stays",
        "clip": "trust region",
        "mean": "",
        "critic": "learn a baseline",
        "beta": "already 0",
        "limit": "None: no limit",
        "mode": "",
        "names": "made anew",
        "bound": "what a step may change, in nats",
        "free": "",
    }


def test_each_field_has_its_line_and_its_default():
    lines = Path(__file__).read_text().splitlines()
    for name, entry in fields(Settings).items():
        assert entry.place.path == __file__
        assert lines[entry.place.line - 1].strip().startswith(f"{name}:")
    assert fields(Settings)["names"].default == ()


def test_a_dataclass_without_source_has_no_comments():
    namespace = {"dataclass": dataclass}
    exec("@dataclass(frozen=True)\nclass Typed:\n    x: int = 1  # lost\n", namespace)
    assert fields(namespace["Typed"])["x"].comment == ""


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (int, "3", 3),
        (float, "1e-5", 1e-5),
        (bool, "true", True),
        (bool, "False", False),
        (str, "a b", "a b"),
        (Literal["tokens", "rows"], "rows", "rows"),
        (int | None, "none", None),
        (int | None, "4", 4),
        (str, "none", "none"),
    ],
)
def test_text_becomes_a_value_of_the_type(type_, text, value):
    assert parse(type_, text) == value


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        (Annotated[float, Gt(0)], 0.0, "float > 0"),
        (Annotated[int, Ge(1), Le(9)], "10", "int >= 1 and <= 9"),
        (bool, "maybe", "bool"),
        (Literal["a", "b"], "c", "'a' | 'b'"),
        (int | None, "x", "int | None"),
        (int, 0.5, "int"),
    ],
)
def test_an_unsuitable_value_is_refused_with_suitable_ones(type_, value, expected):
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}: "):
        parse(type_, value)
    assert described(type_) == expected


def test_an_own_type_takes_any_value():
    class Own:
        """Nothing is known about its values."""

    value = Own()
    assert parse(Own, value) is value


def test_given_values_replace_defaults_and_all_are_checked():
    assert override(Settings(), {"samples": "4", "critic": "false"}, "hp.") == Settings(
        samples=4, critic=False
    )
    with pytest.raises(PlanError) as caught:
        override(Settings(clip=3.0), {"samples": "0", "sample": "1"}, "hp.")
    problems = {problem.code + " " + problem.found: problem for problem in caught.value.problems}
    assert set(problems) == {"unknown-setting sample", "setting-range '0'", "setting-range 3.0"}
    assert problems["unknown-setting sample"].nearest == "samples"
    assert problems["setting-range 3.0"].place == fields(Settings)["clip"].place
    assert problems["setting-range '0'"].remedy == "change --hp.samples"


@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError])
def test_contradicting_settings_are_refused(error):
    @dataclass(frozen=True)
    class Strict:
        low: int = 1
        high: int = 2

        def __post_init__(self):
            if self.low > self.high:
                raise error("low is above high")

    with pytest.raises(PlanError, match="low is above high"):
        override(Strict(), {"low": "3"}, "hp.")


def test_variants_flip_booleans_try_literals_and_zero_numbers():
    changes = dict(variants(Settings(seed=1, limit=5)))
    assert set(changes) == {"seed=0", "mean='rows'", "critic=False", "limit=0", "mode='b'"}
    assert changes["critic=False"] == Settings(seed=1, limit=5, critic=False)


def test_no_settings_have_no_variants():
    assert list(variants(None)) == []


def test_a_variant_refused_by_post_init_is_skipped():
    @dataclass(frozen=True)
    class Strict:
        beta: float = 0.5

        def __post_init__(self):
            assert self.beta > 0

    assert list(variants(Strict())) == []


@given(st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
def test_printed_settings_are_read_back(number, real, flag):
    assert parse(int, str(number)) == number
    assert parse(float, repr(real)) == real
    assert parse(bool, str(flag)) is flag


@dataclass(frozen=True)
class Limits:
    cap: float = float("inf")
    step: float | None = 0.1
    steps: tuple[float, ...] = ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "inf"), ("step", float("-inf")), ("steps", (1.0, float("nan"))), ("cap", "nan")],
)
def test_settings_of_a_flow_are_finite_unless_their_default_is_not(name, value):
    assert override_flow(Limits(), {"cap": "inf", "step": "none"}) == Limits(step=None)
    with pytest.raises(PlanError, match=f"the setting 'hp.{name}' does not fit") as caught:
        override_flow(Limits(), {name: value})
    assert f"change --hp.{name}" in str(caught.value)


def test_a_non_finite_default_of_a_caller_is_refused_at_its_line():
    with pytest.raises(PlanError, match="input should be finite") as caught:
        override_flow(Limits(step=float("inf")), {})
    assert caught.value.problems[0].place.path == __file__
