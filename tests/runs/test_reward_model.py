"""A reward model trained by one run scores the rows of another, with the commands of docs/models.md."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from small_models import make
from sources import ROOT
from transformers import AutoModelForSequenceClassification

import rlflow
from rlflow.cli.main import exit_code
from rlflow.errors import PlanError

PAGE = (ROOT / "docs" / "models.md").read_text()


def run_command(line):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = exit_code(shlex.split(line)[1:])
    assert code == 0, out.getvalue()


def lines(run):
    return [json.loads(line) for line in Path("runs", run, "metrics.jsonl").read_text().splitlines()]


def direct(folder, batch):
    """Return the scores of a plain transformers forward, row by row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = (batch.rows([i]) for i in range(len(batch)))
    with torch.no_grad():
        return torch.stack(
            [model(torch.cat([row["prompt_tokens"][0], row["tokens"][0]])[None]).logits[0, 0] for row in rows]
        )


@pytest.mark.slow
def test_a_reward_model_learns_pairs_and_scores_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = PAGE[PAGE.index("## A reward model, trained and used") :]
    commands = re.search(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert len(commands) == 2
    for command in commands:
        run_command(command)
    accuracy = [row["reward.update/accuracy"] for row in lines("judge") if "reward.update/accuracy" in row]
    assert sum(accuracy[-5:]) > sum(accuracy[:5])
    folder = Path("runs/judge/final/reward")
    # the seed of the run: its first iteration again
    roles = rlflow.roles("ppo", reward=str(folder), prompts=64, held_out=64)
    try:
        batch = roles["actor"].generate(roles.take(), samples=1, max_tokens=8)
        scores = roles["reward"](batch)["scores"]
    finally:
        roles.close()
    torch.testing.assert_close(scores, direct(folder, batch), atol=1e-5, rtol=0)
    assert scores.std() > 0.1
    samples = [json.loads(line) for line in Path("runs/judged/samples.jsonl").read_text().splitlines()]
    assert [sample["completion"] for sample in samples[:4]] == batch["completion"][:4]
    assert [sample["scores"] for sample in samples[:4]] == pytest.approx(scores[:4].tolist(), abs=1e-5)
    judged = [row for row in lines("judged") if "reward/mean" in row]
    assert judged[0]["reward/mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert judged[0]["actor.update/steps"] >= 1


def test_a_reward_model_with_another_tokenizer_is_refused(task, tmp_path):
    other = make(tmp_path / "other", "llama")
    with pytest.raises(PlanError, match=r"uses other tokens(.|\n)*file.py:function"):
        rlflow.run("grpo", **task, **{"hp.max_tokens": 8}, reward=str(other))
