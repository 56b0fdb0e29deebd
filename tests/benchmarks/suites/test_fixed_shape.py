"""The model of the speed suites: it is reproducible, and all its responses can have the same length."""

import json

import pytest
from transformers import AutoTokenizer

import rlflow
from rlflow.benchmarks.suites.fixed_shape import FIXED, LENGTHS, LONG, PROMPTS, make
from rlflow.checkpoints.model_files import weight_files


@pytest.mark.slow
def test_every_response_can_have_the_full_length(tmp_path):
    (tmp_path / "again").mkdir()
    make(tmp_path)
    make(tmp_path / "again")
    assert [file.read_bytes() for file in weight_files(tmp_path / "model")] == [
        file.read_bytes() for file in weight_files(tmp_path / "again" / "model")
    ]
    run = rlflow.run(
        "grpo",
        model=str(tmp_path / "model"),
        data=str(tmp_path / "data.jsonl"),
        reward=[f"{tmp_path}/reward.py:digits"],
        prompts=4,
        iterations=1,
        held_out=0,
        save_every=0,
        out=str(tmp_path),
        **{"hp.samples": 2, "hp.max_tokens": 9, "actor.generate.min_tokens": 9},
    )
    assert run.last["response/length"] == 9.0
    assert json.loads((tmp_path / "fixed.json").read_text())["lengths"] == [FIXED]
    assert len((tmp_path / "data.jsonl").read_text().splitlines()) == PROMPTS
    assert json.loads((tmp_path / "data.jsonl").read_text().splitlines()[0])["prompt"].startswith("Add ")
    tokenizer = AutoTokenizer.from_pretrained(
        tmp_path / "model", local_files_only=True, trust_remote_code=False
    )
    long = [
        len(tokenizer(json.loads(line)["prompt"]).input_ids)
        for line in (tmp_path / "long.jsonl").read_text().splitlines()
    ]
    assert len(long) == PROMPTS
    assert LONG - 20 <= min(long) <= max(long) <= LONG + 25


def test_the_shipped_list_fills_whole_iterations_and_names_its_model():
    shipped = json.loads(LENGTHS.read_text())
    lengths = shipped["lengths"]
    assert len(lengths) % 32 == 0
    assert min(lengths) >= 1
    assert max(lengths) <= 256
    assert len(set(lengths)) > 20
    assert shipped["source"]
