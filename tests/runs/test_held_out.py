"""What is measured on held-out prompts, and when."""

import json

from run_faults import MODEL, write_sums

import rlflow
from rlflow import ask, flow, leave_one_out, loss, stage, text
from rlflow.runs.report import summary

SMALL = {"model": MODEL, "prompts": 4, "iterations": 2, "eval_every": 1, "save_every": 0, "threads": 1, "hp.max_tokens": 3}


def evaluated(tmp_path, held_out, **keywords):
    data = str(write_sums(tmp_path / "sums.jsonl"))
    result = rlflow.run("grpo", data=data, out=str(tmp_path), held_out=held_out, **SMALL, **keywords)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation/greedy" in line]


def test_accuracy_is_measured_before_the_first_iteration_and_as_often_as_asked_for(tmp_path):
    lines = evaluated(tmp_path, 5)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(line[f"evaluation/{name}"] * 5 % 1 == 0 for line in lines for name in ("greedy", "sampled"))  # of five prompts


def test_without_held_out_prompts_nothing_is_measured(tmp_path):
    assert evaluated(tmp_path, 0) == []


@loss
def likelihood(new, advantages):
    return -new.logprobs * advantages, {}


@stage(gives="advantages", rows="group")
def above_others(scores, group, mask):
    return (scores - leave_one_out(scores, group))[:, None] * mask


@stage(gives={"question": text})
def again(prompt):
    return prompt


@flow
def three(prompts, one, other, judge, reward):
    """Two roles answer the prompts of the data; a third reads what one of them said."""
    rows = []
    for role in (one, other):
        batch = role.generate(prompts, samples=2, max_tokens=3)
        batch |= reward(batch)
        batch |= above_others(batch)
        role.update(batch, likelihood)
        rows.append(batch)
    last = judge.generate(ask(rows[0] | again(rows[0]), "question"), samples=2, max_tokens=3)
    last |= reward(last.drop("scores") if "scores" in last else last)
    last |= above_others(last.drop("advantages") if "advantages" in last else last)
    judge.update(last, likelihood)


def test_each_role_that_answers_the_prompts_of_the_data_is_evaluated_by_name_and_samples_name_theirs(tmp_path):
    data = str(write_sums(tmp_path / "sums.jsonl"))
    small = {name: value for name, value in SMALL.items() if name != "hp.max_tokens"}
    result = rlflow.run(three, data=data, out=str(tmp_path), held_out=4, **small)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    judged = [line for line in lines if "evaluation/greedy" in line]
    named = {f"evaluation/{role}/{name}" for role in ("one", "other") for name in ("greedy", "sampled")}
    assert all({name for name in line if name.count("/") == 2 and name.startswith("evaluation/")} == named for line in judged)
    assert all(line["evaluation/sampled"] == line["evaluation/one/sampled"] for line in judged)
    assert result.after.roles.keys() == {"one", "other"}
    assert "other greedy" in summary(result)
    assert {row["role"] for row in result.answers} == {"one"}
    samples = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    assert {row["role"] for row in samples} == {"judge"}
