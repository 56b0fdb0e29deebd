"""Full runs of the shipped algorithms on four architectures: they learn, sampler and trainer agree, and the
saved model is the trained one."""

import json
import math

import pytest
import torch
from small_models import CONFIGS, make
from transformers import AutoModelForCausalLM

import rlflow
from rlflow.author.batch import Batch
from rlflow.backends.local import Trainer
from rlflow.checkpoints.reading import load_latest
from rlflow.checkpoints.role_tensors import trainer_state
from rlflow.training.protocols import ModelSpec

pytestmark = pytest.mark.slow

SETTINGS = {
    "sft": {"data.completion": "answer"},
    "ppo": {"hp.samples": 2, "hp.max_tokens": 12, "hp.minibatch": 8},
    "grpo": {"hp.samples": 4, "hp.max_tokens": 12, "hp.minibatch": 16, "hp.beta": 0.1},
}


SPREAD = """def spread(completion):  # differs between random responses
    return sum(completion.encode()) % 11 / 10
"""


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / request.param, request.param)


def finite(result):
    """Return the metrics of the iterations, after checking that all are finite."""
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "actor.update/loss" in row]
    assert [
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    ] == []
    return rows


def same_logits(trainer, folder):
    """Check that a plain transformers forward, row by row, gives the trainer's log-probs; return the
    model."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chance = torch.Generator().manual_seed(0)
    rows = Batch.of(
        prompt_tokens=[torch.randint(2, 250, (n,), generator=chance) for n in (1, 9, 20)],
        tokens=[torch.randint(2, 250, (n,), generator=chance) for n in (15, 4, 11)],
    )
    found = trainer.forward(rows)["logprobs"]
    for i in range(3):
        row = rows.rows([i])
        prompt, tokens = row["prompt_tokens"][0], row["tokens"][0]
        with torch.no_grad():
            logits = plain(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(found[i, : len(tokens)], wanted, atol=1e-5, rtol=0)
    return plain


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_learns_and_saves_the_trained_model(name, model, task, tmp_path):
    # in a file of its own, because each reward process imports the same modules as this file
    (tmp_path / "spread.py").write_text(SPREAD)
    reward = f"{tmp_path}/spread.py:spread"
    result = rlflow.run(
        name, **{**task, "model": str(model), "held_out": 0, "lr": 1e-3}, **SETTINGS[name], reward=reward
    )
    rows = finite(result)
    assert [row["actor.update/skipped_steps"] + row["actor.update/left_out"] for row in rows] == [0, 0]
    if name != "sft":
        assert all(0 < row["policy/mismatch_max"] < 1e-4 for row in rows)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    trained = Trainer(ModelSpec(model, trained=True))
    trained.restore(trainer_state(load_latest(result.folder).snapshot.tensors, "actor"))
    after = same_logits(trained, result.folder / "final" / "actor").state_dict()
    assert after.keys() == before.keys()
    assert sum(not torch.equal(after[key], before[key]) for key in before) > 0.9 * len(before)
    assert all(torch.equal(after[key], tensor) for key, tensor in trained.weights())
    if name == "ppo":
        critic = Trainer(ModelSpec(result.folder / "final" / "critic", "values"))
        assert critic.network.head.weight.abs().max() > 0
