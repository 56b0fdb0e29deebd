"""The questions and the reward of the suite with a real model; the model itself is not downloaded."""

import json
import re

import pytest

from rlflow.benchmarks.suites.gemma import FIXED, HELD_OUT, QUESTIONS, make, right


def test_training_and_held_out_questions_differ_and_have_right_answers(tmp_path):
    cache, folder = tmp_path / "cache", tmp_path / "made"
    (cache / "model").mkdir(parents=True)
    folder.mkdir()
    make(folder, cache)
    train, held = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held")
    )
    assert (len(train), len(held)) == (QUESTIONS, HELD_OUT)
    assert len({record["prompt"] for record in (*train, *held)}) == QUESTIONS + HELD_OUT
    for record in (*train[:50], *held[:50]):
        first, second = re.findall(r"\d+", record["prompt"])
        assert record["answer"] == str(max(int(first), int(second)))
    assert (folder / "model").resolve() == cache / "model"
    assert "def right" in (folder / "reward.py").read_text()
    sums = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    assert len({record["prompt"].rpartition("Question")[2] for record in sums}) == 100
    for record in sums:
        *worked, (first, second, _) = re.findall(r"(\d) \+ (\d)\?\nAnswer:(?: (\d+)\n)?", record["prompt"])
        assert [int(a) + int(b) for a, b, _ in worked] == [int(answer) for _, _, answer in worked]
        assert (len(worked), record["answer"]) == (2, str(int(first) + int(second)))
    assert [json.loads((folder / f"{length}.json").read_text())["lengths"] for length in FIXED] == [
        [length] for length in FIXED
    ]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" 95", 1.0),
        ("95\n", 1.0),
        (" 95\nQuestion: Which", 1.0),
        (" 59", 0.0),
        (" 95 is", 0.0),
        ("", 0.0),
        ("\n95", 0.0),
    ],
)
def test_only_the_first_line_counts_as_the_answer(completion, score):
    assert right(completion, "95") == score
