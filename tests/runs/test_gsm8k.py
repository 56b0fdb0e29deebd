"""GSM8K: its answers are scored as they are written, and runs train on it with and without a chat
template."""

import contextlib
import io
import json
import math

import pytest
from small_models import CHAT, make
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlflow
from rlflow import Batch
from rlflow.cli.main import exit_code
from rlflow.data import open_data
from rlflow.rewards import RewardPool, bind, parse_reward

PROBLEMS = ROOT / "tests" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "instruct", "qwen3", CHAT)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "base", "llama")


def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return exit_code(list(map(str, words))), out.getvalue()


def metrics(folder):
    """Return the lines of iterations, without those of evaluations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor.update/loss" in row]


def scores_of(reward, completions, data):
    with RewardPool(1) as pool:
        (bound,) = bind([parse_reward(reward)], pool, data)
        rows = data.batch(range(len(data)))
        return bound.score(rows | Batch(rows.axis, Batch.of(completion=completions).data))


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["task", "math"])
def test_worked_solutions_are_right_and_other_numbers_are_wrong(reward):
    data = open_data(PROBLEMS)
    answers = [record.answer for record in data.records]
    numbers = [answer.rpartition("#### ")[2] for answer in answers]
    right = scores_of(reward, answers, data)
    wrong = scores_of(
        reward,
        [
            f"{answer.rpartition('#### ')[0]}#### {int(number.replace(',', '')) + 1}"
            for answer, number in zip(answers, numbers, strict=True)
        ],
        data,
    )
    assert (len(data), right.missing, wrong.missing) == (64, {}, {})
    assert right.values.tolist() == [1.0] * 64
    assert wrong.values.tolist() == [0.0] * 64
    assert scores_of(reward, numbers, data).values.tolist() == [1.0] * 64  # the number alone


@pytest.mark.slow
def test_grpo_trains_on_gsm8k_from_the_command_line(instruct, tmp_path):
    system = "Put the final answer after ####."
    code, text = printed(
        "run",
        ROOT / "algorithms" / "grpo.py",
        "--model",
        instruct,
        "--data",
        PROBLEMS,
        "--reward",
        "math",
        "--iterations",
        2,
        "--prompts",
        4,
        "--hp.samples",
        2,
        "--hp.max-tokens",
        8,
        "--held-out",
        4,
        "--data.system",
        system,
        "--lr",
        "1e-3",
        "--out",
        tmp_path,
        "--name",
        "one",
    )
    assert code == 0, text
    assert f"prompts go through the chat template of {instruct}" in text
    rows = metrics(tmp_path / "one")
    assert len(rows) == 2
    assert all(row["reward/missing"] == 0 and math.isfinite(row["actor.update/loss"]) for row in rows)
    final = tmp_path / "one" / "final" / "actor"
    assert AutoTokenizer.from_pretrained(final).chat_template == CHAT
    assert AutoModelForCausalLM.from_pretrained(final).config.model_type == "qwen3"


def first_prompt(folder, model="model", **data):
    """Return the first prompt of the run as text."""
    roles = rlflow.roles(
        "grpo", **{model: str(folder)}, data={"source": str(PROBLEMS), **data}, reward="math", held_out=0
    )
    try:
        batch = roles.take(1)
        return AutoTokenizer.from_pretrained(folder).decode(batch["prompt_tokens"][0]), batch["prompt"][0]
    finally:
        roles.close()


@pytest.mark.slow
def test_prompts_use_the_chat_template_if_there_is_one(instruct, base):
    opening, ending = (
        "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    text, question = first_prompt(instruct)
    assert text == opening.format("You are a helpful assistant.") + question.strip() + ending
    text, question = first_prompt(instruct, system="Count.", template="{prompt} Explain.")
    assert text == opening.format("Count.") + f"{question} Explain." + ending
    text, question = first_prompt(instruct, "actor.model", chat=False)  # the only model there is
    assert text == question
    text, question = first_prompt(base, template="Q: {prompt}\nA:")
    assert text == f"Q: {question}\nA:"


@pytest.mark.slow
def test_sft_takes_the_worked_solutions_as_completions(base, tmp_path):
    result = rlflow.run(
        "sft",
        model=str(base),
        data={"source": str(PROBLEMS), "completion": "answer"},
        prompts=8,
        iterations=3,
        held_out=0,
        lr=1e-2,
        out=str(tmp_path),
    )
    losses = [row["actor.update/loss"] for row in metrics(result.folder)]
    assert losses[0] > losses[1] > losses[2]
