"""Bad days of a run: rewards that hang, die or lie, stages that never return, numbers that are not finite. What is bad
is left out and counted, and the run goes on; where nothing good is left it stops and says why."""

import json
import re
import time
from pathlib import Path

import pytest
from run_faults import BAD, MARK, command, content, left_over, marked, unequal

import rlflow
from rlflow.author import verbs
from rlflow.checkpoints.load import load_latest
from rlflow.errors import StageError

pytestmark = pytest.mark.slow

REWARD = '''
import math, os, signal, subprocess, sys, threading

def bad(completion):
    """One row of four: the null backend's completions are position.sample."""
    position = int(completion.split(".")[0])
    return action() if position % 4 == 1 else float(position)

def action():
    {action}
'''
MODES = {
    "hang": ("threading.Event().wait()", "timeout"),
    "hang with a child": ("subprocess.Popen(['sleep', '600']).wait()", "timeout"),
    "exit": ("os._exit(3)", "died"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "died"),
    "kill beside a child": ("subprocess.Popen(['sleep', '600']); os.kill(os.getpid(), signal.SIGKILL)", "died"),
    "sys.exit": ("sys.exit(0)", "raised"),
    "raise": ("raise ValueError('a bad row')", "raised"),
    "nan": ("return math.nan", "nan"),
    "inf": ("return math.inf", "nan"),
    "text": ("return 'good'", "type"),
    "None": ("return None", "none"),
    "list": ("return [1.0] * 7", "type"),
    "100 MB": ("return 'x' * 100_000_000", "type"),
}  # fmt: skip


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """All that a test starts bears it."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


def null_run(tmp_path, action, **changes):
    (tmp_path / "judge.py").write_text(REWARD.replace("{action}", action))
    keywords = {"backend": "null", "prompts": 8, "iterations": 2, "threads": 1, "reward_timeout": 0.5, "hp.samples": 2, **changes}
    return rlflow.run("grpo", reward=f"{tmp_path}/judge.py:bad", out=str(tmp_path / "runs"), **keywords)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_without_a_score_costs_its_row_and_the_run_goes_on(mode, tmp_path, mark):
    action, cause = MODES[mode]
    seconds = 0.5 if cause == "timeout" else 10.0  # however slow the machine is
    folder = null_run(tmp_path, action, reward_timeout=seconds).folder
    found = lines(folder)
    assert len(found) == 2
    for line in found:
        assert line[f"reward/missing_bad/{cause}"] == line["reward/missing"] == 4
        assert line["reward/missing_rate"] == 0.25
        assert (line["actor.update/left_out"], line["actor.update/rows"]) == (4, 12)
    scores = [json.loads(line)["scores"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert scores == [0, 0, None, None, 8, 8, None, None]  # none of them 0, and no other row's
    (said,) = [line for line in (folder / "notes.txt").read_text().splitlines() if "rewards are missing" in line]  # once for both
    assert f"iteration 0: 4 rewards are missing, and their rows are left out: bad/{cause}: " in said
    assert cause not in ("none", "nan", "type") or re.search(rf"{tmp_path}/judge\.py:\d+: the function returned", said)
    assert left_over(mark) == []


def test_more_missing_rewards_than_allowed_stop_the_run_with_the_cause(tmp_path, mark):
    with pytest.raises(StageError, match=r"25% of the rewards are missing, expected at most 20% \(--max-missing\)") as caught:
        null_run(tmp_path, "raise ValueError('a bad row')", max_missing=0.2)
    assert "bad/raised: " in str(caught.value)
    assert "judge.py:10: ValueError: a bad row" in str(caught.value)
    assert len(lines(tmp_path / "runs" / "grpo-1")) == 1
    assert marked(mark) == []


def test_a_stopped_run_exits_with_1_and_says_the_cause(tmp_path, mark):
    (tmp_path / "judge.py").write_text(REWARD.replace("{action}", "os._exit(3)"))
    ended = command(["run", "grpo", "--backend", "null", "--prompts", 4, "--hp.samples", 2, "--reward", f"{tmp_path}/judge.py:bad",
                     "--max-missing", 0.1, "--out", tmp_path / "runs"], tmp_path / "said")  # fmt: skip
    assert ended.code == 1
    assert "bad/died: the process exited with code 3" in ended.err
    assert "Traceback" not in ended.err
    assert json.loads((tmp_path / "runs/grpo-1/status.json").read_text())["state"] == "failed"
    assert left_over(mark) == []


def test_a_reward_may_take_its_deadline_for_every_row(tmp_path, monkeypatch):
    """Together longer than a node's own deadline."""
    monkeypatch.setitem(verbs.DEADLINES, "reward", 0.2)
    folder = null_run(tmp_path, "threading.Event().wait(0.15); return 1.0", iterations=1, reward_timeout=5).folder
    assert lines(folder)[0]["reward/missing"] == 0


NEVER = '''
import subprocess, threading
from rlflow import flow, loss, stage

@stage(gives="advantages", timeout=0.3)
def never(scores, mask):
    {action}
    threading.Event().wait()

@loss
def simple(new, advantages):
    return -new.logprobs * advantages

@flow
def stuck(prompts, actor, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= reward(batch)
    batch |= never(batch)
    actor.update(batch, simple)
'''


def test_a_stage_that_never_returns_is_named_at_its_deadline(tmp_path, mark):
    (tmp_path / "stuck.py").write_text(NEVER.replace("{action}", "pass"))
    (tmp_path / "judge.py").write_text(REWARD.replace("{action}", "return 1.0"))
    began = time.monotonic()
    ended = command(["run", tmp_path / "stuck.py", "--backend", "null", "--prompts", 4, "--reward", f"{tmp_path}/judge.py:bad",
                     "--out", tmp_path / "runs"], tmp_path / "said")  # fmt: skip
    assert ended.code == 1
    assert "stage 'never' failed in iteration 0 on 4 rows" in ended.err
    assert "no result after its deadline of 0.3 s" in ended.err
    assert time.monotonic() - began < 30
    assert left_over(mark) == []


# -- numbers -------------------------------------------------------------------------------------------------------------------


def bad_run(task, name, **changes):
    keywords = {**task, "held_out": 0, "save_every": 1, "iterations": 3, "schedule": "linear", "threads": 1, **changes}
    return rlflow.run(BAD, **keywords, name=name)


def tensors(folder):
    return load_latest(folder).snapshot.tensors


@pytest.mark.parametrize("place", ["scores", "values"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_rows_that_are_not_finite_are_left_out_as_if_they_were_not_there(place, value, task):
    with_them = bad_run(task, "with", **{"hp.place": place, "hp.value": value})
    without = bad_run(task, "without", **{"hp.drop": True})
    for line in lines(with_them.folder):
        for role in ("actor", "critic"):
            assert (line[f"{role}.update/left_out"], line[f"{role}.update/rows"], line[f"{role}.update/skipped_steps"]) == (2, 6, 0)
    assert list(unequal(tensors(with_them.folder), tensors(without.folder))) == []


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_of_logprobs_that_are_not_finite_only_who_reads_them_leaves_rows_out(value, task):
    with_them = bad_run(task, "with", iterations=1, **{"hp.place": "logprobs", "hp.value": value})
    without = bad_run(task, "without", iterations=1, **{"hp.drop": True})
    (line,) = lines(with_them.folder)
    assert (line["actor.update/left_out"], line["critic.update/left_out"]) == (2, 0)
    one, two = tensors(with_them.folder), tensors(without.folder)
    groups = [group for group in one if group.startswith("actor")]
    assert list(unequal({group: one[group] for group in groups}, {group: two[group] for group in groups})) == []


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_the_rate_does_not_fall(place, task):
    skipped = bad_run(task, "skipped", max_bad=0, **{"hp.place": place})
    start = bad_run(task, "start", iterations=1, max_bad=0, **{"hp.place": place})
    found = lines(skipped.folder)
    assert [line["actor.update/skipped_steps"] for line in found] == [1, 1, 1]
    assert [line["actor.update/lr"] for line in found] == [1e-3] * 3  # of the schedule's first step
    assert found[2]["critic.update/lr"] < found[0]["critic.update/lr"]
    one, two = tensors(skipped.folder), tensors(start.folder)
    assert list(unequal({"actor": one["actor.parameters"]}, {"actor": two["actor.parameters"]})) == []
    assert list(unequal({"critic": one["critic.parameters"]}, {"critic": two["critic.parameters"]})) != []


def test_nothing_finite_for_too_long_stops_the_run_and_names_the_samples(task):
    with pytest.raises(StageError, match=r"no finite step for 2 iterations in a row \(--max-bad\)") as caught:
        bad_run(task, "stopped", iterations=9, prompts=4, max_bad=2, **{"hp.place": "values", "hp.every": 1})
    assert "as position.sample: 4.0, 5.0, 6.0, 7.0" in str(caught.value)
    folder = Path(task["out"]) / "stopped"
    assert len(lines(folder)) == 2
    assert content(folder).iteration == 1  # the last that was good to go on from


def test_a_gradient_that_is_never_finite_stops_the_run_and_blames_no_sample(task):
    with pytest.raises(StageError, match=r"stage 'actor.update' failed in iteration 2 .*none: the gradient is not"):
        bad_run(task, "stopped", iterations=9, **{"hp.place": "gradient"})


def test_good_iterations_between_bad_ones_keep_a_run_alive(task, tmp_path):
    """Rewards that are missing in every other iteration."""
    (tmp_path / "judge.py").write_text("def odd(completion, answer):\n    return 1.0 if int(answer) % 2 else float('nan')\n")
    rows = [{"prompt": f"{a} + 0 =", "answer": str(n // 8 % 2)} for n, a in enumerate(range(10, 58))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = rlflow.run("grpo", **{**task, "data": str(tmp_path / "rows.jsonl"), "held_out": 0, "prompts": 24, "iterations": 4},
                        reward=f"{tmp_path}/judge.py:odd", max_missing=1.0, max_bad=1, **{"hp.samples": 2, "hp.max_tokens": 2})  # fmt: skip
    assert result.iterations == 4
