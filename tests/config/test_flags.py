import copy
import dataclasses
import json
from fractions import Fraction

import pytest

from rlflow.backends import local, null
from rlflow.config.flags import flat, parse_flags, read_flags, read_toml, sort_values
from rlflow.config.roles.bound import class_types, settings
from rlflow.errors import PlanError


def test_flags_are_names_and_texts():
    words = [
        "--hp.beta",
        "0.1",
        "--eval-every=5",
        "--reward",
        "math:0.7",
        "--reward",
        "task",
        "--json",
        "--actor.lr=1e-5",
    ]
    assert parse_flags(words) == {
        "hp.beta": "0.1",
        "eval_every": "5",
        "reward": ("math:0.7", "task"),
        "json": True,
        "actor.lr": "1e-5",
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["beta"], "not a flag"),
        (["--hp.beta"], "no value"),
        (["--hp.beta", "--json"], "no value"),
        (["--seed", "1", "--seed", "2"], "given twice"),
    ],
)
def test_malformed_flags_are_refused(words, says):
    with pytest.raises(PlanError, match=says):
        parse_flags(words)


def test_a_negative_number_is_read_as_a_value():
    assert parse_flags(["--hp.beta", "-1"]) == {"hp.beta": "-1"}


def test_each_flag_reaches_the_options_of_its_prefix():
    given = sort_values(
        {"seed": "3", "hp.beta": "0", "actor.lr": "1", "lr": "2", "data.chat": "true"}, ["actor", "critic"]
    )
    assert given.options.seed == 3
    assert (given.hp, given.data) == ({"beta": "0"}, {"chat": "true"})
    assert given.role("actor").values == {"lr": "1"}
    assert given.role("critic").values == {"lr": "2"}


def test_an_unknown_prefix_is_refused_with_its_nearest():
    with pytest.raises(PlanError) as caught:
        sort_values({"acter.lr": "1"}, ["actor", "critic"])
    assert caught.value.problems[0].nearest == "--actor.lr"


def test_a_value_out_of_range_names_the_flag_and_the_range():
    with pytest.raises(PlanError) as caught:
        sort_values({"prompts": "0", "iterations": "many"}, [])
    assert {problem.found for problem in caught.value.problems} == {"'0'", "'many'"}
    assert all("int >= 1" in problem.expected for problem in caught.value.problems)


def test_a_table_equals_dotted_names(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'seed = 1\nreward = "task"\n[data]\nsource = "sums.jsonl"\nchat = true\n[actor]\nlr = 1e-5\n'
    )
    assert read_toml(path) == {
        "seed": 1,
        "reward": ("task",),
        "data": ("sums.jsonl",),
        "data.chat": True,
        "actor.lr": 1e-5,
    }
    assert flat({"actor": {"lr": 1}}) == {"actor.lr": 1}


def test_pools_from_a_flag_equal_pools_from_a_table():
    table = sort_values(flat({"pools": {"train": 2, "rollout": "2@gpu0.5"}}), []).options.pools
    flag = sort_values(parse_flags(["--pools", "train=2,rollout=2@gpu0.5"]), []).options.pools
    assert flag == table == "train=2,rollout=2@gpu0.5"
    assert flag.ranks == table.ranks == {"train": 2, "rollout": 2}
    assert copy.deepcopy(flag).shares == {"rollout": Fraction(1, 2)}  # like a record of the options
    assert json.dumps(dataclasses.asdict(sort_values({"pools": "all=2"}, []).options)["pools"]) == '"all=2"'


@pytest.mark.parametrize(("value", "pools"), [("", ""), ("none", None), (None, None)])
def test_a_run_can_be_without_pools(value, pools):
    assert sort_values({"pools": value}, []).options.pools == pools


def test_invalid_pools_are_refused_together_with_other_options():
    with pytest.raises(PlanError) as caught:
        sort_values({"pools": "all=0", "prompts": 0}, [])
    assert [problem.code for problem in caught.value.problems] == ["setting-range", "pools"]
    with pytest.raises(PlanError) as caught:
        sort_values({"pools": 3}, [])
    assert caught.value.problems[0].expected == "str | None: input should be a valid string"


def test_flags_override_the_configuration_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('seed = 1\nprompts = 4\nreward = "task"\n')
    assert read_flags(["--seed", "2", "--config", str(path)]) == {
        "seed": "2",
        "prompts": 4,
        "reward": ("task",),
    }
    assert read_flags(["--seed", "2"]) == {"seed": "2"}


def test_a_missing_or_broken_configuration_is_reported(tmp_path):
    (tmp_path / "run.toml").write_text("seed =")
    with pytest.raises(PlanError, match="not TOML"):
        read_toml(tmp_path / "run.toml")
    with pytest.raises(PlanError) as caught:
        read_toml(tmp_path / "runn.toml")
    assert caught.value.problems[0].nearest == "run.toml"


def test_a_setting_of_one_side_overrides_a_setting_of_both():
    values = {"batch_tokens": "7", "actor.generator.batch_tokens": "9", "actor.trainer.lr": "1", "lr": "2"}
    config = sort_values(values, ["actor"]).role("actor")
    slow = sort_values({"actor.token_seconds": "1", "actor.generator.token_seconds": "2"}, ["actor"]).role(
        "actor"
    )
    assert settings(null.Generator, "generator", slow).token_seconds == 2.0
    assert settings(local.Generator, "generator", config).batch_tokens == 9
    assert settings(local.Trainer, "trainer", config).lr == 1.0
    names = set(class_types({"trainer": local.Trainer, "generator": local.Generator}))
    assert {"lr", "trainer.lr", "generator.batch_tokens"} <= names
    assert not {"generator.lr", "trainer.batch_tokens"} & names
