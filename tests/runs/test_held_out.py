"""What is measured on held-out prompts, and when."""

import json

from run_faults import MODEL, write_sums

import rlflow

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
