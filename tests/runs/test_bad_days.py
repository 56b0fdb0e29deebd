"""Failures within a run: rewards that hang, die or return wrong values, stages that never return, numbers
that are not finite. The run drops and counts bad rows and continues; if no good row is left, it stops and
names the reason."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from run_faults import BAD, MARK, command, content, left_over, marked, small, unequal

import rlflow
from rlflow.author import methods
from rlflow.checkpoints.reading import load_latest
from rlflow.errors import StageError
from rlflow.execution import summary
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import fork

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
    "raise": ("raise ValueError('a bad row')", "raised"),
    "sys.exit": ("sys.exit(0)", "raised"),
    "nan": ("return math.nan", "nan"),
    "inf": ("return math.inf", "nan"),
    "too large": ("return 1e308", "overflow"),
    "text": ("return 'good'", "type"),
    "list": ("return [1.0] * 7", "type"),
    "100 MB": ("return 'x' * 100_000_000", "type"),
    "None": ("return None", "none"),
    "hang": ("threading.Event().wait()", "timeout"),
    "hang with a child": ("subprocess.Popen(['sleep', '600']).wait()", "timeout"),
    "exit": ("os._exit(3)", "died"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "died"),
    "kill beside a child": (
        "subprocess.Popen(['sleep', '600']); os.kill(os.getpid(), signal.SIGKILL)",
        "died",
    ),
}
PROMPTS = 4 * len(MODES)  # of an iteration
IN_TURN = '''
import math, os, signal, subprocess, sys, threading

def bad(completion):
    """One prompt of four fails, each in another way, and in every iteration in the same ones; what ends or holds up a process does so for
    one of its samples."""
    position, sample = map(int, completion.split("."))
    number = position // 4 % len(ACTIONS)
    ways = position % 4 == 1 and (number < {lasting} or sample == 0)
    return ACTIONS[number]() if ways else float(position)

{actions}
ACTIONS = [{names}]
'''


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """Mark every process that a test starts."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


def null_run(tmp_path, action, **changes):
    (tmp_path / "judge.py").write_text(REWARD.replace("{action}", action))
    keywords = {"backend": "null", "prompts": 8, "iterations": 2, "threads": 1, "hp.samples": 2, **changes}
    return rlflow.run("grpo", reward=f"{tmp_path}/judge.py:bad", out=str(tmp_path / "runs"), **keywords)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def failing_reward():
    """Return the reward whose rows fail in all ways."""
    bodies = "".join(
        f"def way_{number}():\n    {action}\n" for number, (action, _) in enumerate(MODES.values())
    )
    lasting = sum(not ends(cause) for _, cause in MODES.values())
    return (
        IN_TURN.replace("{actions}", bodies)
        .replace("{names}", ", ".join(f"way_{number}" for number in range(len(MODES))))
        .replace("{lasting}", str(lasting))
    )


def ends(cause):
    """Return True if a row with this cause ends or blocks the process that scores it."""
    return cause in ("timeout", "died")


def test_a_row_without_a_score_is_dropped_and_the_run_continues(tmp_path, mark, monkeypatch):
    """The reward fails in every way instead of returning a score."""
    monkeypatch.setattr(summary, "SAMPLES", 2 * PROMPTS)  # so that all rows are written down
    (tmp_path / "judge.py").write_text(failing_reward())
    folder = rlflow.run(
        "grpo",
        reward=f"{tmp_path}/judge.py:bad",
        out=str(tmp_path / "runs"),
        backend="null",
        prompts=PROMPTS,
        iterations=2,
        threads=1,
        reward_timeout=5,
        **{"hp.samples": 2},
    ).folder
    found = lines(folder)
    assert len(found) == 2
    counts = Counter(cause for _, cause in MODES.values() for sample in range(1 if ends(cause) else 2))
    lost = counts.total()
    for line in found:
        assert {
            name.partition("/missing_bad/")[2]: value
            for name, value in line.items()
            if "/missing_bad/" in name
        } == counts
        assert line["reward/missing"] == lost
        assert line["reward/missing_rate"] == pytest.approx(lost / (2 * PROMPTS))
        assert (line["actor.update/left_out"], line["actor.update/rows"]) == (lost, 2 * PROMPTS - lost)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * PROMPTS
    for row in rows:
        position, sample = map(int, row["completion"].split("."))
        _, cause = list(MODES.values())[position // 4 % len(MODES)]
        bad = position % 4 == 1 and (sample == 0 or not ends(cause))
        # no score is 0, and none belongs to another row
        assert row["scores"] == (None if bad else position), row
    said = [line for line in (folder / "notes.txt").read_text().splitlines() if "rewards are missing" in line]
    assert len(said) == len(counts)  # once for both
    for cause, count in counts.items():
        (line,) = [
            line
            for line in said
            if f"iteration 0: {count} rewards are missing, and their rows are skipped: bad/{cause}: " in line
        ]
        assert cause not in ("none", "nan", "type") or re.search(
            rf"{tmp_path}/judge\.py:\d+: the function returned", line
        )
    assert left_over(mark) == []


def test_too_many_missing_rewards_stop_the_run_with_the_cause(tmp_path, mark):
    with pytest.raises(
        StageError, match=r"25% of the rewards are missing, expected at most 20% \(--max-missing\)"
    ) as caught:
        null_run(tmp_path, "raise ValueError('a bad row')", max_missing=0.2)
    assert "bad/raised: " in str(caught.value)
    assert "judge.py:10: ValueError: a bad row" in str(caught.value)
    assert len(lines(tmp_path / "runs" / "grpo-1")) == 1
    assert marked(mark) == []


def test_a_stopped_run_exits_with_1_and_names_the_cause(tmp_path, mark):
    (tmp_path / "judge.py").write_text(REWARD.replace("{action}", "os._exit(3)"))
    ended = command(
        [
            "run",
            "grpo",
            "--backend",
            "null",
            "--prompts",
            4,
            "--hp.samples",
            2,
            "--reward",
            f"{tmp_path}/judge.py:bad",
            "--max-missing",
            0.1,
            "--out",
            tmp_path / "runs",
        ],
        tmp_path / "said",
    )
    assert ended.code == 1
    assert "bad/died: the process exited with code 3" in ended.err
    assert "Traceback" not in ended.err
    assert json.loads((tmp_path / "runs/grpo-1/status.json").read_text())["state"] == "failed"
    assert left_over(mark) == []


def test_a_reward_may_use_its_deadline_for_every_row(tmp_path, monkeypatch):
    """All rows together may take longer than a node's own deadline."""
    monkeypatch.setitem(methods.DEADLINES, "reward", 0.2)
    folder = null_run(
        tmp_path, "threading.Event().wait(0.15); return 1.0", iterations=1, reward_timeout=5
    ).folder
    assert lines(folder)[0]["reward/missing"] == 0


NEVER = """
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
"""


def test_a_hanging_stage_is_named_at_its_deadline(tmp_path, mark):
    (tmp_path / "stuck.py").write_text(NEVER.replace("{action}", "pass"))
    (tmp_path / "judge.py").write_text(REWARD.replace("{action}", "return 1.0"))
    ended = command(
        [
            "run",
            tmp_path / "stuck.py",
            "--backend",
            "null",
            "--prompts",
            4,
            "--reward",
            f"{tmp_path}/judge.py:bad",
            "--out",
            tmp_path / "runs",
        ],
        tmp_path / "said",
    )
    assert ended.code == 1
    assert "stage 'never' failed in iteration 0 on 4 rows" in ended.err
    assert "no result after its deadline of 0.3 s" in ended.err
    assert left_over(mark) == []


# -- numbers
# ------------------------------------------------------------------------------------------------------------


def bad_run(task, name, **changes):
    keywords = {
        **task,
        "held_out": 0,
        "save_every": 1,
        "iterations": 3,
        "schedule": "linear",
        "threads": 1,
        **changes,
    }
    return rlflow.run(BAD, **keywords, name=name)


def tensors(folder):
    return load_latest(folder).snapshot.tensors


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Tensors of a run of this many iterations from which the rows that would be bad are removed."""
    return cache(
        lambda iterations: tensors(
            bad_run(
                small(tmp_path_factory.mktemp("without")),
                "without",
                iterations=iterations,
                **{"hp.drop": True},
            ).folder
        )
    )


@pytest.mark.parametrize("place", ["scores", "values"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_dropping_non_finite_rows_equals_a_run_without_them(place, value, task, without):
    with_them = bad_run(task, "with", **{"hp.place": place, "hp.value": value})
    for line in lines(with_them.folder):
        for role in ("actor", "critic"):
            assert (
                line[f"{role}.update/left_out"],
                line[f"{role}.update/rows"],
                line[f"{role}.update/skipped_steps"],
            ) == (2, 6, 0)
    assert list(unequal(tensors(with_them.folder), without(3))) == []


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_only_readers_of_non_finite_logprobs_drop_rows(value, task, without):
    with_them = bad_run(task, "with", iterations=1, **{"hp.place": "logprobs", "hp.value": value})
    (line,) = lines(with_them.folder)
    assert (line["actor.update/left_out"], line["critic.update/left_out"]) == (2, 0)
    one, two = tensors(with_them.folder), without(1)
    groups = [group for group in one if group.startswith("actor")]
    assert (
        list(unequal({group: one[group] for group in groups}, {group: two[group] for group in groups})) == []
    )


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_non_finite_step_is_skipped_and_keeps_the_rate(place, task):
    skipped = bad_run(task, "skipped", max_bad=0, **{"hp.place": place})
    start = bad_run(task, "start", iterations=1, max_bad=0, **{"hp.place": place})
    found = lines(skipped.folder)
    assert [line["actor.update/skipped_steps"] for line in found] == [1, 1, 1]
    assert [line["actor.update/lr"] for line in found] == [1e-3] * 3  # of the schedule's first step
    assert found[2]["critic.update/lr"] < found[0]["critic.update/lr"]
    one, two = tensors(skipped.folder), tensors(start.folder)
    assert list(unequal({"actor": one["actor.parameters"]}, {"actor": two["actor.parameters"]})) == []
    assert list(unequal({"critic": one["critic.parameters"]}, {"critic": two["critic.parameters"]})) != []


def test_too_many_non_finite_iterations_stop_the_run(task):
    with pytest.raises(
        StageError, match=r"no finite optimizer step for 2 iterations in a row \(--max-bad\)"
    ) as caught:
        bad_run(task, "stopped", iterations=9, prompts=4, max_bad=2, **{"hp.place": "values", "hp.every": 1})
    assert "as position.sample: 4.0, 5.0, 6.0, 7.0" in str(caught.value)
    folder = Path(task["out"]) / "stopped"
    assert len(lines(folder)) == 2
    assert content(folder).iteration == 1  # the last good checkpoint to resume from


def test_a_gradient_that_is_never_finite_stops_the_run(task):
    with pytest.raises(
        StageError, match=r"stage 'actor.update' failed in iteration 2 .*none; the gradient is not"
    ):
        bad_run(task, "stopped", iterations=9, **{"hp.place": "gradient"})


def test_exploding_weights_end_the_run_and_keep_the_finite_checkpoint(task):
    folder = bad_run(task, "sound", iterations=2).folder
    before, digest = tensors(folder), (folder / "final" / "actor" / "model.safetensors").read_bytes()
    with pytest.raises(
        StageError, match=r"stage 'critic.update' failed in iteration 2 .*parameters have NaN or infinities"
    ):
        fork(folder, {"iterations": 4, "lr": 1e38, "schedule": "constant", "name": "wild"}, Quiet())
    assert all(bool(tensor.isfinite().all()) for group in before.values() for tensor in group.values())
    assert list(unequal(tensors(folder), before)) == []
    assert (folder / "final" / "actor" / "model.safetensors").read_bytes() == digest
    assert not (folder.parent / "wild" / "final").exists()


SPOILS = """
from rlflow import ALL, flow, loss, stage

CALLS = []

@stage(on="reference", dispatch=ALL, pure=False)
def spoil(reference, scores):
    CALLS.append(0)
    for _, weight in reference.weights():
        weight.detach().mul_(float("inf") if len(CALLS) == 2 else 1.0)

@loss
def gain(new, scores):
    return -new.logprobs * scores[:, None]

@flow
def spoils(prompts, actor, reference, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    spoil(batch)
    actor.update(batch, gain)
"""


def test_weights_broken_by_a_stage_are_not_saved(task, tmp_path):
    (tmp_path / "spoils.py").write_text(SPOILS)
    message = (
        r"spoils.py:20: .*in iteration 1: 24 of 24 weights of 'reference' have NaN .*may change them: 'spoil'"
    )
    with pytest.raises(StageError, match=message) as caught:
        rlflow.run(
            str(tmp_path / "spoils.py"),
            **{**task, "iterations": 3, "save_every": 1, "held_out": 0, "prompts": 2},
            name="spoiled",
        )
    folder = Path(task["out"]) / "spoiled"
    assert content(folder).iteration == 1
    assert "rlflow resume" in str(caught.value)
    assert not (folder / "final").exists()


def test_good_iterations_between_bad_ones_keep_a_run_going(task, tmp_path):
    """Rewards are missing in every second iteration."""
    (tmp_path / "judge.py").write_text(
        "def odd(completion, answer):\n    return 1.0 if int(answer) % 2 else float('nan')\n"
    )
    rows = [{"prompt": f"{a} + 0 =", "answer": str(n // 8 % 2)} for n, a in enumerate(range(10, 58))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = rlflow.run(
        "grpo",
        **{**task, "data": str(tmp_path / "rows.jsonl"), "held_out": 0, "prompts": 24, "iterations": 4},
        reward=f"{tmp_path}/judge.py:odd",
        max_missing=1.0,
        max_bad=1,
        **{"hp.samples": 2, "hp.max_tokens": 2},
    )
    assert result.iterations == 4
