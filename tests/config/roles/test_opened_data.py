"""The settings of each source of data."""

from fractions import Fraction

import pytest

from rlflow.author.load import load_flow
from rlflow.config.flags import sort_values
from rlflow.config.roles.opened_data import data_settings, open_dataset, own_settings
from rlflow.errors import PlanError


@pytest.mark.parametrize(
    ("ends", "weights"), [((":0.75", ":0.25"), (Fraction(3, 4), Fraction(1, 4))), (("", ""), (2, 1))]
)
def test_unnamed_sources_have_the_shares_of_their_records(tmp_path, ends, weights):
    for name, count in (("a", 2), ("b", 1)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"prompt": "{name}{i}", "answer": "1"}}\n' for i in range(count))
        )
    data = tuple(f"{tmp_path}/{name}.jsonl{end}" for name, end in zip("ab", ends, strict=True))
    flow = load_flow("grpo")
    both = open_dataset(flow, sort_values({"data": data}, ["actor", "reference"], flow.parameters.hp))
    assert dict(both.weights) == dict(zip("ab", weights, strict=True))
    one = open_dataset(flow, sort_values({"data": data[:1]}, ["actor", "reference"], flow.parameters.hp))
    assert ([record.question for record in one.records], one.parts) == (["a0", "a1"], {})


def test_settings_of_a_source_override_settings_of_all():
    values = {"prompt": "question", "a.prompt": "q", "b.prompt": "text", "max_prompt": 9}
    assert own_settings(values, "a", ["a", "b"]) == {"prompt": "q", "max_prompt": 9}
    assert own_settings(values, "c", ["a", "b", "c"]) == {"prompt": "question", "max_prompt": 9}


def test_the_longest_matching_source_name_wins():
    values = {"maths.hard.prompt": "q"}
    for sources in (["maths", "maths.hard"], ["maths.hard", "maths"]):
        assert own_settings(values, "maths.hard", sources) == {"prompt": "q"}
        assert own_settings(values, "maths", sources) == {}


def test_a_missing_source_is_refused():
    with pytest.raises(PlanError, match="'--data.math.prompt' names no source of data") as caught:
        own_settings({"math.prompt": "q"}, "maths", ["maths"])
    assert caught.value.problems[0].nearest == "maths"


def test_data_settings_have_types_and_others_go_to_the_task():
    values = {
        "system": 7,
        "template": "{prompt}",
        "split": "train",
        "chat": "true",
        "max_prompt": "5",
        "max_records": "9",
        "stream": "true",
        "seed": "3",
        "answer": "label",
        "size": "3",
        "mode": "easy",
    }
    assert data_settings(values, ()) == {
        "system": "7",
        "template": "{prompt}",
        "split": "train",
        "chat": True,
        "max_prompt": 5,
        "max_records": 9,
        "stream": True,
        "seed": 3,
        "fields": {"answer": "label"},
        "task": {"size": 3, "mode": "easy"},
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_prompt", "0"),
        ("max_prompt", "many"),
        ("seed", "-1"),
        ("max_prompt", "1.5"),
        ("max_records", "0"),
    ],
)
def test_a_data_number_out_of_range_names_its_flag(name, value):
    with pytest.raises(PlanError, match=f"(?s)found.*{value}.*change --data.{name}$"):
        data_settings({name: value}, ())


@pytest.mark.parametrize(
    "values",
    [
        {"template_kwargs": '{"enable_thinking": false, "date": "1 May"}'},
        {"template_kwargs": {"enable_thinking": False, "date": "1 May"}},
        {"template_kwargs.enable_thinking": "false", "template_kwargs.date": "1 May"},
        {
            "template_kwargs": '{"enable_thinking": true, "date": "1 May"}',
            "template_kwargs.enable_thinking": False,
        },
    ],
)
def test_template_variables_are_given_together_or_one_by_one(values):
    settings = data_settings(own_settings(values, "sums", ["sums", "more"]), ())
    assert settings == {
        "template_kwargs": {"enable_thinking": False, "date": "1 May"},
        "fields": None,
        "task": None,
    }


@pytest.mark.parametrize("value", ["no", "[1]", "3", '{"a"}'])
def test_template_variables_must_be_an_object(value):
    with pytest.raises(PlanError, match="--data.template_kwargs must be a JSON object"):
        data_settings({"template_kwargs": value}, ())


@pytest.mark.parametrize("name", ["sums.template_kwargs", "sums.template_kwargs.enable_thinking"])
def test_template_variables_apply_to_all_sources(name):
    with pytest.raises(PlanError, match="is the same for all sources"):
        own_settings({name: "{}"}, "sums", ["sums"])
