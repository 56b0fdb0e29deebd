"""Splits: which are read, what is held out, several files, and conversations as they come."""

import json

import datasets
import pytest

from rlflow import PlanError
from rlflow.config.roles.opened_data import split_records
from rlflow.data import open_data
from rlflow.data.data_spec import parse_source
from rlflow.data.mixed import mixed

TRAIN = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)]
TEST = [{"question": f"{n} + 2 =", "answer": str(n + 2)} for n in range(6)]


def saved(folder, **splits):
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return folder


def questions(data):
    return [record.question for record in data.records]


def test_the_split_test_is_held_out_and_training_keeps_its_own_records(tmp_path):
    data = open_data(saved(tmp_path / "d", train=TRAIN, validation=TEST[:1], test=TEST))
    assert data.split_lines.startswith(
        f"{tmp_path / 'd'} has the splits train, validation, test: the run trains on 'train' (20 records) and "
        "holds out questions of 'test' (6)"
    )
    training, held_out = split_records(data, 512)
    assert (questions(training), questions(held_out)) == (
        [each["question"] for each in TRAIN],
        [each["question"] for each in TEST],
    )
    assert [record.number for record in held_out.records] == list(range(20, 26))
    assert len(split_records(data, 4)[1]) == 4
    training, held_out = split_records(data, 0)
    assert (len(training), len(held_out), len(training.test)) == (20, 0, 0)


def test_a_held_out_question_is_not_trained_on(tmp_path):
    data = open_data(saved(tmp_path / "d", train=TRAIN, test=[*TEST, TRAIN[3]]))
    training, _ = split_records(data, 512)
    assert TRAIN[3]["question"] not in questions(training)
    assert len(training) == 19


def test_a_named_split_is_read_alone(tmp_path):
    folder = saved(tmp_path / "d", train=TRAIN, test=TEST)
    assert len(open_data(folder, split="train").test) == 0
    assert questions(open_data(folder, evaluates=True)) == [each["question"] for each in TEST]
    assert len(split_records(open_data(folder, split="train"), 512)[1]) == 4, "a fifth"


def test_a_test_split_without_answers_is_not_held_out(tmp_path):
    data = open_data(saved(tmp_path / "d", train=TRAIN, test=[{**TEST[0], "answer": None}]))
    assert data.test == []
    assert "holds out a part of it" in data.split_lines


def test_each_source_holds_out_its_own_test_split(tmp_path):
    own = open_data(saved(tmp_path / "a", train=TRAIN, test=TEST))
    other = open_data(
        saved(tmp_path / "b", train=[{**each, "question": f"b{each['question']}"} for each in TRAIN])
    )
    training, held_out = split_records(mixed({"a": own, "b": other}), 8)
    assert [question.startswith("b") for question in questions(held_out)].count(True) == 4
    assert {question for question in questions(held_out) if question[0] != "b"} <= {
        each["question"] for each in TEST
    }
    assert not set(questions(training)) & set(questions(held_out))


def test_a_pattern_reads_several_files_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "b.csv").write_text("question,answer\nb,2\n")
    (tmp_path / "parts" / "a.jsonl").write_text('{"question": "a", "answer": 1}\n')
    data = open_data("parts/*")
    assert questions(data) == ["a", "b"]
    assert [str(record.place) for record in data.records] == ["parts/a.jsonl:1", "parts/b.csv:2"]
    assert parse_source("parts/*:0.5").name == "parts"
    with pytest.raises(PlanError, match="no such data: parts/c"):
        open_data("parts/c*.jsonl")


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
REPLY = {"role": "assistant", "content": "r"}
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": "r"}]


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"messages": CHAT, "ground_truth": "4"}, "4"),
        ({"messages": [*CHAT, REPLY], "answer": 4}, "4"),
        ({"conversations": SHAREGPT, "solution": "4"}, "4"),
        ({"conversations": [*CHAT, REPLY], "reward_model": {"ground_truth": "4"}}, "4"),
        ({"prompt": CHAT, "ground_truth": "4"}, "4"),
        ({"question": "u", "messages": CHAT, "answer": "4"}, "4"),
    ],
)
def test_conversations_are_prompts_without_the_last_reply(jsonl, record, answer):
    (read,) = open_data(jsonl(json.dumps(record))).records
    assert (read.prompt, read.answer, read.responses) == (
        "u" if "question" in record else tuple(CHAT),
        answer,
        (),
    )


@pytest.mark.parametrize("record", [{"messages": [*CHAT, REPLY]}, {"conversations": SHAREGPT}])
def test_the_last_reply_is_the_completion_for_a_flow_that_needs_one(jsonl, record):
    data = open_data(jsonl(record), completions=True)
    assert (data.records[0].prompt, data.records[0].responses) == (tuple(CHAT), ("r",))


def test_a_conversation_of_a_reply_alone_is_refused(jsonl):
    with pytest.raises(PlanError, match="the field 'messages' begins with the assistant"):
        open_data(jsonl({"messages": [REPLY]}))
