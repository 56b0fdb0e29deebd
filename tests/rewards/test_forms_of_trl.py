"""Reward functions for TRL's GRPOTrainer get what TRL passes, and their None means that they do not apply."""

import json
import math

import pytest
import torch

import rlflow
from rlflow import PlanError
from rlflow.data import open_data
from rlflow.rewards import bind, parse_reward, score_all
from rlflow.rewards.forms import TRL, by_batch
from rlflow.rewards.reward_spec import wanted
from rlflow.rewards.text import reads

FILE = """
import re, asyncio

def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def tagged(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]

def asked(prompts, completions, **kwargs):
    return [float(len(p) * 10 + (p[-1]["role"] == c[0]["role"])) for p, c in zip(prompts, completions)]

def of_math(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]

def of_code(prompts, completions, task, **kwargs):
    return [-1.0 if t == "code" else None for t in task]

async def later(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if completion else 0.0 for completion in completions]

def tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def logged(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("size", [len(c) for c in completions])
    log_extra("text", completions)
    log_metric("mean", 0.5)
    return [0.0] * len(completions)

def staged(completions, trainer_state):
    return [trainer_state.global_step] * len(completions)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "rewards.py").write_text(FILE)
    return str(tmp_path / "rewards.py")


@pytest.fixture
def jsonl(tmp_path):
    def written(*records):
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / "d.jsonl")

    return written


pytestmark = pytest.mark.slow  # starts processes


def scored(data, file, functions, completions, pool, **settings):
    """Return the summed scores of completions, for the first records of the data."""
    specs = [parse_reward(f"{file}:{function}") for function in functions]
    opened = open_data(data, wanted=wanted(specs), **settings)
    batch = opened.batch(range(len(completions)))
    sampled = rlflow.Batch.of(completion=completions, tokens=[[1] * len(each) for each in completions])
    return score_all(
        bind(specs, pool, opened), rlflow.Batch(batch.axis, batch.data | sampled.data), torch.float32
    )


def test_a_function_gets_lists_with_a_value_per_row(file, jsonl, pool):
    data = jsonl({"prompt": "p", "ground_truth": "2"}, {"prompt": "p", "ground_truth": "5"})
    completions = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
    assert scored(data, file, ["boxed"], completions, pool).values.tolist() == [1, 0]
    assert scored(data, file, ["later"], ["a", ""], pool).values.tolist() == [1, 0]
    assert scored(data, file, ["tokens"], ["abc", "a"], pool).values.tolist() == [3, 1]


def test_prompts_that_are_messages_have_completions_that_are_messages(file, jsonl, pool):
    turns = [{"role": "assistant", "content": "2?"}]
    data = jsonl({"prompt": turns}, {"prompt": [{"role": "system", "content": "s"}, *turns]})
    completions = ["<think>2</think>2", "2"]
    assert scored(data, file, ["tagged"], completions, pool).values.tolist() == [1, 0]
    assert scored(data, file, ["asked"], completions, pool).values.tolist() == [11, 21]


def test_a_system_message_makes_text_prompts_messages(file, jsonl, pool):
    data = jsonl({"prompt": "2?"})
    assert scored(data, file, ["asked"], ["a"], pool, system="s", chat=True).values.tolist() == [20]


def test_none_means_that_the_function_does_not_apply(file, jsonl, pool):
    data = jsonl(*({"prompt": "p", "task": task} for task in ("math", "code", "other")))
    scores = scored(data, file, ["of_math:2", "of_code"], ["a", "b", "c"], pool)
    assert scores.values.tolist()[:2] == [2, -1]
    assert math.isnan(scores.values[2])
    assert {name: dict(part.missing) for name, part in scores.parts.items()} == {
        "of_math": {"none": 1},
        "of_code": {"none": 1},
    }


def test_none_of_a_function_for_rlflow_makes_the_sum_missing(file, jsonl, pool, tmp_path):
    (tmp_path / "own.py").write_text("def own(completion): return None")
    data = jsonl({"prompt": "p", "task": "math"})
    specs = [parse_reward(f"{file}:of_math"), parse_reward(f"{tmp_path}/own.py:own")]
    opened = open_data(data, wanted=wanted(specs))
    batch = opened.batch([0])
    whole = rlflow.Batch(batch.axis, batch.data | rlflow.Batch.of(completion=["a"]).data)
    assert math.isnan(score_all(bind(specs, pool, opened), whole, torch.float32).values[0])


def test_what_a_function_logs_is_logged_per_row(file, jsonl, pool):
    scores = scored(jsonl({"prompt": "p"}, {"prompt": "p"}), file, ["logged"], ["abc", "a"], pool)
    others = {key: numbers.tolist() for key, numbers in scores.parts["logged"].others.items()}
    assert others == {"size": [3, 1], "mean": [0.5, 0.5]}


def test_a_list_of_another_length_is_refused():
    rows = [{"prompt": "p", "completion": "c"}] * 2
    found = list(by_batch(lambda completions, **rest: [1.0], rows, TRL))
    assert [cause for cause, _ in found] == ["type", "type"]
    assert "list of 1 for 2 rows" in found[0][1]


def test_a_function_that_needs_the_trainer_is_refused(file):
    with pytest.raises(PlanError, match="it needs TRL's 'trainer_state'") as caught:
        reads(file, "staged")
    assert caught.value.problems[0].place.path == file
    assert caught.value.problems[0].remedy.startswith("give it a default")


@pytest.mark.parametrize("flow", ["grpo", "correction"])
def test_a_run_calls_functions_as_trl_does(flow, file, jsonl, tmp_path):
    data = jsonl(*({"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "a"} for n in range(8)))
    (tmp_path / "chat.py").write_text("""
def judged(prompts, completions, completion_ids, answer, **kwargs):
    rows = zip(prompts, completions, completion_ids, answer)
    return [float(isinstance(p, str) == isinstance(c, str) and len(i) > 0 and a == "a") for p, c, i, a in rows]
""")
    ran = rlflow.run(
        flow,
        backend="null",
        data=data,
        prompts=4,
        iterations=1,
        reward=f"{tmp_path}/chat.py:judged",
        held_out=0,
        out=str(tmp_path / "runs"),
    )
    assert (ran.last["reward/mean"], ran.last.get("reward#2/mean", 1.0)) == (1.0, 1.0)
