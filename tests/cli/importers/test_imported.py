"""The imported configuration as a file: each key has one outcome, and the file has one table per section."""

import tomllib
from dataclasses import replace

import pytest

from rlflow.cli.importers.imported import Imported, Keys, expand_home

KEYS = Keys("other", "1.0", {"a.rate": 0.5, "a.form": "x"}, {"a.noise": (0, None)}, ("log.*",))


def imported(**source):
    settings = Imported(KEYS, {name.replace("__", "."): value for name, value in source.items()}, "grpo")
    settings.take("a.rate", "actor.lr", lambda value: value * 2)
    if settings.value("a.form", "--hp.form") == "y":
        settings.refuse("a.form", "there is one form")
    settings.finish()
    return settings


@pytest.mark.parametrize(
    ("source", "lots"),
    [
        ({"a__rate": 1.0}, (["a.rate"], [], [])),
        ({"a__form": "y"}, ([], ["a.form"], [])),
        ({"a__noise": 0}, ([], [], ["a.noise"])),
        ({"a__noise": 0.1}, ([], ["a.noise"], [])),
        ({"log__to": "x"}, ([], [], ["log.to"])),
        ({"b": 1}, ([], ["b"], [])),
    ],
)
def test_each_key_is_imported_unsupported_or_meaningless(source, lots):
    settings = imported(**source)
    assert (list(settings.counterparts), list(settings.unsupported), settings.meaningless()) == lots
    assert settings.flags == {"actor.lr": 2 * source.get("a__rate", 0.5)}


def test_a_foreign_default_without_a_counterpart_is_a_difference():
    settings = imported()
    settings.refuse("a.form", "there is one form")
    assert (settings.differs, settings.unsupported) == ({"a.form": "there is one form"}, {})
    assert "# differs: a.form: there is one form" in settings.toml("run.toml")


def test_an_unsupported_key_is_a_comment_with_a_remedy():
    settings = imported(a__noise=0.1)
    assert "# not supported: a.noise = 0.1: rlflow has no counterpart; write" in settings.toml("r")
    (problem,) = settings.problems("run.sh")
    assert problem.severity == "warning"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install other==1.0", None),
        ("pip install other==0.9", None),
        ('dependencies = ["other>=1"]', None),
        ("other[vllm]~=2.3", "other 2.3, named in the file"),
        ("another==2.0", None),
        ("", None),
    ],
)
def test_an_unknown_release_is_reported(text, found):
    problem = replace(KEYS, earlier=("0.9",)).unknown_release(text)
    assert (problem and problem.found) == found
    assert not problem or problem.expected == "other 1.0, 0.9"


def test_an_installed_release_is_reported():
    assert Keys("pytest", pytest.__version__, {}, {}, ()).unknown_release("") is None
    assert Keys("pytest", "1.0", {}, {}, ()).unknown_release("").found.endswith(", installed")


def test_the_file_is_toml_with_tables_of_flags(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = imported()
    settings.flags |= {
        "data": ["~/a.parquet", 'b "c".jsonl'],
        "data.max_prompt": 4,
        "eval": ["val=~/d"],
        "prompts": 8,
        "model": "org/name",
    }
    settings.finish()
    assert tomllib.loads(settings.toml("run.toml")) == {
        "eval": ["val=/home/somebody/d"],
        "prompts": 8,
        "model": "org/name",
        "actor": {"lr": 1.0},
        "data": {"source": ["/home/somebody/a.parquet", 'b "c".jsonl'], "max_prompt": 4},
    }
    assert settings.by_hand == []
    assert expand_home("hp.form", "~") == "~"
