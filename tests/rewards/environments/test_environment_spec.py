"""The name of an environment: its file and class, its settings with their types, and the limits of its
episodes."""

from pathlib import Path

import pytest
from scenarios import FILE, spec_of

from rlflow.errors import PlanError
from rlflow.rewards.environments.environment_spec import parse_environment

OWN = """
from pathlib import Path
from rlflow import Turn
class Own:
    def __init__(self, *, corpus: Path, topk: int = 3): ...
    def step(self, said): return Turn()
class Bad:
    def __init__(self, *, turns: int = 3): ...
    def step(self, said): return Turn()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return tmp_path


def test_settings_and_limits_are_separated_and_typed(own):
    spec = parse_environment(
        "own.py:Own", {"corpus": "docs.jsonl", "topk": "5", "turns": "4", "seconds": "2.5"}
    )
    assert spec.settings == {"corpus": str(own / "docs.jsonl"), "topk": 5}
    assert spec.paths == ("corpus",)
    assert (spec.bounds.turns, spec.bounds.says, spec.bounds.seconds, spec.bounds.parallel) == (
        4,
        512,
        2.5,
        None,
    )
    assert (spec.path, spec.cls, spec.name, spec.module) == (str(own / "own.py"), "Own", "own.py:Own", "")
    assert str(spec) == f"own.py:Own(corpus='{own}/docs.jsonl', topk=5), at most 4 turns"
    assert spec.packed["settings"] == spec.settings


def test_the_digest_changes_only_with_the_inputs_of_episodes(own):
    digest = parse_environment("own.py:Own", {"corpus": "a"}).digest
    assert digest == parse_environment("own.py:Own", {"corpus": "a", "seconds": "3", "parallel": "2"}).digest
    others = [
        {"corpus": "b"},
        {"corpus": "a", "topk": "4"},
        {"corpus": "a", "turns": "3"},
        {"corpus": "a", "says": "9"},
    ]
    assert digest not in {parse_environment("own.py:Own", values).digest for values in others}
    Path("own.py").write_text(OWN + "# a remark\n")
    assert digest == parse_environment("own.py:Own", {"corpus": "a"}).digest
    Path("own.py").write_text(OWN.replace("Turn()", "Turn(says='x')"))
    assert digest != parse_environment("own.py:Own", {"corpus": "a"}).digest


@pytest.mark.parametrize(
    ("written", "given", "says"),
    [
        (
            "own.py",
            {},
            r"--env does not name an environment: 'own.py'(?s:.*)name one of: own.py:Own, own.py:Bad",
        ),
        ("own", {}, r"--env does not name an environment: 'own'(?s:.*)expected: FILE.py:Class"),
        (
            "texarena:Nim-v0",
            {},
            r"openrlhf:ID, skyrl_gym:ID, textarena:ID, or one of(?s:.*)nearest:  textarena:Nim-v0",
        ),
        (
            "own.py:Own",
            {},
            r"own.py:4: the environment 'Own' needs the setting 'corpus'(?s:.*)--env.corpus VALUE",
        ),
        ("own.py:Own", {"corpus": "a", "topj": "1"}, r"has no setting 'topj'(?s:.*)nearest:  topk"),
        ("own.py:Own", {"corpus": "a", "turn": "1"}, r"has no setting 'turn'(?s:.*)nearest:  turns"),
        (
            "own.py:Own",
            {"corpus": "a", "topk": "many"},
            r"the setting 'env.topk' does not fit(?s:.*)found:    'many'",
        ),
        ("own.py:Own", {"corpus": "a", "turns": "0"}, r"the setting 'env.turns' does not fit(?s:.*)int >= 1"),
        (
            "own.py:Bad",
            {},
            r"own.py:7: the class 'Bad' has a setting 'turns', which is a bound of every episode",
        ),
    ],
)
def test_invalid_settings_are_reported(own, written, given, says):
    with pytest.raises(PlanError, match=says):
        parse_environment(written, given)


def test_all_wrong_settings_are_reported_at_once(own):
    with pytest.raises(PlanError) as error:
        parse_environment("own.py:Own", {"topk": "x", "no": "1"}, "actor.env")
    assert [problem.message.partition("'actor.env")[2] != "" for problem in error.value.problems] == [
        True,
        False,
        False,
    ]
    assert len(error.value.problems) == 3


def test_a_users_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", str(FILE.parent))
    assert parse_environment("~/scripted.py:Silent", {}).path == str(FILE)
    assert spec_of("Silent").source.scores is False
