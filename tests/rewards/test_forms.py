"""Reward functions and records of verl, OpenRLHF and TRL are recognised by their parameters and fields, and
work unchanged."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlflow
from rlflow.data import open_data
from rlflow.rewards import RewardPool, bind, parse_reward
from rlflow.rewards.forms import OPENRLHF, TRL, VERL, by_batch, by_row, form_of
from rlflow.rewards.reward_spec import wanted
from rlflow.rewards.text import reads

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

VERL_FILE = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    numbers = re.findall(r"-?[0-9]+", solution_str)
    return {"score": float(numbers[-1:] == [ground_truth]), "index": extra_info["index"]}

def short(solution_str, ground_truth, method="strict", score=1.0):
    return score if solution_str == ground_truth and method == "strict" else 0
"""
OPENRLHF_FILE = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    right = [query[len(prompt):] == label for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    rewards = torch.tensor(right, dtype=torch.float)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards.mean(), "rows": [len(queries)] * len(queries)}}

def careful(queries, prompts, labels):
    if any("hang" in query for query in queries): import time; print("hangs", end=""); time.sleep(3600)
    if any("bad" in query for query in queries): raise ValueError("bad")
    return [float(len(query)) for query in queries]
"""
NAMES = st.lists(
    st.sampled_from(
        [*VERL.parameters, *OPENRLHF.parameters, "completions", "completion_ids", "completion", "other"]
    ),
    unique=True,
    min_size=1,
)


@pytest.fixture
def verl(tmp_path: Path) -> tuple[str, str]:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    records = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(12)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "train.parquet")
    (tmp_path / "gsm8k.py").write_text(VERL_FILE)
    return str(tmp_path / "train.parquet"), f"{tmp_path}/gsm8k.py:compute_score"


@pytest.fixture
def openrlhf(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"input": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(12))
    )
    (tmp_path / "reward_func.py").write_text(OPENRLHF_FILE)
    return str(tmp_path / "train.jsonl"), f"{tmp_path}/reward_func.py:reward_func"


def scores_of(data, reward, completions, pool):
    spec = parse_reward(reward)
    opened = open_data(data, wanted=wanted([spec]))
    batch = opened.batch(range(len(completions)))
    batch |= rlflow.author.batch.Batch(
        batch.axis, {"completion": rlflow.author.batch.Data(rlflow.text, tuple(completions))}
    )
    return bind([spec], pool, opened)[0].score(batch)


def test_verl_records_and_rewards_work_unchanged(verl, pool):
    data = open_data(verl[0])
    assert (data.fields["prompt"], data.fields["answer"]) == ("prompt", "reward_model.ground_truth")
    assert "names of verl: prompt from 'prompt', answer from 'reward_model.ground_truth'" in data.recognised
    scores = scores_of(*verl, ["it is 0", "it is 3", "4"], pool)
    assert scores.values.tolist() == [1, 0, 1]
    assert scores.others["index"].tolist() == [0, 1, 2]


def test_openrlhf_records_and_rewards_work_unchanged(openrlhf, pool):
    data = open_data(openrlhf[0])
    assert (data.fields["prompt"], data.fields["answer"]) == ("input", "label")
    assert "names of OpenRLHF" in data.recognised
    scores = scores_of(*openrlhf, ["0", "3", "4", "6", "8", "x", "12", "14"], pool)
    assert scores.values.tolist() == [1, 0, 1, 1, 1, 0, 1, 1]
    assert {"scores", "accuracy", "rows"} == set(scores.others)


def test_rlflow_records_are_not_taken_for_foreign_ones(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    assert open_data(tmp_path / "d.jsonl").recognised == ""


def test_a_run_reports_the_form_of_its_data_and_reward(verl, tmp_path, capsys):
    from rlflow.cli.main import exit_code

    run = [
        "run",
        "grpo",
        "--backend",
        "null",
        "--data",
        verl[0],
        "--reward",
        verl[1],
        "--prompts",
        "4",
        "--hp.samples",
        "2",
        "--iterations",
        "1",
        "--held-out",
        "0",
        "--out",
        str(tmp_path / "runs"),
    ]
    assert exit_code(run) == 0
    out = capsys.readouterr()
    assert "uses the field names of verl" in out.out + out.err
    assert "reward compute_score is called in the way of verl" in out.out + out.err
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert "reward/compute_score_index" in metrics.read_text()


QUERIES = """
def worded(queries, prompts, labels):
    return [float(q.startswith(p)) + 10.0 * (p.startswith("Q: ") and p.endswith("\\nA:")) for q, p in zip(queries, prompts, strict=True)]
"""


@pytest.mark.parametrize("flow", ["grpo", "correction"])
def test_queries_have_the_prompt_as_the_model_reads_it(openrlhf, tmp_path, flow):
    (tmp_path / "queries.py").write_text(QUERIES)
    ran = rlflow.run(
        flow,
        backend="null",
        data={"source": openrlhf[0], "template": "Q: {prompt}\nA:"},
        prompts=4,
        iterations=1,
        reward=f"{tmp_path}/queries.py:worded",
        held_out=0,
        out=str(tmp_path / "runs"),
    )
    assert ran.last["reward/mean"] == 11.0
    # of the second attempts, whose prompt has no template
    assert ran.last.get("reward#2/mean", 1.0) == 1.0


@pytest.mark.parametrize("spec", ["http://judge/get_reward", "queries.py:worded"])
def test_only_query_rewards_read_the_prompt_with_its_template(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queries.py").write_text(QUERIES)
    assert wanted([parse_reward("math"), parse_reward(spec)]).model_prompt
    assert not wanted([parse_reward("math")]).model_prompt


@pytest.mark.slow
def test_a_failing_row_of_a_batch_is_missing_alone(openrlhf, patient):
    file = openrlhf[1].partition(":")[0]
    (reward,) = bind([parse_reward(f"{file}:careful")], patient, timeout=0.4)
    batch = rlflow.Batch.of(prompt=["p"] * 5, completion=["a", "bad", "c", "hang", "e"], answer=["x"] * 5)
    scores = reward.score(batch)
    assert scores.missing == {"raised": 1, "timeout": 1}
    assert [i for i, score in enumerate(scores.values.tolist()) if math.isnan(score)] == [1, 3]


@given(NAMES, st.booleans(), st.booleans())
def test_a_form_is_recognised_by_its_parameters(tmp_path_factory, names, rest, later):
    form = form_of(names)
    assert (form is VERL) == ({"solution_str", "ground_truth"} <= set(names))
    assert (form is OPENRLHF) == (
        form is not VERL and "queries" in names and bool({"prompts", "labels"} & set(names))
    )
    assert (form is TRL) == (
        form not in (VERL, OPENRLHF) and bool({"completions", "completion_ids"} & set(names))
    )
    file = tmp_path_factory.getbasetemp() / "form.py"
    file.write_text(f"{'async ' * later}def f({', '.join([*names, *['**rest'] * rest])}): pass")
    read = reads(str(file), "f")
    assert read.form is form
    if form:
        ids = ["tokens"] if form is TRL and "completion_ids" in names else []
        assert set(read.required) == {*form.reads, *ids, *(set(names) - set(form.parameters))}
        assert read.rest == (rest and form is TRL)
    else:
        assert set(names) <= set(read.required) <= {*names, *["completion"] * rest}


@given(
    st.sets(st.sampled_from(VERL.parameters)).map(lambda names: names | {"solution_str", "ground_truth"}),
    st.booleans(),
)
def test_a_verl_function_gets_the_arguments_it_takes(names, rest):
    scope = {}
    exec(f"def f({', '.join([*sorted(names), *['**rest'] * rest])}): return dict(locals())", scope)
    got = by_row(scope["f"])(completion="c", ground_truth={"target": ["1"]}, data_source="d")
    got |= got.pop("rest", {})
    every = {"data_source": "d", "solution_str": "c", "ground_truth": {"target": ["1"]}, "extra_info": {}}
    assert got == {name: value for name, value in every.items() if rest or name in names}
    assert by_row(scope["f"])(completion="c", answer="a")["ground_truth"] == "a"


@pytest.mark.parametrize(
    "returned", [1.0, [1.0], [1.0] * 3, "ab", {"scores": [1.0, 2.0]}, None, {"rewards": [1.0]}]
)
def test_a_batch_without_a_number_per_row_is_missing(returned):
    rows = [{"prompt": "p", "completion": "c", "answer": "a"}] * 2
    assert [cause for cause, _ in by_batch(lambda queries, prompts, labels: returned, rows)] == ["type"] * 2


def test_numbers_of_a_batch_are_checked_row_by_row():
    rows = [{"prompt": "p", "completion": "c", "label": {"a": 1}}] * 4
    found = list(by_batch(lambda queries, labels: [1, math.nan, [1.0], labels[3]["a"]], rows))
    assert found[2] == ["type", "the list returned by the function contains list, not a number"]
    found_in_dict = list(by_batch(lambda queries, labels: {"rewards": [math.nan, "1", 0, 0]}, rows))
    assert found_in_dict[:2] == [
        ["nan", "the list returned by the function contains nan"],
        ["type", "the list returned by the function contains str, not a number"],
    ]
    assert [item if isinstance(item, float) else item[0] for item in found] == [1.0, "nan", "type", 1.0]


def test_a_verl_function_needs_no_field_if_the_data_have_an_answer(verl):
    file = verl[1].partition(":")[0]
    assert reads(file, "short").required == ("completion", "answer")
    with RewardPool(1) as pool:
        (reward,) = bind([parse_reward(f"{file}:short")], pool)
        assert reward.score(rlflow.Batch.of(completion=["1", "2"], answer=["1", "1"])).values.tolist() == [
            1,
            0,
        ]
