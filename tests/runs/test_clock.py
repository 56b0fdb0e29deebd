"""The record number and the iteration that rows carry, in full runs."""

import json

import pytest
from sources import TESTS

import rlflow
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

CRITIQUE = f"{TESTS / 'execution' / 'lineage.py'}::critique"
EMA = f"{TESTS / 'execution' / 'ema.py'}::ema"
SMALL = {"backend": "null", "prompts": 6, "threads": 1, "held_out": 0, "save_every": 0}
CLOCKS = ("told/prompt_id", "told#2/prompt_id", "told/iteration", "told#2/iteration", "told/progress")


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"question {n}", "answer": str(n)}) + "\n" for n in range(20))
    )
    return str(path)


def clocks(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in CLOCKS} for line in lines if CLOCKS[0] in line]


def test_a_resumed_run_continues_its_counts(records, tmp_path):
    straight = clocks(
        rlflow.run(CRITIQUE, data=records, out=str(tmp_path / "straight"), iterations=5, **SMALL).folder
    )
    folder = rlflow.run(CRITIQUE, data=records, out=str(tmp_path / "cut"), iterations=2, **SMALL).folder
    first = clocks(folder)
    resume(folder, {"iterations": 5}, Quiet())
    assert clocks(folder)[2:] == straight[2:]
    assert (
        [line["told/iteration"] for line in straight]
        == [line["told#2/iteration"] for line in straight]
        == list(range(5))
    )
    assert [line["told/progress"] for line in straight] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert [line["told/progress"] for line in first] == [0, 0.5]
    assert [line["told/prompt_id"] for line in first] == [line["told/prompt_id"] for line in straight[:2]]


def test_rows_carry_record_numbers_only_if_they_are_read(records):
    for name, there in ((CRITIQUE, True), ("grpo", False)):
        roles = rlflow.roles(name, data=records, **SMALL | {"prompts": 20, "held_out": 3})
        batch = roles.take()
        assert ("prompt_id" in batch) is there
        assert not there or batch["prompt_id"].tolist() == [int(answer) for answer in batch["answer"]]
        roles.close()


@pytest.mark.parametrize("controlled", [True, False])
def test_log_probs_use_the_computed_sampling_temperature(task, controlled):
    """The model's log-probs equal the sampler's only if both divide by the same temperature."""
    settings = {"hp.controlled": controlled, "hp.max_tokens": 4, "held_out": 4, "save_every": 0, "threads": 1}
    folder = rlflow.run(EMA, **task | settings | {"iterations": 3}).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "above/temperature" in line]
    heats = (
        [line["controlled/heat"] for line in lines] if controlled else [1.2 - 0.4 * n / 3 for n in range(3)]
    )
    assert [line["above/temperature"] for line in lines] == pytest.approx(heats)
    assert len(set(heats)) == 3
    assert all(line["policy/mismatch_max"] < 1e-3 for line in lines)


def test_a_reward_reads_record_numbers_in_training_and_evaluation(task, tmp_path):
    """The data have no answers, so the reward also scores the evaluation."""
    (tmp_path / "bare.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 0 ="}) + "\n" for n in range(60))
    )
    (tmp_path / "place.py").write_text(
        "def place(prompt_id, prompt):\n    return float(prompt == f'{prompt_id} + 0 =')\n"
    )
    settings = {
        "data": str(tmp_path / "bare.jsonl"),
        "reward": (f"{tmp_path / 'place.py'}:place",),
        "hp.max_tokens": 3,
    }
    result = rlflow.run("grpo", **task | settings | {"iterations": 1, "save_every": 0, "threads": 1})
    (line,) = [
        line
        for line in map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
        if "reward/mean" in line
    ]
    assert (line["reward/mean"], result.before.greedy, result.before.sampled) == (1.0, 1.0, 1.0)
