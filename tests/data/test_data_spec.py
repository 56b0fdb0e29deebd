"""Reading of [NAME=]FILE[:WEIGHT]."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.data.data_spec import parse_source, parse_sources

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
PATHS = st.sampled_from(
    [
        "a.jsonl",
        "some/b.v2.parquet",
        "a:b.jsonl",
        "x y=z/c.jsonl",
        "reasoning_gym:chain_sum",
        "chain_sum",
        "with space.jsonl",
    ]
)


@given(PATHS, st.none() | NAMES, st.none() | st.decimals("0.001", 1000, places=3))
def test_a_formatted_name_path_and_weight_is_read_back(path, name, weight):
    written = f"{f'{name}=' if name else ''}{path}{f':{weight}' if weight is not None else ''}"
    source = parse_source(written)
    assert (source.path, source.weight) == (path, None if weight is None else Fraction(weight))
    assert name is None or source.name == name
    assert source.at(path) == written
    assert parse_source(source.at(f"/other/{path}")).weight == source.weight


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("some/gsm8k.parquet", "gsm8k"),
        ("train.v2.jsonl:2", "train.v2"),
        ("some/folder", "folder"),
        ("reasoning_gym:chain_sum:0.3", "chain_sum"),
        ("sums=a.jsonl", "sums"),
    ],
)
def test_a_source_has_its_given_name_or_its_file_stem(written, name):
    assert parse_source(written).name == name


def test_an_existing_path_is_read_as_a_path(tmp_path, monkeypatch):
    path = tmp_path / "n=a.jsonl:0.5"
    path.touch()
    assert (parse_source(str(path)).path, parse_source(str(path)).weight) == (str(path), None)
    weighted = parse_source(f"{path}:0.25")
    assert (weighted.path, weighted.weight) == (str(path), Fraction(1, 4))
    monkeypatch.chdir(tmp_path)
    assert parse_source("n=a.jsonl:0.5:2").path == "n=a.jsonl:0.5"


@pytest.mark.parametrize("weight", ["x", "0,7", "", "0", "-1", "nan", "inf", "1e999"])
def test_an_invalid_weight_is_refused_and_named(weight):
    with pytest.raises(PlanError, match="weight of the data 'a.jsonl'") as error:
        parse_source(f"a.jsonl:{weight}")
    assert error.value.problems[0].found == (weight or "nothing after the colon")


def test_all_sources_have_weights_or_none_has():
    with pytest.raises(PlanError, match="the source 'b' has no weight"):
        parse_sources(["a.jsonl:1", "b.jsonl"])
    assert [source.weight for source in parse_sources(["a.jsonl", "b.jsonl"])] == [None, None]


def test_two_sources_of_one_name_are_refused_with_a_working_remedy():
    with pytest.raises(PlanError, match="two sources of data are called 'a'") as error:
        parse_sources(["x/a.jsonl:1", "y/a.jsonl:2"])
    remedy = error.value.problems[0].remedy.removeprefix("--data ").replace("NAME", "other")
    assert [source.name for source in parse_sources([remedy, "y/a.jsonl:2"])] == ["other", "a"]


def test_a_stem_unfit_for_metrics_needs_a_name_among_several_sources():
    assert parse_sources(["my file!.jsonl"])[0].name == "my file!"
    with pytest.raises(PlanError, match="not a valid name for a source"):
        parse_sources(["my file!.jsonl", "b.jsonl"])
