"""Held-out accuracy of another system: batches give the same answers as single questions."""

import json
import sys

import pytest
import torch
from run_faults import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow.benchmarks.cells import PEERS


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    yield __import__("_held_out").accuracy
    sys.modules.pop("_held_out")


def test_a_batch_gives_the_same_answers_as_single_questions(accuracy, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)
    tokenizer.padding_side = "right"
    questions = [f"{a} + {b} =" for a, b in [(1, 2), (30, 41), (12, 7), (55, 20), (9, 9), (100, 3)]]
    alone = {}
    for prompt in questions:
        row = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=6, do_sample=False)
        alone[prompt] = tokenizer.decode(row[0, len(tokenizer(prompt).input_ids) :], skip_special_tokens=True)
    file = tmp_path / "held.jsonl"
    records = [
        {"prompt": prompt, "answer": alone[prompt] if number % 3 else "?"}
        for number, prompt in enumerate(questions)
    ]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    model.train()
    share = accuracy(
        model, tokenizer, str(file), 6, lambda completion, answer: float(completion == answer), torch.float32
    )
    assert share == pytest.approx(4 / 6)
    assert model.training
    assert tokenizer.padding_side == "right"
