"""Runs with an environment: no algorithm changes, and every guarantee of a run holds."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from run_faults import TIMES, content, differences, in_child, resumed
from safetensors.torch import load_file
from sources import TESTS

import rlflow
from rlflow.author.load import load_flow
from rlflow.config.flags import flat
from rlflow.errors import PlanError, StageError
from rlflow.monitoring.outputs import make_reporter
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.resume import resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

FILE = TESTS / "rewards" / "environments" / "again.py"
HP = {"hp.max_tokens": 16, "hp.samples": 4}


@pytest.fixture
def again(task):
    """Keywords of a small run that lets the model answer twice."""
    return {**task, **HP, "env": f"{FILE}:Again", "env.turns": 2, "env.parallel": 1, "prompts": 6}


def lines(result):
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def weights(result):
    return load_file(next(result.folder.glob("final/actor/model.safetensors")))


def samples(result):
    return [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("flow", ["grpo", "ppo"])
def test_a_flow_trains_on_the_replies_of_all_turns(again, flow):
    result = rlflow.run(
        flow, **{name: value for name, value in again.items() if flow == "grpo" or name != "hp.samples"}
    )
    iterations = [line for line in lines(result) if "actor.update/loss" in line]
    assert all(1 < line["env/turns"] <= 2 for line in iterations)
    assert all(line["env/failed"] == 0 for line in iterations)
    assert all(line["env/tries"] >= 1 for line in iterations)
    # trainer and sampler agree on full episodes
    assert all(line["policy/mismatch_max"] < 1e-4 for line in iterations)
    episodes = [row["episode"]["turns"] for row in samples(result)]
    assert any(len(turns) == 2 and turns[0]["says"] == " no. " for turns in episodes)
    assert {row["finish"] for row in samples(result)} <= {"env", "turns", "length"}
    assert result.after is not None  # measured inside the environment


@pytest.mark.slow
def test_a_silent_environment_changes_no_bit(task):
    plain = rlflow.run("grpo", **task, **HP, reward=["task"], name="plain")
    silent = rlflow.run("grpo", **task, **HP, reward=["task"], name="silent", env=f"{FILE}:Quiet")
    assert all(torch.equal(tensor, weights(silent)[name]) for name, tensor in weights(plain).items())
    own = [
        {name: value for name, value in line.items() if name not in TIMES and not name.startswith("env/")}
        for line in lines(silent)
    ]
    assert own == [
        {name: value for name, value in line.items() if name not in TIMES} for line in lines(plain)
    ]
    assert silent.after == plain.after


@pytest.mark.slow
def test_shipped_scorers_score_the_last_reply(again):
    own = rlflow.run("grpo", **again, name="own")
    task = rlflow.run("grpo", **again, name="task", reward=["task"])
    assert [line.get("reward/mean") for line in lines(own)] == [
        line.get("reward/mean") for line in lines(task)
    ]
    assert own.after == task.after


def test_a_failed_episode_is_counted_by_its_cause(again):
    broken = {**again, "env": f"{FILE}:Broken", "max_missing": 1.0, "held_out": 0}
    result = rlflow.run("grpo", **broken)
    iterations = lines(result)
    missing = sum(
        line["reward/missing_env_raised"] for line in iterations if "reward/missing_env_raised" in line
    )
    assert missing > 0
    outcomes = [
        end
        for line in (result.folder / "fates.jsonl").read_text().splitlines()
        for end in json.loads(line)["fates"]
    ]
    assert sum(end["rows"] for end in outcomes if end.get("cause") == "episode failed: raised") == missing
    assert any(row["finish"] == "failed" and row["scores"] is None for row in samples(result)) or missing < 48
    with pytest.raises(
        StageError, match=r"rewards are missing.*env_raised: .*ConnectionError: the service is away"
    ):
        rlflow.run("grpo", **{**broken, "max_missing": 0.0})


def test_null_backend_episodes_depend_only_on_the_seed(again):
    keywords = {name: value for name, value in again.items() if name != "model"} | {"backend": "null"}
    del keywords["lr"]
    one, other = (rlflow.run("grpo", **keywords, name=name) for name in ("one", "other"))
    assert samples(one) == samples(other)
    assert any(len(row["episode"]["turns"]) == 2 for row in samples(one))


def test_an_eager_iteration_equals_the_compiled_one(again):
    flow = load_flow("grpo")
    keywords = again | {"held_out": 0, "iterations": 1}
    result = rlflow.run("grpo", **keywords)
    with rlflow.roles("grpo", **keywords) as roles:
        flow(roles.take(), **roles)
        trained = dict(roles.prepared.engine.models["actor"].trainer.weights())
        assert all(
            torch.equal(tensor, trained[name]) for name, tensor in weights(result).items() if name in trained
        )


@pytest.mark.slow
def test_a_run_killed_while_sampling_resumes_unchanged(again):
    keywords = again | {"save_every": 1, "held_out": 0, "iterations": 3}

    def dying():
        steps, step = itertools.count(1), EnvironmentPool.step

        def last_step(*arguments):
            if next(steps) == 6:  # the second turn of the third iteration
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        EnvironmentPool.step = last_step
        rlflow.run("grpo", **keywords, name="cut")

    assert in_child(dying) == -signal.SIGKILL
    straight = rlflow.run("grpo", **keywords, name="straight")
    cut = Path(keywords["out"]) / "cut"
    resumed(cut)
    assert not list(differences(content(straight.folder), content(cut)))


def test_resume_warns_of_an_environment_that_cannot_be_repeated(again, tmp_path, capsys):
    keywords = again | {
        "env": f"{FILE}:Quiet",
        "held_out": 0,
        "reward": ["task"],
        "save_every": 1,
        "iterations": 1,
    }
    result = rlflow.run("grpo", **{name: value for name, value in keywords.items() if name != "env.turns"})
    resume(result.folder, {"iterations": 2}, make_reporter(False))
    assert "again.py:Quiet declares that it cannot replay an episode" in " ".join(
        capsys.readouterr().out.split()
    )


def test_resume_refuses_a_changed_environment(again, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(FILE.read_text())
    result = rlflow.run("grpo", **again | {"env": f"{own}:Again", "iterations": 1, "held_out": 0})
    own.write_text(FILE.read_text().replace('f" {self.word}. "', '"never"'))
    with pytest.raises(PlanError, match="the algorithm has changed since this run was started"):
        resume(result.folder, {"iterations": 2}, make_reporter(True))


def test_resume_refuses_a_changed_file_named_by_a_setting(task, tmp_path):
    own, corpus = tmp_path / "own.py", tmp_path / "corpus.txt"
    own.write_text(
        "from pathlib import Path\nfrom rlflow import Turn\nclass Own:\n    def __init__(self, *, corpus: "
        "Path): pass\n    def step(self, said): return Turn(reward=1.0)\n"
    )
    corpus.write_text("Lund lies in Sweden.")
    keywords = (
        {name: value for name, value in task.items() if name not in ("model", "lr")}
        | HP
        | {"backend": "null", "held_out": 0}
    )
    result = rlflow.run(
        "grpo", **keywords | {"env": f"{own}:Own", "env.corpus": str(corpus), "iterations": 1}
    )
    corpus.write_text("Lund lies in Norway.")
    with pytest.raises(PlanError, match="depends on has changed") as refused:
        resume(result.folder, {"iterations": 2}, make_reporter(True))
    assert "environment own.py:Own: corpus" in str(refused.value)


def test_the_data_columns_that_an_environment_reads_are_carried(task, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from rlflow import Turn\nclass Own:\n    def reset(self, hint, *, seed): self.hint = hint\n"
        "    def step(self, said): return Turn(reward=float(self.hint['n']), done=True)\n"
    )
    data = tmp_path / "hints.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "hint": {"n": 3}}) + "\n" for n in range(40)))
    result = rlflow.run("grpo", **{**task, "data": str(data)}, **HP, env=f"{own}:Own")
    assert lines(result)[1]["reward/mean"] == 3.0
    config, hp = resolve_config(load_flow("grpo"), None, flat({**task, **HP, "env": f"{own}:Own"}))
    with pytest.raises(rlflow.FlowError, match=r"own.py:2(?s:.*)--data.hint FIELD"):
        prepare(load_flow("grpo"), hp, config)
