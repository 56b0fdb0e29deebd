"""Requests have the forms of OpenRLHF's remote reward models, which `--reward URL` also uses, and of the
reward server of SkyPilot's job groups."""

from contextlib import closing

import pytest
import torch
from served import asking
from sources import TASKS
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlflow.errors import PlanError
from rlflow.rewards.reward_pool import RewardPool
from rlflow.rewards.reward_spec import parse_reward
from rlflow.services.serving.reward_server import ServedRewards, reward_application

MODEL = TASKS / "arithmetic_model"
JUDGE = """
def even(completion):
    if completion == "?":
        raise ValueError("no answer")
    return len(completion) % 2 == 0

def secret(completion, entry):
    return 1.0
"""
QUESTION = {"query": ["1+1=2", "1+1=11", "1+1=?"], "prompts": ["1+1="] * 3, "labels": ["2", "2", "2"]}


@pytest.fixture
def served(tmp_path):
    (tmp_path / "mine.py").write_text(JUDGE)
    with closing(RewardPool(1)) as pool:
        yield lambda *written: ServedRewards(
            [parse_reward(each.replace("mine.py", str(tmp_path / "mine.py"))) for each in written], pool, 10.0
        )


def test_rewards_are_summed_and_a_missing_one_is_null(served):
    with asking(reward_application(served("task", "mine.py:even:0.5"), ["task", "even"])) as client:
        assert client.post("/get_reward", QUESTION) == (
            200,
            {"rewards": [1.0, 0.5, None], "missing": {"raised": 1}},
        )
        assert client.get("/health")[1]["rewards"] == ["task", "even"]
        status, answer = client.post("/get_reward", {**QUESTION, "labels": ["2"]})
    assert (status, answer["detail"]) == (
        422,
        "expected as many rows in each list, found query 3, prompts 3, labels 1",
    )


def test_items_of_job_group_clients_are_scored(served):
    items = [{"prompt": "1+1=", "response": said, "ground_truth": "2"} for said in ("2", "11", "?")]
    with asking(reward_application(served("task", "mine.py:even:0.5"), ["task", "even"])) as client:
        status, answer = client.post("/batch_reward", {"items": items})
        assert [each["reward"] for each in answer["rewards"]] == client.post("/get_reward", QUESTION)[1][
            "rewards"
        ]
        assert client.post("/batch_reward", {"items": [{"prompt": "1+1="}]})[0] == 422
        assert client.post("/batch_reward", {"items": []}) == (
            200,
            {"rewards": [], "missing": {}, "accuracy": 0.0},
        )
    assert (status, answer["accuracy"], answer["missing"]) == (200, pytest.approx(1 / 3), {"raised": 1})
    assert [each["correct"] for each in answer["rewards"]] == [True, False, False]


def test_a_reward_that_reads_missing_fields_is_refused(served):
    with pytest.raises(PlanError, match="reads 'entry', which requests do not contain"):
        served("mine.py:secret")


@pytest.mark.slow
def test_a_model_folder_scores_rows_with_tokens(served, tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1).eval()
    model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "judge")
    answer = served(f"{tmp_path / 'judge'}:2").rewards(
        [{"prompt": "1 + 1 =", "completion": said} for said in (" 2", "", " 11")]
    )
    with torch.inference_mode():
        expected = [
            2 * float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits)
            for text in ("1 + 1 = 2", "1 + 1 = 11")
        ]
    first, empty, last = answer["rewards"]
    assert [first, last] == pytest.approx(expected, abs=1e-4)
    assert (empty, answer["missing"]) == (None, {"empty": 1})
