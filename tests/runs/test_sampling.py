"""--ROLE.generate.NAME in full runs: evaluation, records, pools, and resume."""

import json
import random
import shutil

import pytest

import rlflow
import rlflow.data.tasks
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import resume

MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
STOPS = {"actor.generate.stop": ["\n\n"], "actor.generate.temperature": 0.8}


@pytest.fixture
def base(tmp_path):
    """A model that answers but does not stop: its end token is an ordinary word, after which it continues."""
    folder = tmp_path / "base"
    shutil.copytree(MODEL, folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": 0}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] != 1]
    tokenizer["model"]["vocab"]["ĊĊ"] = tokenizer["model"]["vocab"].pop("<eos>")  # two line ends
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | {"eos_token": "<pad>"}))
    chance = random.Random(0)
    sums = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(40)]
    ask = "State the final answer to the following arithmetic problem:"
    records = [{"prompt": f"{ask} {a} + {b} =", "answer": str(a + b)} for a, b in sums]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "model": str(folder),
        "reward": ["task"],
        "data": str(tmp_path / "sums.jsonl"),
        "prompts": 2,
        "held_out": 24,
        "threads": 1,
        "hp.max_tokens": 12,
        "hp.samples": 2,
        "iterations": 1,
    }


@pytest.mark.slow
def test_a_stop_string_ends_the_answers_of_a_base_model(base, tmp_path):
    endless = rlflow.run("grpo", out=str(tmp_path / "endless"), **base)
    stopped = rlflow.run("grpo", out=str(tmp_path / "stopped"), **base, **STOPS)
    instructed = rlflow.run("grpo", out=str(tmp_path / "instructed"), **base | {"model": MODEL})
    assert (stopped.before.greedy, stopped.before.sampled) == (
        instructed.before.greedy,
        instructed.before.sampled,
    )
    assert endless.before.greedy < stopped.before.greedy
    assert endless.before.sampled < stopped.before.sampled
    settings = json.loads((stopped.folder / "settings.json").read_text())
    assert "0.8" in json.dumps(settings)
    assert "\\n\\n" in json.dumps(settings)
    samples = [json.loads(line) for line in (stopped.folder / "samples.jsonl").read_text().splitlines()]
    assert all(sample["completion"].count("\n\n") <= 1 for sample in samples)
    again = resume(stopped.folder, {"iterations": 2}, Quiet())
    assert again.before.greedy == stopped.before.greedy
