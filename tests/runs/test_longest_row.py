"""Runs of models whose rotary frequencies follow the longest row. The run chooses the frequencies once and
records them; resume, fork and export keep them."""

import json

import pytest
from small_models import MARKS, make
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import rlflow
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import resume

pytestmark = pytest.mark.slow
ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
PROMPTS = ["1 + 1 =", "What is one and one, in a word? Say it."] * 4  # at most 39 bytes


@pytest.fixture
def settings(tmp_path):
    folder = make(tmp_path / "model", "llama")
    config = LlamaConfig(
        **MARKS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rope_parameters=ROPE,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    records = [json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in PROMPTS]
    (tmp_path / "data.jsonl").write_text("".join(records))
    (tmp_path / "judge.py").write_text("def length(completion):\n    return len(completion.encode()) % 3\n")
    return {
        "model": str(folder),
        "data": str(tmp_path / "data.jsonl"),
        "reward": f"{tmp_path}/judge.py:length",
        "out": str(tmp_path / "runs"),
        "prompts": 4,
        "iterations": 1,
        "held_out": 0,
        "hp.samples": 2,
        "hp.max_tokens": 8,
        "threads": 1,
    }


class Notes(Quiet):
    """A reporter that keeps a run's notes."""

    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


def test_a_run_chooses_frequencies_once_and_resume_keeps_them(settings):
    folder = rlflow.run("grpo", **settings, name="one").folder
    recorded = json.loads((folder / "settings.json").read_text())
    assert (recorded["options"]["longest_row"], recorded["values"]["longest_row"]) == (39 + 8, 39 + 8)
    assert "rotary frequencies of actor depend on the longest row" in (folder / "notes.txt").read_text()
    (line,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert line["policy/mismatch_max"] < 1e-4
    told = Notes()
    resume(folder, {"iterations": 2}, told)
    assert any("those for rows of at most 47 tokens" in line for line in told.lines)
    assert AutoConfig.from_pretrained(folder / "final" / "actor").rope_parameters == ROPE


def test_a_longest_row_too_short_for_the_data_is_refused(settings):
    with pytest.raises(
        PlanError, match=r"rows can be longer(.|\n)*--longest-row 40\n(.|\n)*--longest-row 47"
    ):
        rlflow.run("grpo", **settings, longest_row=40)
