"""Evaluations on held-out prompts, and their schedule."""

import json
import shutil

import pytest
from run_faults import MODEL, write_sums

import rlflow
from rlflow import ask, flow, leave_one_out, loss, stage, text
from rlflow.author.load import load_flow
from rlflow.author.settings import override
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.options import Options
from rlflow.config.roles.bound import bind_roles
from rlflow.data.source import open_data
from rlflow.monitoring.recorded import recorded, sampled_share
from rlflow.runs.final import summary
from rlflow.runs.held_out import usable_sets

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

SMALL = {
    "model": MODEL,
    "prompts": 4,
    "iterations": 2,
    "eval_every": 1,
    "save_every": 0,
    "threads": 1,
    "hp.max_tokens": 3,
}


def evaluated(tmp_path, held_out, **keywords):
    data = str(write_sums(tmp_path / "sums.jsonl"))
    result = rlflow.run("grpo", data=data, out=str(tmp_path), held_out=held_out, **SMALL, **keywords)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation/greedy" in line]


def test_accuracy_is_measured_at_the_start_and_on_schedule(tmp_path):
    lines = evaluated(tmp_path, 5)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    # of five prompts
    assert all(line[f"evaluation/{name}"] * 5 % 1 == 0 for line in lines for name in ("greedy", "sampled"))


def test_without_held_out_prompts_nothing_is_measured(tmp_path):
    assert evaluated(tmp_path, 0) == []


def answers_of(folder, iteration):
    return [
        json.loads(line)
        for line in (folder / "evaluations" / f"after-00000{iteration}.jsonl").read_text().splitlines()
    ]


def sums(path, first, count):
    path.write_text(
        "".join(json.dumps({"ask": f"{first} + {n} =", "sum": str(first + n)}) + "\n" for n in range(count))
    )
    return path


def test_prompts_with_a_template_in_another_set_are_reported(tmp_path):
    model, file = shutil.copytree(MODEL, tmp_path / "model"), tmp_path / "hard.jsonl"
    (model / "chat_template.jinja").write_text("{% for m in messages %}<eos>{{ m.content }}{% endfor %}")
    file.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("1 + 1", "<eos>1 + 2", "2 + 2"))
    )
    algorithm = load_flow("grpo")
    graph = compile_flow(algorithm, override(algorithm.parameters.hp, {"max_tokens": 3}, "hp.")).graph
    roles = bind_roles(graph, sort_values({"model": str(model)}, [use.name for use in graph.roles]))
    notes, options = [], Options(eval=(f"hard={file}",))
    for chat in (True, False):
        opened = {"hard": open_data(file, tokenizer=model, chat=chat)}
        usable_sets(graph, roles, options, lambda names, opened=opened: opened, notes.append, False)
    (told,) = notes
    assert told.startswith(
        f"{file}:2: warning: 1 of 3 prompts of the held-out set 'hard' already contain control tokens"
    )


@pytest.mark.slow
def test_other_sets_are_evaluated_and_their_answers_kept(tmp_path):
    small, fields = (
        sums(tmp_path / "small.jsonl", 1, 6),
        {"data.small.prompt": "ask", "data.small.answer": "sum"},
    )
    keywords = {"eval": [f"small={small}"], "eval_samples": 4, **fields}
    lines = evaluated(tmp_path, 5, name="both", **keywords)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    figures = {"sampled", "greedy", "mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"}
    assert {name for name in lines[0] if name != "iteration"} == {
        f"evaluation/{name}" for name in (*figures, "small/prompts", *(f"small/{name}" for name in figures))
    }
    assert lines[0]["evaluation/small/prompts"] == 6
    assert sorted(path.name for path in (tmp_path / "both/evaluations").iterdir()) == [
        f"after-00000{n}.jsonl" for n in range(3)
    ]
    kept = answers_of(tmp_path / "both", 2)
    assert [row["set"] for row in kept] == [""] * 4 + ["small"] * 6
    assert [(row["record"], row["prompt"], row["answer"], row["role"], row["seed"]) for row in kept[4:]] == [
        (n, f"1 + {n} =", str(1 + n), "actor", 0) for n in range(6)
    ]
    each = [answer for row in kept for answer in (row["greedy"], *row["sampled"])]
    assert {len(row["sampled"]) for row in kept} == {4}
    assert all(
        answer.keys() == {"completion", "score", "extracted", "truncated", "tokens"} for answer in each
    )
    # a token is a letter
    assert all(answer["truncated"] == (len(answer["completion"]) == 3) for answer in each)
    assert {answer["truncated"] for answer in each} == {True, False}
    right = [answer["score"] for row in kept[4:] for answer in row["sampled"]]
    assert lines[-1]["evaluation/small/pass@1"] == lines[-1]["evaluation/small/sampled"] == sum(right) / 24
    # no record of the data is held out
    assert evaluated(tmp_path, 0, name="alone", eval=[f"small={small}"], **fields) == []
    first, several = (answers_of(tmp_path / name, 0) for name in ("alone", "both"))
    assert [row["sampled"][0] for row in first] == [row["sampled"][0] for row in several[4:]]
    assert [row["greedy"] for row in first] == [row["greedy"] for row in several[4:]]
    last = recorded(tmp_path / "alone")
    assert {"evaluation/small/mean@1", "evaluation/small/pass@1"} < last.summary.evaluation.keys()
    assert sampled_share(last.summary.evaluated) == last.curve("evaluation/small/sampled")[-1][1]


def test_the_prompt_of_a_pair_is_answered_once(tmp_path):
    folder = rlflow.run(
        "dpo", out=str(tmp_path), name="pairs", prompts=4, iterations=1, held_out=6, save_every=0, threads=1
    ).folder
    kept = answers_of(folder, 0)
    assert len({row["record"] for row in kept}) == len(kept) >= 6


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
    """Two roles answer the prompts of the data; a third reads the answers of one of them."""
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


def test_each_role_that_answers_data_prompts_is_evaluated(
    tmp_path,
):
    data = str(write_sums(tmp_path / "sums.jsonl"))
    small = {name: value for name, value in SMALL.items() if name != "hp.max_tokens"}
    result = rlflow.run(three, data=data, out=str(tmp_path), held_out=4, **small)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    judged = [line for line in lines if "evaluation/greedy" in line]
    named = {f"evaluation/{role}/{name}" for role in ("one", "other") for name in ("greedy", "sampled")}
    assert all(
        {name for name in line if name.count("/") == 2 and name.startswith("evaluation/")} == named
        for line in judged
    )
    assert all(line["evaluation/sampled"] == line["evaluation/one/sampled"] for line in judged)
    assert result.after.roles.keys() == {"one", "other"}
    assert "other greedy" in summary(result)
    assert {row["role"] for row in result.answers} == {"one"}
    samples = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    assert {row["role"] for row in samples} == {"judge"}
